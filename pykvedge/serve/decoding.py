"""Decodes the conversations of a server: all share one context and its batches."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pykvedge.errors import (
    CancelledError,
    KvedgeError,
    OutOfMemoryError,
    SessionFileError,
    StateError,
    UnsupportedError,
)
from pykvedge.library.libkvedge import Cache
from pykvedge.models import profiles
from pykvedge.models.vision import ImagePiece, Piece, TextPiece
from pykvedge.native import llamacpp
from pykvedge.native.abi import Stats
from pykvedge.plans.plan import Plan
from pykvedge.runtime.drafting import Costs, Drafter
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.lookup import Lookup
from pykvedge.runtime.replay import split
from pykvedge.runtime.report import Kv, Tokens
from pykvedge.runtime.sequence import NextPiece, Passes, Sequence
from pykvedge.runtime.thread_chooser import ThreadChooser
from pykvedge.serve.job import READING, Job, Limits, Step, Text
from pykvedge.serve.parked import Park
from pykvedge.serve.preparing import Preparer, Work, unknown_conversation

SHARED = 128  # most prompt tokens read per batch while other jobs answer: the answers wait for the batch
WATCHED = 16  # shorter parts of a prompt are not cancelled: checks at every graph node cost as much
_SHARE_READ = 4  # a read prompt is kept for equal requests if it takes at most a quarter of the memory


@dataclass(eq=False)
class Slot:
    """A sequence while a job uses it. passes: generator that reads the prompt; None: the job has not started."""

    sequence: Sequence
    work: Work
    passes: Passes | None = None
    next_piece: NextPiece | None = None  # the next piece of the prompt, and whether it needs logits
    second: bool = False  # whether the second pass over the prompt runs
    next: int | None = None  # the next token to decode; None: the prompt is being read
    n_bytes: int = 0  # keys and values in memory, at the last count
    file_bytes: int = 0  # whole rows in a file, at the last count
    began: float = field(default_factory=time.perf_counter)
    answering_since: float = 0.0
    n_emitted: int = 0  # number of tokens whose text was emitted
    over: bool = False

    @property
    def job(self) -> Job:
        return self.work.job

    @property
    def state(self) -> str:
        if self.next is not None:
            return "answering"
        return "reading again" if self.second else "reading"

    @property
    def share(self) -> float:
        return self.sequence.share if self.next is None else 1.0

    def read(self) -> Passes:
        """Reads the prompt, and reads it again if the plan has a second pass (Sequence.steps)."""
        spent = self.job.report.time
        yield from self.sequence.steps(self.work.pieces)
        spent.prefill_s = time.perf_counter() - self.began
        if self.work.second_pass:
            self.second = True
            yield from self.sequence.second_pass(self.work.second_pass)
            spent.replay_s = self.sequence.replay_s

    def emit(self, text: str) -> None:
        """Emits text of the answer, with its new tokens and their logprobs."""
        ids, noted = self.work.generation.tokens, self.job.report.logprobs
        noted = noted[self.n_emitted :] if noted else []
        if text or noted:
            self._time()
            self.job.emit(Text(text, tuple(noted), tuple(ids[self.n_emitted :])))
            self.n_emitted = len(ids)

    def _time(self) -> None:
        """Records the seconds of the answer so far."""
        report = self.job.report
        report.time.decode_steps = max(report.tokens.generated - 1, 0)
        if self.answering_since:
            report.time.decode_s = time.perf_counter() - self.answering_since

    def finish(self, how: str) -> None:
        """Completes the answer and its report. The caller emits the end when the slot is free."""
        generation = self.work.generation
        self.emit(generation.end(how, broken_off=how == "cancelled"))
        self.job.ids, self.job.stop_text = generation.tokens, generation.stops.stop_text
        self._time()


Ended = list[tuple[Slot, Exception | None]]


class _AllCancelled:
    """An event for llama.cpp: set when all jobs of a batch are cancelled."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = list(slots)

    def is_set(self) -> bool:
        return all(slot.job.cancelled.is_set() for slot in self._slots)


class Decoder:
    """Runs jobs in slots, turn by turn. For one thread only."""

    def __init__(self, driver: Driver, preparer: Preparer, park: Park, limits: Limits) -> None:
        self._driver, self._preparer, self._park, self._limits = driver, preparer, park, limits
        self._context, self._model = driver.context, driver.model
        self._thread_chooser, self._threads = ThreadChooser(driver.threads, llamacpp.default_threads()), driver.threads
        self._sequences = [Sequence(driver, number) for number in range(limits.slots)]
        costs = Costs()
        self._drafters = [Drafter(driver, sequence, sequence.extend, limits.exact, costs)
                          for sequence in (self._sequences if limits.drafts else ())]  # fmt: skip
        for sequence in self._sequences:
            sequence.lookup = Lookup() if limits.lookup else None
        self._slots: list[Slot] = []  # of the current turn
        self._ended: Ended = []  # slots that ended in the current turn
        self._shortest = False  # whether the shortest prompt is read next; else the first one
        self._plans: dict[int, Plan] = {}  # plan by sequence number; a free sequence keeps its plan

    def close(self) -> None:
        self._driver.close()

    def begin(self, work: Work, slots: list[Slot]) -> tuple[Slot | None, Exception | None]:
        """Gives a free sequence to a job. slots: in use. Returns the slot, or None and the error."""
        taken = [slot.sequence for slot in slots]
        slot = Slot(next(sequence for sequence in self._sequences if sequence not in taken), work)
        try:
            if work.job.cancelled.is_set():
                raise CancelledError
            if self._driver.cache is None:
                self._driver.require_full(work.job.request.plan)
            else:
                self._set_plan(self._driver.cache, slot.sequence.number, work.job.request.plan)
        except Exception as error:
            self._free(slot)
            return None, error
        slot.sequence.replays = work.replays
        return slot, None

    def _set_plan(self, cache: Cache, number: int, plan: Plan) -> None:
        if self._plans.get(number) != plan:
            tables = profiles.tables_for(plan, self._model.path, None, spare=True)
            self._plans.pop(number, None)
            cache.set_sequence_plan(number, plan, tables)
            self._plans[number] = plan

    def turn(self, slots: list[Slot]) -> Ended:
        """Reads a part of a prompt, and decodes a token of every answer. Returns the ended slots with their errors."""
        self._slots, self._ended = slots, []
        if (threads := self._thread_chooser.threads(len(slots))) != self._threads:
            self._context.set_threads(threads, threads)
            self._threads = threads
        for slot in slots:
            if slot.job.cancelled.is_set():
                self._end(slot, "cancelled")
        reader = self._reader([slot for slot in slots if slot.next is None and not slot.over])
        if reader is not None and reader.passes is None:
            self._try(reader, self._start)
            reader = reader if reader.next_piece is not None and not reader.over else None
        if reader is not None and reader.next_piece is not None and isinstance(reader.next_piece[0], ImagePiece):
            self._try(reader, self._read_image)
            reader = None
        answering = [slot for slot in slots if slot.next is not None and not slot.over]
        if answering or reader is not None:
            self._decode(answering, reader)
        self._measure([slot for slot in slots if not slot.over])
        return self._ended

    def _try(self, slot: Slot, step: Callable[[Slot], None]) -> None:
        """Runs a step of one job. An error ends that job only."""
        try:
            step(slot)
        except Exception as error:
            self._end(slot, "", error)

    def _reader(self, reading: list[Slot]) -> Slot | None:
        """Returns the slot to read next: alternately the first slot and the slot with the shortest prompt."""
        self._shortest = not self._shortest
        return min(reading, key=lambda slot: slot.work.n_tokens if self._shortest else 0, default=None)

    def reserved(self, slots: list[Slot]) -> int:
        """Returns the most bytes that these jobs may still need."""
        return sum(slot.work.need for slot in slots)

    def _start(self, slot: Slot) -> None:
        """Restores the state that a job continues from. If an equal prompt was read meanwhile, begins the answer."""
        work, report = slot.work, slot.job.report
        slot.passes = slot.read()
        before, work.snapshot = work.snapshot, None
        if work.job.name and (before is None or before.logits is None):
            before = self._park.get_read(work.job.name) or before
        if self._driver.cache is not None and before is not None:
            slot.sequence.restore(before, self._preparer.model_name)
            if slot.job.demoted and not self._driver.cache.stats(slot.sequence.number).whole_bytes:
                raise unknown_conversation("the uncompressed KV rows of the earlier conversation were not kept")
            for i in slot.job.demoted:
                slot.sequence.limit_image(i, 0)
            self._count(slot, self._driver.cache)
            if before.logits is not None:
                report.tokens = Tokens(reused=before.n_cells)
                report.kv = replace(before.kv or Kv(), compressed_tokens=0, kept_of_them=0)
                self._first(slot, before.logits)
                return
        slot.next_piece = next(slot.passes)

    def _keep_read(self, slot: Slot) -> None:
        """Keeps a read and compressed prompt for equal requests, with the logits [n_vocab] of its last token."""
        cache, work = self._driver.cache, slot.work
        if cache is None or not work.job.name or not self._stays(slot.sequence):
            return
        stats = cache.stats(slot.sequence.number)
        n_bytes = stats.bytes + stats.whole_bytes + 4 * self._model.n_vocab
        room = self._limits.memory - self.reserved(self._slots)
        if n_bytes > self._limits.memory // _SHARE_READ or not self._park.room_for_read(n_bytes, room):
            return
        with suppress(OutOfMemoryError, UnsupportedError, SessionFileError):
            at = slot.sequence.snapshot(self._preparer.model_name)
            kept = replace(at, logits=self._context.logits().copy(), kv=replace(slot.job.report.kv))
            self._park.put_read(work.job.name, kept)

    def _read_image(self, slot: Slot) -> None:
        piece, want_logits = slot.next_piece or (TextPiece([]), False)
        self._context.stop_when(_AllCancelled([slot]))  # type: ignore[arg-type]
        try:
            self._driver.decode(slot.sequence, piece, want_logits)
        finally:
            self._context.stop_when(None)
        self._read_on(slot, piece.n_tokens)

    def _decode(self, answering: list[Slot], reader: Slot | None) -> None:
        """Decodes one batch. After an error decodes each job alone, so that only the failing job ends.

        Exact answers run one by one, because a verification reads one conversation's rows.
        """
        if self._limits.exact:
            for slot in answering:
                self._try(slot, self._step)
            answering = []
        slots = [*answering, *([reader] if reader is not None else [])]
        if not slots:
            return
        try:
            self._decode_once(answering, reader)
            return
        except Exception as error:
            if len(slots) == 1:
                self._end(slots[0], "", error)
                return
        for slot in slots:
            self._decode([] if slot is reader else [slot], slot if slot is reader else None)

    def _step(self, slot: Slot) -> None:
        """Runs a step of an answer with drafts."""
        generation, began = slot.work.generation, time.perf_counter()
        room = slot.work.max_answer - slot.job.report.tokens.generated
        choose = functools.partial(generation.choose, self._context, room - 1)
        slot.emit(self._drafters[slot.sequence.number].step(generation, room, choose))
        self._thread_chooser.took(time.perf_counter() - began)
        slot.next = generation.token
        if generation.ended:
            self._end(slot, generation.ended)

    def _decode_once(self, answering: list[Slot], reader: Slot | None) -> None:
        alone = reader is None and len(answering) == 1
        if self._drafters and alone and not answering[0].job.request.plan.drops:
            self._step(answering[0])
            return
        context = self._context
        batch, n = context.batch, 0
        batch.clear()
        places = [batch.add([slot.next or 0], slot.sequence, True) for slot in answering]
        if reader is not None:
            piece, want_logits = reader.next_piece or (TextPiece([]), False)
            room = context.n_ubatch - batch.n
            others_answer = any(slot.next is not None and not slot.over for slot in self._slots)
            part, rest = split(piece, min(room, SHARED) if others_answer else room)
            n = part.n_tokens
            batch.add(part.tokens, reader.sequence, want_logits and rest is None)  # type: ignore[union-attr]
            if n > WATCHED:
                context.stop_when(_AllCancelled([*answering, reader]))  # type: ignore[arg-type]
        began = time.perf_counter()
        try:
            with self._driver.explained():
                context.decode_batch()
        finally:
            context.stop_when(None)
        if reader is None:
            self._thread_chooser.took(time.perf_counter() - began)
        else:
            reader.sequence.move(n)
        for slot in answering:
            slot.sequence.took(slot.next or 0)
        for slot, output in zip(answering, places, strict=True):
            self._next(slot, output)
        if reader is not None:
            self._try(reader, functools.partial(self._read_on, n_tokens=n))

    def _read_on(self, slot: Slot, n_tokens: int) -> None:
        """Continues after a part of a prompt was read: with the next part, or with the answer."""
        if slot.passes is None:
            raise StateError("the prompt has no unread tokens")
        try:
            slot.next_piece = slot.passes.send(n_tokens)
        except StopIteration:
            slot.next_piece = None
        slot.job.emit(Step("reading the prompt again" if slot.second else READING, slot.share))
        if slot.next_piece is None:
            started = time.perf_counter()
            self._compress(slot)
            slot.job.report.time.compress_s = time.perf_counter() - started
            self._keep_read(slot)
            self._first(slot)

    def _compress(self, slot: Slot) -> None:
        cache, work, sequence = self._driver.cache, slot.work, slot.sequence
        if cache is None:
            return
        sequence.compress()
        slot.job.report.kv = sequence.measure()
        if slot.job.request.patches:
            first = sequence.n_cells - work.n_tokens
            slot.job.patches = kept_patches(cache, work.pieces, first, sequence.number)
        self._count(slot, cache)
        if cache.keeps:
            slot.job.report.notes += sequence.notes()
        most = min(work.max_answer, slot.job.request.sampling.max_tokens)
        work.need = slot.n_bytes + most * self._preparer.bytes_per_answered

    def _first(self, slot: Slot, logits: np.ndarray | None = None) -> None:
        """Chooses the first token of an answer, unless the job only reads the prompt."""
        job = slot.job
        if job.request.read_only:
            self._end(slot, "length")
            return
        slot.answering_since = time.perf_counter()
        job.first_token_s = slot.answering_since - job.asked_at
        self._next(slot, -1, logits)

    def _next(self, slot: Slot, output: int, logits: np.ndarray | None = None) -> None:
        """Chooses the next token by the given logits, or by the logits at index `output` of the last batch."""
        generation = slot.work.generation
        room = slot.work.max_answer - slot.job.report.tokens.generated - 1
        try:
            slot.emit(generation.choose(self._context, room, output, logits))
        except Exception as error:
            self._end(slot, "", error)
            return
        slot.next = generation.token
        if generation.ended:
            self._end(slot, generation.ended)

    def _end(self, slot: Slot, how: str, error: Exception | None = None) -> None:
        if isinstance(error, CancelledError):
            how, error = "cancelled", None
        if error is None:
            slot.finish(how)
            if how != "cancelled":
                with suppress(OutOfMemoryError, UnsupportedError, SessionFileError):
                    self._keep(slot)
        self._free(slot)
        slot.n_bytes, slot.file_bytes, slot.over = 0, 0, True
        self._ended.append((slot, error))

    def _keep(self, slot: Slot) -> None:
        cache, memory = self._driver.cache, self._limits.memory
        stats = cache.stats(slot.sequence.number) if cache is not None else None
        n_bytes = stats.bytes + stats.whole_bytes if stats is not None else 0
        if cache is None or n_bytes > memory // 2 or slot.job.request.prompt is not None:  # no next message
            return
        if not self._stays(slot.sequence):
            return
        others = self.reserved([other for other in self._slots if other is not slot])
        with suppress(KvedgeError):  # the folder's notes report this error
            self._park.shrink(memory - others - 2 * n_bytes)  # the rows exist twice until the sequence is freed
        parked = slot.sequence.snapshot(self._preparer.model_name, slot.work.generation.pending)
        keep = self._limits.keep
        to_folder = keep is not None and keep.place == "disk"
        self._park.put(self._preparer.name_after(slot.job), parked, slot.job.name, to_folder)
        self._preparer.remember(slot.job)

    def _stays(self, sequence: Sequence) -> bool:
        """Returns whether a snapshot of the sequence gives the same answers as the sequence."""
        return not self._limits.exact or sequence.saves_whole_rows or sequence.holds_every_row

    def _free(self, slot: Slot) -> None:
        if slot.passes is not None:
            with suppress(KvedgeError):  # closing may end a second pass, which may fail
                slot.passes.close()
        slot.sequence.drop()
        slot.work.generation.close()
        self._preparer.release(slot.work.pieces)

    def _measure(self, slots: list[Slot]) -> None:
        cache = self._driver.cache
        if cache is None:
            return
        for slot in slots:
            kv, written = slot.job.report.kv, slot.file_bytes
            stats = self._count(slot, cache)
            kv.peak_bytes = max(kv.peak_bytes, stats.peak_bytes)
            if slot.next is not None and slot.file_bytes > written:
                slot.work.need -= slot.file_bytes - written
                kv.whole_file_bytes = slot.file_bytes

    def _count(self, slot: Slot, cache: Cache) -> Stats:
        stats = cache.stats(slot.sequence.number)
        slot.file_bytes = stats.whole_file_bytes
        slot.n_bytes = stats.bytes + stats.whole_bytes - slot.file_bytes
        return stats


def kept_patches(cache: Cache, pieces: Iterable[Piece], first: int, sequence: int) -> dict[str, Any]:
    """Returns, for each picture and layer, the percentage of KV heads that hold each patch.

    pieces: of a compressed prompt; its first token is number `first` of its sequence. A picture is {"rows", "columns",
    "padded", "share": [L][patches]}, row by row. padded: the picture is centred on a square. rows is 1 if the places of
    tokens are unknown. A patch that the model did not read has 0.
    """
    images, at = [], first
    for piece in pieces:
        if isinstance(piece, ImagePiece):
            images.append((at, piece))
        at += piece.n_tokens
    heads = map(len, cache.lengths(sequence))
    shares = [_shares(cache, layer, n, at, sequence) for layer, n in enumerate(heads)]
    return {"layers": cache.layer_ids(), "images": [_patches_of(piece, at, shares) for at, piece in images]}


def _shares(cache: Cache, layer: int, n_heads: int, n_tokens: int, sequence: int) -> np.ndarray:
    """Returns [n_tokens] float64: the share of a stored layer's KV heads that hold each token."""
    out = np.zeros(n_tokens)
    for head in range(n_heads):
        held = np.array(cache.tokens(layer, head, sequence), dtype=np.int64)
        out[held[held < n_tokens]] += 1 / n_heads
    return out


def _patches_of(piece: ImagePiece, at: int, shares: list[np.ndarray]) -> dict[str, Any]:
    where = piece.places
    rows, columns = (where.down, where.across) if where is not None else (1, piece.n_rows)
    read = piece.kept if piece.kept is not None else np.arange(piece.n_tokens)
    share = np.zeros((len(shares), piece.n_rows))
    for row, layer in zip(share, shares, strict=True):
        row[read] = layer[at : at + piece.n_tokens]
    return {
        "rows": rows,
        "columns": columns,
        "padded": where is not None and where.padded,
        "share": np.rint(100 * share).astype(int).tolist(),
    }
