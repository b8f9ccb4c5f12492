"""Measures one sample by many plans: the answers, and the likelihood of the reference answer.

The reference answer is fed token by token (teacher forcing), with the decode policy active. At the first token that the
model would choose differently, a copy of the sequence continues greedily. The result is the greedy answer, as decoding
from the start would give, because both are equal up to that token.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from kvedge_lab.eval import metrics
from kvedge_lab.eval.reader import ASKED, BRANCH, SIDE, Reader, reading_key
from kvedge_lab.eval.tasks import Sample
from pykvedge.errors import ContextError, KvedgeError
from pykvedge.models.composer import Composer, PromptText
from pykvedge.models.images import Picture
from pykvedge.models.model import Model, TextStream
from pykvedge.models.prompt import Message
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.plans.plan import Plan
from pykvedge.runtime import opening
from pykvedge.runtime.pruning import planned
from pykvedge.runtime.replay import extra_tokens

PROMPT, CONTEXT, CONVERSATION = "prompt", "context", "conversation"
# "prompt": each user message is compressed when it is complete, as in a chat. "context": everything before the last
# question is compressed at once, and the question is read after that. "conversation": everything up to the answer is
# compressed at once, as in a program that sends a whole conversation.
WAYS = (PROMPT, CONTEXT, CONVERSATION)
Turn = tuple[list[Piece], list[int]]  # a user's message with the text before it, and the tokens of the answer to it


@dataclass(frozen=True)
class Cell:
    """One column of the measurement: a plan, and its name in tables.

    source: a digest of the plugin code of the plan's stages, and of its profiles; "" without these.
    """

    name: str
    plan: Plan
    source: str = ""

    @property
    def budget(self) -> float | int:
        """The requested budget: a ratio of the prompt, or pairs per layer and head."""
        return self.plan.budget.value

    @property
    def key(self) -> tuple[str, str]:
        """A key that identifies the cell, also in files."""
        return self.name, str(self.budget)

    @cached_property
    def digest(self) -> str:
        """A digest of how the cell compresses. A file of results is refused if a cell's digest differs."""
        return hashlib.sha256(f"{self.plan.to_json()} {self.source}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure: greedy answers, and the likelihood of the reference answer.

    compress: what is compressed, one of WAYS. against_full: the reference is the full cache's answer, up to max_tokens
    and with its end token; the answer is fed in one pass if a plan's decode policy keeps everything.
    """

    answers: bool = True
    likelihood: bool = True
    max_tokens: int = 512
    compress: str = PROMPT
    against_full: bool = False


@dataclass
class Prepared:
    """A sample as tokens. turns: pieces to read and compress, each with the assistant's tokens that follow.

    question: pieces to read after the compression.
    """

    sample: Sample
    turns: list[Turn]
    answer: list[int]
    question: list[Piece] = field(default_factory=list)

    @property
    def n_compressed(self) -> int:
        """The number of compressed tokens: up to the answer, or up to the question."""
        return sum(sum(p.n_tokens for p in pieces) + len(reply) for pieces, reply in self.turns)

    @property
    def n_conversation(self) -> int:
        """The number of tokens up to the answer."""
        return self.n_compressed + sum(piece.n_tokens for piece in self.question)

    @property
    def images(self) -> list[int]:
        """The number of tokens of each image."""
        return [p.n_tokens for pieces, _ in self.turns for p in pieces if isinstance(p, ImagePiece)]


class Preparer:
    """Turns samples into tokens, by the model's chat template."""

    def __init__(
        self,
        model: Model,
        vision: Vision | None,
        look: Callable[[float], None] = lambda share: None,
        compress: str = PROMPT,
    ) -> None:
        """look: called while an image is encoded, with the finished share; prepare() raises its exceptions.

        compress: see MeasureOptions.
        """
        self._vision, self._look, self._compress = vision, look, compress
        self._composer = Composer(model, vision)
        _ = self._composer.lead  # a template that cannot write answers fails before the first sample

    def prepare_all(self, samples: Sequence[Sample]) -> list[Prepared]:
        """Prepares samples that share a context, whose images are encoded once. `release` the first one's turns.

        Raises what prepare() raises.
        """
        first = self.prepare(samples[0])
        try:
            return [first, *(self.prepare(sample, encode=False) for sample in samples[1:])]
        except BaseException:
            self.release(first.turns)
            raise

    def prepare(self, sample: Sample, encode: bool = True) -> Prepared:
        """Makes tokens and, if `encode` is true, encoded images. Call `release` for the turns.

        Raises ImageError, KvedgeError.
        """
        turns, answer, question = self.tokens(sample.messages(), sample.answer, encode)
        return Prepared(sample, turns, answer, question)

    def tokens(
        self, messages: Sequence[Message], answer: str, encode: bool = True
    ) -> tuple[list[Turn], list[int], list[Piece]]:
        """Turns a conversation, whose last message is a user's, into Prepared's turns, answer and question.

        Raises as prepare() does.
        """
        users = [i for i, m in enumerate(messages) if m.role == "user"]
        turns: list[Turn] = []
        question: list[Piece] = []
        try:
            for i in users:
                first = i == users[0]
                prompt = (self._composer.first if first else self._composer.following)(messages[: i + 1])
                reply = self._composer.reply(prompt, answer if i == users[-1] else messages[i + 1].text)
                pictures = [p for m in messages[0 if first else i : i + 1] for p in m.pictures]
                turns.append((self._pieces(prompt, pictures), reply))
            *earlier, (last, of_answer) = turns
            asked = [*earlier, (last, list[int]())]
            if self._compress == CONTEXT:
                asked, question = _apart(asked)
            if self._compress != PROMPT:
                asked = [(_joined(asked), [])]
            if self._vision is not None and encode:
                for pieces, _ in turns:
                    for piece in pieces:
                        if isinstance(piece, ImagePiece):
                            self._vision.encode(piece, self._look)
            return asked, of_answer, question
        except BaseException:
            self.release(turns)
            raise

    def release(self, turns: Iterable[Turn]) -> None:
        if self._vision is not None:
            for pieces, _ in turns:
                self._vision.release(pieces)
            self._vision.forget()

    def _pieces(self, prompt: PromptText, pictures: list[Picture]) -> list[Piece]:
        if pictures and self._vision is None:
            raise KvedgeError("the sample has images, but the model was loaded without an image encoder; pass --mmproj")
        return self._composer.pieces(prompt, pictures)


def _apart(turns: list[Turn]) -> tuple[list[Turn], list[Piece]]:
    """Splits the question from the compressed part: the last turn after its last image, or all of that turn.

    METHODS: kvpress, KVzip and SCBench measure this way. Raises ContextError if nothing comes before the question.
    """
    *earlier, (last, _) = turns
    before, question = opening.cut(last)
    if not before and not earlier:
        raise ContextError(
            "the sample has no text or image before its question, so --compress context has nothing to compress"
        )
    return [*earlier, (before, [])] if before else earlier, question


def _joined(turns: list[Turn]) -> list[Piece]:
    """Returns the messages and the answers between them as one prompt."""
    out: list[Piece] = []
    for pieces, reply in turns:
        out += [*pieces, TextPiece(reply)] if reply else pieces
    return out


@dataclass
class Baseline:
    """The full cache's results for the current sample."""

    log_probabilities: list[np.ndarray] = field(default_factory=list)  # per token of the answer, [n_vocab] float32
    answer: str = ""


class Measurer:
    def __init__(self, reader: Reader, options: MeasureOptions) -> None:
        self._model, self._reader, self._options = reader.model, reader, options

    def measure(
        self, asked: Sequence[Prepared], full: Cell, cells: list[Cell], failed: Callable[[Cell, KvedgeError], None]
    ) -> Iterator[tuple[Sample, Cell, dict[str, Any]]]:
        """Yields the records of the full cache, then of each cell. Calls failed(cell, reason) for a failing cell.

        asked: one sample, or several samples about one context, which differ after its last image.
        """
        more = max(max(len(one.answer), self._longest(one.sample)) for one in asked) + 1
        longest = max(one.n_conversation for one in asked)
        largest = max(asked[0].images, default=0)
        again = max((extra_tokens(cell.plan, longest, largest) for cell in cells), default=0)
        self._reader.make_room(longest, more, largest, again)
        bases = {one.sample.id: Baseline() for one in asked}
        for group in [[full], *_groups(cells)]:
            try:
                seen = _seen(asked[0], group[0].plan)
                self._reader.start(group[0].plan)
                for of, with_it in self._read(seen, asked):
                    yield from self._cells(group, of, with_it, bases, failed, is_full=group[0] is full)
            except KvedgeError as reason:
                if group[0] is full:
                    raise
                for cell in group:
                    failed(cell, reason)

    def _read(self, seen: Prepared, asked: Sequence[Prepared]) -> Iterator[tuple[Prepared, Sequence[Prepared]]]:
        """Reads the part to compress. Yields it with the samples that it is compressed for.

        If each sample's question is compressed too, the part before the questions is read once for all samples.
        """
        reader, pieces = self._reader, seen.turns[0][0]
        if len(asked) == 1 or asked[0].question:
            reader.read(pieces)
            reader.read_again()
            yield seen, asked
            return
        common, _ = opening.cut(pieces)
        reader.read(common)
        for one in asked:
            _, rest = opening.cut(one.turns[0][0])
            reader.drop_copies()
            reader.copy(ASKED)
            reader.read(rest)
            reader.read_again()
            yield replace(seen, turns=[([*common, *rest], [])]), [one]

    def _cells(
        self,
        group: list[Cell],
        seen: Prepared,
        asked: Sequence[Prepared],
        bases: Mapping[str, Baseline],
        failed: Callable[[Cell, KvedgeError], None],
        is_full: bool,
    ) -> Iterator[tuple[Sample, Cell, dict[str, Any]]]:
        """Compresses the read part by each plan of a group, and measures the samples."""
        here = self._reader.current
        for cell in group:
            try:
                if cell is not group[-1]:
                    self._reader.copy(BRANCH)
                common = self._compressed(seen, cell)
                records = [self._asked(one, cell, bases[one.sample.id], is_full, one is asked[-1]) for one in asked]
            except KvedgeError as reason:
                if is_full:
                    raise
                failed(cell, reason)
            else:
                for one, of in zip(asked, records, strict=True):
                    yield one.sample, cell, {**common, **of, "seconds": round(common["seconds"] + of["seconds"], 4)}
            finally:
                self._reader.drop_copies(here)

    def _longest(self, sample: Sample) -> int:
        if not self._options.answers and not self._options.against_full:
            return 0
        return min(sample.max_tokens or self._options.max_tokens, self._options.max_tokens)

    def _compressed(self, seen: Prepared, cell: Cell) -> dict[str, Any]:
        """Compresses the read part and the turns after it. Returns the figures that all questions share."""
        reader, started = self._reader, time.perf_counter()
        _, full_bytes = reader.held()
        reader.set_plan(cell.plan)
        reader.compress()
        for (_, reply), (pieces, _) in zip(seen.turns, seen.turns[1:], strict=False):
            for token in reply:
                reader.extend(token)
            reader.read(pieces)
            reader.compress()
        for token in seen.turns[-1][1]:
            reader.extend(token)
        kept, kept_bytes = reader.held()
        whole, in_file = reader.whole()
        return {
            "prompt_tokens": seen.n_compressed,
            "image_tokens": sum(seen.images),
            "kept": round(kept, 3),
            "full_bytes": full_bytes,
            "kept_bytes": kept_bytes,
            **({"whole_bytes": whole, "whole_file_bytes": in_file} if whole else {}),
            "seconds": round(time.perf_counter() - started, 4),
        }

    def _asked(self, prepared: Prepared, cell: Cell, base: Baseline, is_full: bool, last: bool) -> dict[str, Any]:
        """Measures a sample. Reads a separate question first, in a copy of the sequence unless it is the last."""
        reader, started, here = self._reader, time.perf_counter(), self._reader.current
        if not last:
            reader.copy(ASKED)
        if prepared.question:
            reader.read(prepared.question)
            reader.keep(cell.plan)
        if self._options.against_full:
            record = self._own(prepared, cell.plan, base, is_full)
        else:
            record = self._answers(prepared, base, is_full)
        if not last:
            reader.back_to(here)
        return {**record, "seconds": round(time.perf_counter() - started, 4)}

    def _answers(self, prepared: Prepared, base: Baseline, is_full: bool) -> dict[str, Any]:
        out: dict[str, Any] = {}
        longest = self._longest(prepared.sample)
        if self._options.likelihood:
            forced, tokens = self._forced(prepared.answer, base, is_full, longest)
            out |= forced
        elif self._options.answers:
            tokens = self._continue([], longest)
        if self._options.answers:
            text = self._text(tokens)
            base.answer = text if is_full else base.answer
            out |= {"answer": text, "score": prepared.sample.score(text)}
            out["rouge"] = round(metrics.rouge_l(text, prepared.sample.answer), 6)
            out["rouge_full"] = 1.0 if is_full else round(metrics.rouge_l(text, base.answer), 6)
        return out

    def _forced(
        self, answer: list[int], base: Baseline, is_full: bool, longest: int
    ) -> tuple[dict[str, Any], list[int]]:
        """Returns sums over the reference answer's tokens, and the tokens of the greedy answer."""
        reader = self._reader
        nll, agree, right, tokens = 0.0, 0, longest > 0, []
        each: list[float] = []  # divergence of every token
        for i, token in enumerate(answer):
            row = metrics.log_softmax(reader.logits())
            best = int(row.argmax())
            nll -= float(row[token])
            if is_full:
                base.log_probabilities.append(row.astype(np.float32))
                agree += 1
            else:
                reference = base.log_probabilities[i]
                each.append(max(metrics.divergence(reference.astype(np.float64), row), 0.0))
                agree += int(best == int(reference.argmax()))
            if right and best != token:
                right = False
                tokens = self._aside(answer[:i], longest)
            if right or i < len(answer) - 1:
                reader.extend(token)
        if right:
            tokens = self._continue(list(answer), longest)
        sums = {"nll": nll, "kld": sum(each), "top1": agree, "tokens": len(answer)}
        return sums | ({} if is_full else {"klds": [float(f"{one:.4g}") for one in each]}), tokens

    def _own(self, prepared: Prepared, plan: Plan, base: Baseline, is_full: bool) -> dict[str, Any]:
        """Returns sums over the tokens of the full cache's answer: nll, kld, top1 (tokens that are the plan's
        likeliest), tokens; for the full cache also sure (sum of the likeliest tokens' probabilities) and answer.
        """
        longest = self._longest(prepared.sample)
        if is_full:
            prepared.answer = self._aside([], longest, ended=True)
        rows = map(metrics.log_softmax, self._fed(prepared.answer, plan))
        nll, kld, agree, sure = 0.0, 0.0, 0, 0.0
        for i, (token, row) in enumerate(zip(prepared.answer, rows, strict=True)):
            nll -= float(row[token])
            agree += int(row.argmax() == token)
            if is_full:
                base.log_probabilities.append(row.astype(np.float32))
                sure += float(np.exp(row.max()))
            else:
                kld += max(metrics.divergence(base.log_probabilities[i].astype(np.float64), row), 0.0)
        out: dict[str, Any] = {"nll": nll, "kld": kld, "top1": agree, "tokens": len(prepared.answer)}
        return {**out, "sure": sure, "answer": self._text(prepared.answer)} if is_full else out

    def _fed(self, answer: list[int], plan: Plan) -> Iterator[np.ndarray]:
        """Feeds an answer. Yields the logits before each of its tokens."""
        yield self._reader.logits()
        if not plan.drops:
            yield from self._reader.feed(answer[:-1])
            return
        for token in answer[:-1]:
            self._reader.extend(token)
            yield self._reader.logits()

    def _text(self, tokens: list[int]) -> str:
        stream = TextStream(self._model)
        return ("".join(stream.feed(t) for t in tokens if not self._model.is_end(t)) + stream.finish()).strip()

    def _aside(self, before: list[int], longest: int, ended: bool = False) -> list[int]:
        """Generates the greedy answer from here on, in a copy of the sequence. ended: with its end token."""
        here = self._reader.current
        self._reader.copy(SIDE)
        tokens = self._continue(list(before), longest)
        if ended and len(tokens) < longest:
            tokens.append(int(self._reader.logits().argmax()))
        self._reader.back_to(here)
        return tokens

    def _continue(self, tokens: list[int], longest: int) -> list[int]:
        """Appends the likeliest tokens up to the end of the answer, or up to `longest`."""
        tokens = tokens[:longest]
        while len(tokens) < longest:
            token = int(self._reader.logits().argmax())
            if self._model.is_end(token):
                break
            tokens.append(token)
            if len(tokens) < longest:
                self._reader.extend(token)
        return tokens


def _seen(prepared: Prepared, plan: Plan) -> Prepared:
    """Returns a sample as a model reads it under a plan. The plan's pruner may remove image rows."""
    return replace(prepared, turns=[(planned(pieces, plan, 0), reply) for pieces, reply in prepared.turns])


def _groups(cells: list[Cell]) -> list[list[Cell]]:
    """Groups cells that one reading serves."""
    keys = {cell.key: repr(reading_key(cell.plan)) for cell in cells}
    ordered = sorted(cells, key=lambda cell: keys[cell.key])
    return [list(group) for _, group in groupby(ordered, key=lambda cell: keys[cell.key])]
