"""The Decoder has the context that all conversations of a server share, and takes their jobs on, batch by batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pykvedge.errors import CancelledError, KvedgeError, OutOfMemoryError, SessionFileError, UnsupportedError
from pykvedge.library import libkvedge
from pykvedge.models import profiles
from pykvedge.models.model import Model
from pykvedge.models.vision import ImagePiece
from pykvedge.native import llamacpp
from pykvedge.plans.plan import Plan
from pykvedge.runtime import figures
from pykvedge.runtime.crew import Crew
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.report import Kv, Tokens
from pykvedge.runtime.snapshot import Snapshot
from pykvedge.serve import patches
from pykvedge.serve.again import SecondPass
from pykvedge.serve.batch import TokenBatch
from pykvedge.serve.job import Done, Step
from pykvedge.serve.limits import Limits
from pykvedge.serve.parked import Park
from pykvedge.serve.preparing import Preparer
from pykvedge.serve.slot import Prepared, Slot

SHARED = 128  # tokens of a prompt that are read at once while others are answered, who wait for them

WATCHED = 16  # so many tokens of a prompt are over before anybody notices; being asked at every node costs as much

_SHARE_READ = 4  # a prompt is kept for those who ask the same where it takes no more than this part of the memory

Ended = list[tuple[Slot, Exception | None]]


class _Given:
    """Tells llama.cpp to stop when everybody who has a part in a batch has given up."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = list(slots)

    def is_set(self) -> bool:
        return all(slot.job.cancelled.is_set() for slot in self._slots)


def _without(slots: list[Slot], ended: Ended) -> list[Slot]:
    gone = {slot.sequence for slot, _ in ended}
    return [slot for slot in slots if slot.sequence not in gone]


class Decoder:
    """For one thread."""

    def __init__(self, driver: Driver, model: Model, preparer: Preparer, park: Park, limits: Limits) -> None:
        self._driver, self._model, self._preparer, self._park = driver, model, preparer, park
        self._limits, self._llama = limits, driver.context.llama
        self._batch = TokenBatch(self._llama, driver.context.n_ubatch)
        self._crew, self._threads = Crew(driver.threads, llamacpp.default_threads()), driver.threads
        self._slots: list[Slot] = []  # of the turn
        self._shortest = False  # whether the shortest prompt is read on, and not the one that came first
        self._plans: dict[int, Plan] = {}  # that sequences have, also while nobody has them

    def close(self) -> None:
        """Frees the context."""
        self._driver.close()

    # ---------------------------------------------------------------------------------------------------

    @property
    def n_bytes(self) -> int:
        """Counts the bytes of keys and values that are being answered from."""
        return sum(slot.n_bytes for slot in list(self._slots))

    def begin(self, work: Prepared, taken: set[int]) -> tuple[Slot | None, Exception | None]:
        """Gives a job one of the sequences that nobody has; or tells why that cannot be."""
        sequence = next(n for n in range(self._limits.slots) if n not in taken)
        slot = Slot(sequence, work, deque(work.pieces))
        try:
            if work.job.cancelled.is_set():
                raise CancelledError
            plan, cache = work.job.request.plan, self._driver.cache
            if cache is None:
                self._driver.require_full(plan)
            else:
                self._set_plan(sequence, plan)
        except Exception as error:
            self._free(slot)
            return None, error
        return slot, None

    def _set_plan(self, sequence: int, plan: Plan) -> None:
        if self._plans.get(sequence) != plan and self._driver.cache is not None:
            tables = profiles.tables_for(plan, self._model.path, None, spare=True)
            self._plans.pop(sequence, None)
            self._driver.cache.set_sequence_plan(sequence, plan, tables)
            self._plans[sequence] = plan

    def turn(self, slots: list[Slot]) -> Ended:
        """Reads a part of a prompt, and a token of every answer. Returns the jobs that have ended with it, and how."""
        self._slots = slots
        self._compute_with(self._crew.threads(len(slots)))
        ended = [self._end(slot, "cancelled") for slot in slots if slot.job.cancelled.is_set()]
        going = _without(slots, ended)
        reader = self._reader([slot for slot in going if slot.next is None])
        if reader is not None and not reader.begun:
            ended += self._start(reader)
            reader, going = (reader if reader.next is None else None), _without(going, ended)
            reader = reader if reader in going else None
        if reader is not None and reader.steps and isinstance(reader.steps[0], ImagePiece):
            ended += self._read_image(reader)
            reader = None
        answering = [slot for slot in going if slot.next is not None]
        if answering or reader is not None:
            ended += self._decode(answering, reader)
        self._measure(_without(slots, ended))
        return ended

    def _reader(self, reading: list[Slot]) -> Slot | None:
        """Chooses whose prompt is read on: by turns that which came first and the shortest, which waits for none."""
        self._shortest = not self._shortest
        return min(reading, key=lambda slot: slot.work.n_tokens if self._shortest else 0, default=None)

    def _compute_with(self, threads: int) -> None:
        if threads != self._threads:
            self._driver.context.set_threads(threads, threads)
            self._threads = threads

    def report(self, slot: Slot) -> None:
        """Tells that an answer is complete."""
        slot.job.end(Done(slot.job.report, slot.job.patches))

    def reserved(self, slots: list[Slot]) -> int:
        """Counts the bytes that these jobs take at most from now on."""
        return sum(slot.work.need for slot in slots)

    # ---------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> Ended:
        """Brings back what a job goes on from. Where the same prompt was read meanwhile, its answer begins."""
        cache, work, report = self._driver.cache, slot.work, slot.job.report
        slot.begun = True
        try:
            read = work.read or (self._park.get_read(work.name) if work.name else None)
            before = read or work.parked
            work.read = work.parked = None
            if cache is None or before is None:
                return []
            libkvedge.unpack(cache, before.rows, self._preparer.model_name, slot.sequence)
            slot.stand(before)
            slot.n_bytes = cache.stats(slot.sequence).bytes
            if read is None:
                return []
            slot.steps.clear()
            report.tokens = Tokens(reused=read.n_cells)
            report.kv = replace(read.kv or Kv(), compressed_tokens=0, kept_of_them=0)
            return [] if read.logits is None else self._first(slot, -1, read.logits)
        except Exception as error:
            return [self._end(slot, "", error)]

    def _keep_read(self, slot: Slot, logits: np.ndarray) -> None:
        """Keeps a prompt that was read and compressed, with the logits [n_vocab] of its last token."""
        cache, work = self._driver.cache, slot.work
        if cache is None or not work.name:
            return
        n_bytes = cache.stats(slot.sequence).bytes + 4 * self._model.n_vocab
        room = self._limits.memory - self.reserved(self._slots)
        if n_bytes > self._limits.memory // _SHARE_READ or not self._park.room_for_read(n_bytes, room):
            return
        with suppress(OutOfMemoryError, UnsupportedError, SessionFileError):
            rows = libkvedge.pack(cache, self._preparer.model_name, slot.sequence)
            at = Snapshot(rows, slot.n_past, slot.n_cells, logits=logits.copy(), kv=replace(slot.job.report.kv))
            self._park.put_read(work.name, at)

    def _read_image(self, slot: Slot) -> Ended:
        piece, context = slot.steps.popleft(), self._driver.context
        context.sequence, context.n_past = slot.sequence, slot.n_past
        context.stop_when(_Given([slot]))  # type: ignore[arg-type]
        try:
            self._driver.read_step(piece, want_logits=not slot.steps and slot.second is None)
        except Exception as error:
            return [self._end(slot, "", error)]
        finally:
            context.stop_when(None)
        slot.moved(piece.n_tokens, context.n_past)
        self._tell(slot)
        return [] if slot.steps else self._read_out(slot, -1)

    def _decode(self, answering: list[Slot], reader: Slot | None) -> Ended:
        """Decodes in one batch; where that fails, one by one, so that nobody fails with another."""
        slots = [*answering, *([reader] if reader is not None else [])]
        before = [list(slot.steps) for slot in slots]
        try:
            return self._decode_once(answering, reader)
        except Exception as error:
            if len(slots) == 1:
                return [self._end(slots[0], "", error)]
        ended: Ended = []
        for slot, steps in zip(slots, before, strict=True):
            slot.steps.clear()
            slot.steps.extend(steps)
            ended += self._decode([], slot) if slot is reader else self._decode([slot], None)
        return ended

    def _decode_once(self, answering: list[Slot], reader: Slot | None) -> Ended:
        batch, context = self._batch, self._driver.context
        batch.clear()
        places = [batch.add([slot.next or 0], slot.n_past, slot.sequence, True) for slot in answering]
        part: list[int] = []
        if reader is not None:
            part = reader.text_step(min(batch.room, SHARED) if answering else batch.room)
            last = not reader.steps and reader.second is None
            place = batch.add(part, reader.n_past, reader.sequence, last)
        if len(part) > WATCHED and reader is not None:
            context.stop_when(_Given([*answering, reader]))  # type: ignore[arg-type]
        began = time.perf_counter()
        try:
            with self._driver.explained():
                context.decode_batch(batch.as_llama())
        finally:
            context.stop_when(None)
        if reader is None:
            self._crew.took(time.perf_counter() - began)
        ended: Ended = []
        for slot in answering:
            slot.moved(1)
            slot.answered.append(slot.next or 0)
        for slot, output in zip(answering, places, strict=True):
            ended += self._next(slot, output)
        if reader is not None:
            reader.moved(len(part))
            self._tell(reader)
            ended += [] if reader.steps else self._read_out(reader, place)
        return ended

    def _tell(self, slot: Slot) -> None:
        slot.job.emit(Step("reading the prompt" if slot.second is None else "reading the prompt again", slot.share))

    def _read_out(self, slot: Slot, output: int) -> Ended:
        """Goes on where the prompt, or a chunk of the second pass over it, was read: with the next, or the answer."""
        cache, again, spent = self._driver.cache, slot.work.again, slot.job.report.time
        now = time.perf_counter()
        try:
            if slot.second is None:
                spent.prefill_s = now - slot.began
                if cache is None or not again:
                    return self._begin_answer(slot, output, None)
                slot.second = SecondPass(again, self._logits(output).copy(), slot, now)
            if cache is not None and slot.second.go_on(cache, slot):
                return []
            spent.replay_s = time.perf_counter() - slot.second.began
            logits, slot.second = slot.second.logits, None
        except Exception as error:
            return [self._end(slot, "", error)]
        return self._begin_answer(slot, output, logits)

    def _begin_answer(self, slot: Slot, output: int, logits: np.ndarray | None) -> Ended:
        """Compresses a prompt that was read, and chooses the first token of its answer.

        By the logits of a place in the last batch, or by those that were kept over a second pass.
        """
        try:
            started = time.perf_counter()
            self._compress(slot)
            slot.job.report.time.compress_s = time.perf_counter() - started
            self._keep_read(slot, self._logits(output) if logits is None else logits)
        except Exception as error:
            return [self._end(slot, "", error)]
        return self._first(slot, output, logits)

    def _first(self, slot: Slot, output: int, logits: np.ndarray | None) -> Ended:
        """Chooses the first token of an answer, if one is wanted."""
        job = slot.job
        if job.request.read_only:
            return [self._end(slot, "length")]
        slot.answering_since = time.perf_counter()
        job.first_token_s = slot.answering_since - job.asked_at
        return self._next(slot, output, logits)

    def _compress(self, slot: Slot) -> None:
        cache, report, work = self._driver.cache, slot.job.report, slot.work
        if cache is None:
            return
        stats = cache.stats(slot.sequence)
        slot.compressed_tokens += stats.n_pending
        cache.compress(slot.sequence)
        after = cache.stats(slot.sequence)
        kept = after.n_compressions > stats.n_compressions
        report.kv = figures.of_cache(self._model, cache, self._limits.kv_type, kept, slot.sequence)
        report.kv.compressed_tokens = slot.compressed_tokens
        if slot.job.request.patches:
            slot.job.patches = patches.kept(cache, work.pieces, slot.n_cells - work.n_tokens, slot.sequence)
        slot.n_bytes = after.bytes
        work.need = after.bytes + min(work.room, slot.job.request.sampling.max_tokens) * self._preparer.bytes_per_token

    def _next(self, slot: Slot, output: int, logits: np.ndarray | None = None) -> Ended:
        """Chooses the next token by the logits of a place in the last batch, or by those that are given."""
        generation, context = slot.work.generation, self._driver.context
        room = slot.work.room - slot.job.report.tokens.generated - 1
        try:
            slot.tell(generation.choose(context, room, output, logits))
        except Exception as error:
            return [self._end(slot, "", error)]
        slot.next = generation.token
        return [self._end(slot, generation.ended)] if generation.ended else []

    def _logits(self, output: int) -> np.ndarray:
        row = self._llama.llama_get_logits_ith(self._driver.context.handle, output)
        return np.ctypeslib.as_array(row, (self._model.n_vocab,))

    # ---------------------------------------------------------------------------------------------------

    def _end(self, slot: Slot, how: str, error: Exception | None = None) -> tuple[Slot, Exception | None]:
        if isinstance(error, CancelledError):
            how, error = "cancelled", None
        if error is None:
            slot.finish(how)
            if how != "cancelled":
                with suppress(OutOfMemoryError, UnsupportedError, SessionFileError):
                    self._keep(slot)
        self._free(slot)
        slot.n_bytes = 0
        return slot, error

    def _keep(self, slot: Slot) -> None:
        cache, memory = self._driver.cache, self._limits.memory
        n_bytes = cache.stats(slot.sequence).bytes if cache is not None else 0
        if cache is None or n_bytes > memory // 2 or slot.job.request.prompt is not None:  # which has no next message
            return
        others = self.reserved([other for other in self._slots if other is not slot])
        with suppress(KvedgeError):  # a folder that cannot be used says so in its notes
            self._park.shrink(memory - others - 2 * n_bytes)  # the rows exist twice until the sequence is freed
        rows = libkvedge.pack(cache, self._preparer.model_name, slot.sequence)
        pending, answer = tuple(slot.work.generation.pending), tuple(slot.answered) if slot.work.replays else ()
        n_pending = cache.stats(slot.sequence).n_pending
        parked = Snapshot(rows, slot.n_past, slot.n_cells, n_pending, pending=pending, answer=answer)
        self._park.put(self._preparer.name_after(slot.job), parked, slot.work.name)

    def _free(self, slot: Slot) -> None:
        memory = self._llama.llama_get_memory(self._driver.context.handle)
        self._llama.llama_memory_seq_rm(memory, slot.sequence, -1, -1)
        slot.work.generation.close()
        self._preparer.release(slot.work.pieces)

    def _measure(self, slots: list[Slot]) -> None:
        cache = self._driver.cache
        if cache is None:
            return
        for slot in slots:
            stats, kv = cache.stats(slot.sequence), slot.job.report.kv
            slot.n_bytes, kv.peak_bytes = stats.bytes, max(kv.peak_bytes, stats.peak_bytes)
