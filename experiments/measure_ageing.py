"""Measures a conversation with many images that age or are forgotten: what it keeps, reads and answers.

    python3 scripts/dev.py python experiments/measure_ageing.py answers --samples 40
    python3 scripts/dev.py python experiments/measure_ageing.py many --images 200
    python3 scripts/dev.py python experiments/measure_ageing.py many --images 200 --exact
    python3 scripts/dev.py python experiments/measure_ageing.py many --images 20 --pages
    python3 scripts/dev.py python experiments/measure_ageing.py drop --images 200

answers: conversations about five held-out scenes, the most that the packaged model was trained to tell apart: ten
questions, the tenth about the third image, which no earlier question asked about. Three ways: with whole rows, with
whole rows and --age, with the full cache.

many: one conversation of many images. Each image except the newest is forgotten. Before each of ten questions about the
third image, the image is promoted. Counts images and tokens read, KV pairs and private memory. With --full, a session
with the full cache has the same conversation. "full right" counts its right answers about the third image: no model is
right far beyond its trained length. --exact: answers are those of the full cache; "alike" counts the answers that equal
them, token by token. --pages: pages and the second model.

drop: one conversation of many pages with the second model. Every turn except the first, the last, and that of the third
page leaves the conversation before the next turn. The third page is asked about ten times; "right" counts right
answers.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import ROOT, log

import pykvedge
from kvedge_lab.demo_tasks.scenes import draw_scene, render
from kvedge_lab.page_tasks.pages import draw_page
from kvedge_lab.page_tasks.pages import render as render_page
from pykvedge import Sampling, Session
from pykvedge.cli.tables import markdown
from pykvedge.models.images import load_picture
from pykvedge.models.prompt import IMAGE
from pykvedge.models.vision import ImagePiece
from pykvedge.runtime.driver import Driver

ANSWER = Sampling(temp=0, max_tokens=12)
ASKED = (1, 2, 4, 5, 1, 2, 4, 5, 1, 3)
MIB = 1 << 20
FILES = [ROOT / "tests" / "data" / "pages" / f"pages-{part}.gguf" for part in ("model", "mmproj")]


class Reads:
    """Counts what the model reads: images, and tokens of all kinds."""

    def __init__(self) -> None:
        self.images = self.tokens = 0
        decode = Driver.decode

        def counted(driver: Any, at: Any, piece: Any, want_logits: bool) -> None:
            self.images += isinstance(piece, ImagePiece)
            self.tokens += piece.n_tokens
            decode(driver, at, piece, want_logits)

        Driver.decode = counted  # type: ignore[method-assign]


def private() -> float:
    """Returns the MiB of memory that only this process uses."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def ask(session: Session, question: str, picture: Any = None) -> str:
    return session.ask(question, [] if picture is None else [picture], ANSWER).read().strip()


def question(image: int, pages: bool = False) -> str:
    if pages:
        return f"What is the code on page {image}?"
    return f"What is the code in image {image}?" if image > 1 else "What is the code?"


def answers(args: argparse.Namespace) -> dict[str, Any]:
    """Returns shares of right answers: of all ten questions, and of the tenth. pairs: per head at the tenth."""
    plans = {"full": ("full", None, {}), "keep": (args.method, args.budget, {"keep": "ram"}),
             "age": (args.method, args.budget, {"keep": "ram", "age": args.age})}  # fmt: skip
    out, reads = {}, Reads()
    for name, (method, budget, settings) in plans.items():
        rng, right, pairs, images = np.random.default_rng(args.seed), [], [], reads.images
        with Session(plan=pykvedge.plan(method, budget), threads=args.threads, n_ctx=4096, **settings) as session:
            for _ in range(args.samples):
                scenes = [draw_scene(rng, held_out=True) for _ in range(5)]
                session.clear()
                for i, scene in enumerate(scenes):
                    ask(session, question(i + 1), load_picture(render(scene)))
                right.append([ask(session, f"What is the code in image {k}?") == scenes[k - 1].code for k in ASKED])
                pairs.append(session.engine.pairs_held())
        share, tenth = np.mean(right), np.mean([one[-1] for one in right])
        out[name] = {"right": round(100 * float(share), 1), "tenth": round(100 * float(tenth), 1),
                     "pairs": round(float(np.mean(pairs))), "images read": reads.images - images}  # fmt: skip
        log(f"{name}: {out[name]}")
    return out


def rows_in(session: Session) -> dict[str, float]:
    cache = session.engine.cache
    assert cache is not None
    stats = cache.stats()
    return {"KV MiB": round(stats.bytes / MIB, 2), "whole MiB": round(stats.whole_bytes / MIB, 1),
            "in the file": round(stats.whole_file_bytes / MIB, 1)}  # fmt: skip


def rows_of(session: Session, image: int) -> list[list[int]]:
    """Returns the held tokens of an image, one list for each head."""
    cache, span = session.engine.cache, session.engine.sequence.images[image - 1]
    assert cache is not None
    return [[t for t in cache.tokens(i, h) if span.first <= t < span.last]
            for i, heads in enumerate(cache.lengths()) for h in range(len(heads))]  # fmt: skip


def turn(i: int, rng: np.random.Generator, pages: bool) -> tuple[str, Any, str]:
    """Draws an image. Returns its question, the picture, and the right answer."""
    if pages:
        page = draw_page(rng, True)
        return f"Page {i}: {IMAGE}\n{question(i, pages)}", load_picture(render_page(page)), page.code.text
    scene = draw_scene(rng, held_out=True)
    return question(i), load_picture(render(scene)), scene.code


def beside(args: argparse.Namespace) -> Session | None:
    files = FILES if args.pages else []
    if not args.full:
        return None
    return Session(*files, plan=pykvedge.plan("full"), threads=args.threads, n_ctx=args.images * args.each)


def many(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng, reads, out = np.random.default_rng(args.seed), Reads(), []
    plan, every, files = pykvedge.plan(args.method, args.pairs), args.images // 10, FILES if args.pages else []
    settings = {"keep": "disk", "exact": args.exact, "n_ctx": args.images * args.each, "image_cache": args.image_cache}
    full, alike, right, n_right = beside(args), [], "", [0, 0]
    with (
        tempfile.TemporaryDirectory() as folder,
        Session(*files, plan=plan, threads=args.threads, keep_folder=folder, **settings) as session,
    ):

        def asked(text: str, picture: Any = None) -> tuple[str, str]:
            """Returns the answer of the session, and the answer of the full cache ("" without --full)."""
            images, tokens = reads.images, reads.tokens
            answer = ask(session, text, picture)
            read = reads.images - images, reads.tokens - tokens
            whole = ask(full, text, picture) if full else ""
            alike.append(whole == answer)
            reads.images, reads.tokens = images + read[0], tokens + read[1]
            return answer, whole

        for i in range(1, args.images + 1):
            if i > 1:
                session.forget_image(i - 1)
            text, picture, code = turn(i, rng, args.pages)
            right = code if i == 3 else right
            asked(text, picture)
            if i % every or i < 3:
                continue
            session.promote(3)
            said = asked(question(3, args.pages))
            n_right = [n + (one == right) for n, one in zip(n_right, said, strict=True)]
            sequence, third = session.engine.sequence, rows_of(session, 3)
            out.append({
                "images": i, "images read": reads.images, "tokens": sequence.n_cells, "tokens read": reads.tokens,
                "pairs": round(session.engine.pairs_held()), "of image 3": round(float(np.mean([*map(len, third)]))),
                **rows_in(session),
                **({"right": n_right[0], "full right": n_right[1], "alike": f"{sum(alike)} of {len(alike)}",
                    "position": sequence.n_past} if full else {"private MiB": round(private(), 1)}),
            })  # fmt: skip
            log(json.dumps(out[-1]))
            session.forget_image(3)
    return out


def drop(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng, reads, out, code, right, every = np.random.default_rng(args.seed), Reads(), [], "", 0, args.images // 10
    plan, turns = pykvedge.plan(args.method, args.pairs), list[int]()
    with (
        tempfile.TemporaryDirectory() as folder,
        Session(*FILES, plan=plan, threads=args.threads, keep="disk", keep_folder=folder, n_ctx=20 * args.each,
                image_cache=0) as session,
    ):  # fmt: skip

        def asked(page: int, text: str, picture: Any = None) -> str:
            for i in range(len(turns) - 2, 0, -1):
                if turns[i] != 3:
                    session.drop_turn(i + 1)
                    del turns[i]
            turns.append(page)
            return ask(session, text, picture)

        for i in range(1, args.images + 1):
            text, picture, said = turn(i, rng, pages=True)
            code = said if i == 3 else code
            asked(i, text, picture)
            if i % every or i < 3:
                continue
            right += asked(0, question(3, pages=True)) == code
            out.append({
                "images": i, "images read": reads.images, "tokens read": reads.tokens,
                "position": session.engine.sequence.n_past,
                "pairs": round(session.engine.pairs_held()), **rows_in(session), "private MiB": round(private(), 1),
                "right": f"{right} of {len(out) + 1}",
            })  # fmt: skip
            log(json.dumps(out[-1]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answers", "many", "drop"))
    parser.add_argument("--method", default="kvedge")
    parser.add_argument("--budget", type=float, default=0.3, help="of answers")
    parser.add_argument("--pairs", type=int, default=256, help="of many and drop")
    parser.add_argument("--age", type=float, default=0.5)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--image-cache", type=int, default=0, help="bytes of encoded images in memory, of many")
    parser.add_argument("--full", action="store_true", help="of many: the full cache beside it")
    parser.add_argument("--exact", action="store_true", help="of many")
    parser.add_argument("--pages", action="store_true", help="of many")
    parser.add_argument("--each", type=int, default=0, help="tokens of the context for each image")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    args.each = args.each or (600 if args.pages or args.what == "drop" else 220)
    if args.what == "answers":
        print(json.dumps(answers(args)))
        return
    rows = drop(args) if args.what == "drop" else many(args)
    print(markdown([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))


if __name__ == "__main__":
    main()
