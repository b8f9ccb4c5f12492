"""Four questions about one scene, one after the other: counts right answers without and with whole rows.

    python3 scripts/dev.py python experiments/measure_chains.py --scenes 200 --save chains.jsonl > chains.md
    python3 scripts/dev.py python experiments/measure_chains.py --table chains.jsonl more.jsonl

The scenes are held out; each kind of question comes equally often at each place. Earlier questions have the reference
answers. Four ways: `share` compresses each message to its share of the budget; `without` is a chat, where a later
message keeps at least 32 tokens; `keep` is that chat with whole rows; `prompt` reads the conversation up to the
question as one prompt, in a separate sequence. An answer is right if greedy decoding gives the tokens of the reference
and then an end token. For `keep` against `prompt`, the heads with different pairs are counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401
from llama_source import ROOT, log

from kvedge_lab.eval.measure import Cell, Preparer, Turn, _groups, _joined
from kvedge_lab.eval.reader import BRANCH, Reader
from kvedge_lab.eval.runner import FULL, full_cell
from kvedge_lab.eval.tasks import Sample, demo_samples
from kvedge_lab.jsonlines import JsonLines
from kvedge_lab.progress import Steps
from pykvedge.cli.tables import markdown
from pykvedge.errors import KvedgeError
from pykvedge.models.model import Model
from pykvedge.models.vision import Piece, TextPiece, Vision
from pykvedge.plans.making import plan
from pykvedge.plans.presets import methods
from pykvedge.reference.kvtypes import KEEP_TYPES
from pykvedge.runtime.loaded import borrow
from pykvedge.runtime.replay import extra_tokens
from pykvedge.runtime.settings import Keep, Settings

DATA = ROOT / "pykvedge" / "data"
ONE = ("code", "colour", "where", "shape")  # tasks about one image
FOUR = ("which-image", "code-in-image-k")  # tasks about four images
SHARE, WITHOUT, KEEP, PROMPT = "share", "without", "keep", "prompt"
WAYS = (SHARE, WITHOUT, KEEP, PROMPT)


@dataclass
class Talk:
    """A conversation as tokens. answers: the reference answer of each question."""

    turns: list[Turn]
    answers: list[list[int]]

    def as_one(self, questions: int, one_batch: bool) -> list[Piece]:
        """Joins the conversation up to a question. one_batch: consecutive texts become one batch."""
        turns = [*self.turns[: questions - 1], (self.turns[questions - 1][0], [])]
        pieces = _joined(turns)
        return merged(pieces) if one_batch else pieces


def merged(pieces: list[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        if out and isinstance(piece, TextPiece) and isinstance(out[-1], TextPiece):
            out[-1] = TextPiece([*out[-1].tokens, *piece.tokens])
        else:
            out.append(piece)
    return out


def chains(scenes: int, seed: int, images: int) -> list[Sample]:
    """Draws equally many scenes for each order of questions. Each kind of question comes at each place."""
    kinds = ONE if images == 1 else FOUR * 2
    orders = [kinds[i:] + kinds[:i] for i in range(len(kinds) if images == 1 else 2)]
    drawn = (demo_samples("+".join(order), len(range(i, scenes, len(orders))), seed, images)
             for i, order in enumerate(orders))  # fmt: skip
    return [one for of in itertools.zip_longest(*drawn) for one in of if one is not None]


def mean_length(held: list[list[list[int]]]) -> float:
    lengths = [len(tokens) for heads in held for tokens in heads]
    return sum(lengths) / max(len(lengths), 1)


class Chains:
    """Asks the questions of a chain with a reader for each way."""

    def __init__(self, model: Model, vision: Vision, args: argparse.Namespace) -> None:
        self._model, self._one_batch, self._ways = model, args.batches == "one", args.ways.split(",")
        kept = Keep(args.keep, type=args.keep_type)
        self._readers = {
            way: Reader(model, vision, args.threads, "f16", keep=kept if way == KEEP else None) for way in self._ways
        }
        for way, reader in self._readers.items():
            reader.later_floor = 0 if way == SHARE else None

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def ask(self, talk: Talk, cells: list[Cell]) -> Iterator[dict[str, Any]]:
        """Yields a record for each cell that can be measured."""
        for group in _groups(cells):
            try:
                yield from self._group(talk, group)
            except KvedgeError as error:
                log(f"{', '.join(f'{c.name} {c.budget}' for c in group)} left out: {error}")

    def _group(self, talk: Talk, cells: list[Cell]) -> list[dict[str, Any]]:
        out: dict[tuple[str, str], dict[str, Any]] = {
            cell.key: {"method": cell.name, "budget": cell.budget, "other_heads": [], "pairs": {}} for cell in cells
        }
        pairs: dict[tuple[str, str], list[Any]] = {}
        for way, reader in self._readers.items():
            if way == PROMPT:
                continue
            for cell in self._each(reader, talk, talk.turns[0][0], cells):
                right, held = self._walk(reader, talk)
                out[cell.key][way] = right
                out[cell.key]["pairs"][way] = [mean_length(one) for one in held]
                if way == KEEP:
                    pairs[cell.key] = held
        if PROMPT in self._ways:
            self._as_one(talk, cells, out, pairs)
        return list(out.values())

    def _as_one(self, talk: Talk, cells: list[Cell], out: dict[Any, dict[str, Any]], pairs: dict[Any, Any]) -> None:
        """Reads the conversation up to each question as one prompt. pairs: of way `keep`, by cell and question."""
        reader = self._readers[PROMPT]
        for n in range(1, len(talk.turns) + 1):
            for cell in self._each(reader, talk, talk.as_one(n, self._one_batch), cells):
                record, held = out[cell.key], reader.pairs()
                right = self._answered(reader, talk.answers[n - 1], to_end=False)
                record.setdefault(PROMPT, []).append(right)
                if cell.key in pairs:
                    heads = zip(itertools.chain(*held), itertools.chain(*pairs[cell.key][n - 1]), strict=True)
                    record["other_heads"].append(sum(mine != theirs for mine, theirs in heads))

    def _each(self, reader: Reader, talk: Talk, pieces: list[Piece], cells: list[Cell]) -> Iterator[Cell]:
        """Reads a prompt once. Yields each cell after compressing a copy of the prompt with the cell's plan."""
        longest = sum(p.n_tokens for turn, reply in talk.turns for p in turn) + sum(map(len, talk.answers))
        largest = max(p.n_tokens for p in talk.turns[0][0])
        reader.make_room(longest, 8, largest, max(extra_tokens(cell.plan, longest, largest) for cell in cells))
        reader.start(cells[0].plan)
        reader.read(pieces)
        for cell in cells:
            reader.copy(BRANCH)
            reader.set_plan(cell.plan)
            reader.compress()
            yield cell
            reader.drop_copies()

    def _walk(self, reader: Reader, talk: Talk) -> tuple[list[bool], list[Any]]:
        """Asks all questions; the first is already read and compressed. Returns which were right, and pairs held."""
        right, pairs = [], []
        for i, (turn, _) in enumerate(talk.turns):
            if i:
                reader.read(turn)
                reader.compress()
            pairs.append(reader.pairs())
            right.append(self._answered(reader, talk.answers[i], to_end=True))
        return right, pairs

    def _answered(self, reader: Reader, answer: list[int], to_end: bool) -> bool:
        """Reads the reference answer. Returns whether each token and the end were the likeliest.

        to_end: reads all tokens even after a wrong one.
        """
        right = True
        for token in answer:
            right = right and int(reader.logits().argmax()) == token
            if not right and not to_end:
                return False
            reader.extend(token)
        return right and self._model.is_end(int(reader.logits().argmax()))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    names = [name for name in methods() if name != FULL] if args.method == "all" else args.method.split(",")
    cells = [full_cell(), *(Cell(name, plan(name, b)) for b in args.budget.split(",") for name in names)]
    rows = _rows([args.save]) if args.save is not None and args.save.exists() else []
    there = {(row["id"], row["method"], row["budget"]) for row in rows}
    file = JsonLines(args.save, args.save.stat().st_size if rows else 0)
    settings = Settings(threads=args.threads)
    loan = borrow(args.model, args.mmproj, settings, Steps(enabled=False), threading.Event())
    assert loan.encoder is not None
    vision = Vision(loan.encoder)
    preparer = Preparer(loan.model, vision)
    asking = Chains(loan.model, vision, args)
    at, of = (int(n) for n in args.part.split("/"))
    samples = chains(args.scenes, args.seed, args.images)[at - 1 :: of]
    try:
        for i, sample in enumerate(samples):
            lacking = [c for c in cells if (sample.id, c.name, c.budget) not in there]
            if not lacking:
                continue
            turns, answer, _ = preparer.tokens(sample.messages(), sample.answer)
            talk = Talk(turns, [*(reply for _, reply in turns[:-1]), answer])
            for record in asking.ask(talk, lacking):
                rows.append({"id": sample.id, **record})
                file.add(rows[-1])
            preparer.release(turns)
            if i % 10 == 9:
                log(f"{i + 1} of {len(samples)} scenes")
    finally:
        file.close()
        asking.close()
        loan.give_back()
    return rows


def _rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Reads records. Joins records of the same scene, method and budget."""
    out: dict[Any, dict[str, Any]] = {}
    for row in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        one = out.setdefault((row["id"], row["method"], row["budget"]), {})
        pairs = {**one.get("pairs", {}), **row.get("pairs", {})}
        one |= {**row, "other_heads": one.get("other_heads", []) or row["other_heads"], "pairs": pairs}
    return list(out.values())


def table(rows: list[dict[str, Any]], budget: float | int) -> str:
    """Returns a row for each method: percent right by way and question, pairs per head, and `keep` against `prompt`."""
    here = [row for row in rows if row["budget"] == budget or row["method"] == FULL]
    ways = [way for way in WAYS if all(way in row for row in here)]
    counted = [way for way in ways if all(way in row["pairs"] for row in here)]
    near = KEEP in ways and PROMPT in ways
    n = len(here[0][ways[0]])
    heads = [*(f"{way} {i + 1}" for way in ways for i in range(n)), *(f"pairs {way}" for way in counted)]
    out = [["method", "scenes", *heads, *(["keep less prompt", "heads with other pairs"] if near else [])]]
    for name in sorted({row["method"] for row in here}):
        of = [row for row in here if row["method"] == name]
        shares = {way: [100 * sum(row[way][i] for row in of) / len(of) for i in range(n)] for way in ways}
        cells = [f"{share:.1f}" for way in ways for share in shares[way]]
        cells += [f"{sum(row['pairs'][way][-1] for row in of) / len(of):.1f}" for way in counted]
        if near:
            far = [a - b for a, b in zip(shares[KEEP], shares[PROMPT], strict=True)]
            cells += [f"{min(far):+.1f} to {max(far):+.1f}", str(sum(sum(row["other_heads"]) for row in of))]
        out.append([f"`{name}`", str(len(of)), *cells])
    return markdown(out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="all", help="one or several, with commas (default: every one)")
    parser.add_argument("--budget", default="0.2,0.1")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--images", type=int, default=1, help="of each scene, 1 or 4 (default %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--keep", choices=("ram", "disk"), default="ram")
    parser.add_argument("--keep-type", choices=KEEP_TYPES, default="f16")
    parser.add_argument("--batches", choices=("one", "same"), default="one",
                        help="how `prompt` reads its text: in one batch, or in those of the conversation")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="1/1", metavar="N/OF", help="every OFth scene, from the Nth on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=DATA / "demo-model.gguf")
    parser.add_argument("--mmproj", type=Path, default=DATA / "demo-mmproj.gguf")
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl", help="keep every record, and go on from there")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE.jsonl", help="only print what lies there")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rows = _rows(args.table) if args.table else run(args)
    for budget in sorted({row["budget"] for row in rows if row["method"] != FULL}, reverse=True):
        print(f"\n## Budget {budget}\n\n{table(rows, budget)}")


if __name__ == "__main__":
    try:
        main()
    except KvedgeError as error:
        sys.exit(f"error: {error}")
