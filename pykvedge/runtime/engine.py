"""The engine of a session: makes a context of the needed size, and reads the conversation into one sequence."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pykvedge.errors import (
    ContextError,
    NothingToCompressError,
    SessionFileError,
    StateError,
    UnsupportedError,
    UsageError,
)
from pykvedge.library import libkvedge, native_plan
from pykvedge.models import profiles
from pykvedge.models.model import Model, Progress
from pykvedge.models.shape import shares_cache
from pykvedge.models.token_table import TokenTable
from pykvedge.models.vision import ImagePiece, Piece, Vision
from pykvedge.plans.making import check_protection
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime import bounded_batch
from pykvedge.runtime.ageing import Ages
from pykvedge.runtime.drafting import MOST, Drafter
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.llama_context import DEFAULT_CTX, ROOM_TO_ANSWER, Context, ContextSize, ubatch_for
from pykvedge.runtime.lookup import Lookup
from pykvedge.runtime.replay import extra_tokens
from pykvedge.runtime.report import Kv
from pykvedge.runtime.sequence import Positions, Sequence, TokenBoundary, encode
from pykvedge.runtime.sessionfile import Note, encoded
from pykvedge.runtime.settings import Settings
from pykvedge.runtime.snapshot import Snapshot
from pykvedge.runtime.stream import Pace, stream_context
from pykvedge.runtime.thread_chooser import ThreadChooser
from pykvedge.system import memory
from pykvedge.system.guard import undoing


@dataclass(frozen=True)
class Mark:
    """A copy of all read tokens in a second sequence. plan: of the cache at the mark. n_bytes: of the copied rows."""

    copy: Sequence
    plan: Plan | None
    n_bytes: int  # without the memory of layers that llama.cpp keeps


class Engine:
    """Reads text and images, gives logits, and compresses what was read. `make_room` makes the context."""

    def __init__(
        self, model: Model, vision: Vision | None, settings: Settings, threads: int, chooser: ThreadChooser | None
    ) -> None:
        """threads: for prompts, and for answers without a chooser. chooser: chooses the threads of answers."""
        self._model, self._vision = model, vision
        self._settings, self._threads = settings, threads
        self._thread_chooser = chooser
        self._table: TokenTable | None = None
        self.not_bounded = ""  # why the last prompt was not read layer by layer despite the settings; or empty
        self._driver: Driver | None = None
        self._sequence: Sequence | None = None
        self._pace: Pace | None = None  # of a stream; else None
        self._positions: Positions | None = None  # None: positions only count up
        self._has_noted = False  # whether `notes` has already said that positions cannot be renumbered
        self._copy: Sequence | None = None  # copy made by the last mark
        self._n_copy_cells = 0  # cells of the copy that the sequence does not share
        self._drafter: Drafter | None = None
        self._ages: Ages | None = None  # None: no whole rows are kept

    @property
    def sequence(self) -> Sequence:
        """Returns the sequence. Raises StateError before the first prompt."""
        if self._sequence is None:
            raise StateError("the session has not read a prompt yet; ask a question first")
        return self._sequence

    @property
    def driver(self) -> Driver:
        """Returns the driver, which owns the context and the cache. Raises StateError before the first prompt."""
        if self._driver is None:
            raise StateError("the session has not read a prompt yet; ask a question first")
        return self._driver

    @property
    def context(self) -> Context:
        """Returns the context. Raises StateError before the first prompt."""
        return self.driver.context

    @property
    def pace(self) -> Pace:
        """Returns the pace of a stream. Raises NothingToCompressError if kvedge does not hold the KV cache."""
        if self._pace is None:
            raise NothingToCompressError(f"kvedge cannot manage the KV cache of {self._model.path.name}")
        return self._pace

    @property
    def cache(self) -> libkvedge.Cache | None:
        """Returns the cache of libkvedge, or None if llama.cpp keeps the KV memory."""
        return self._driver.cache if self._driver is not None else None

    @property
    def room(self) -> int:
        """Returns how many tokens can be read; in a stream, until the next compression."""
        if self._pace is not None:
            return self.context.room
        room = self.context.room - max(self._n_copy_cells, self.sequence.pairs_without_cell)
        return max(room, 1 if self._frees_room(1) else 0, 0)

    def close(self) -> None:
        """Frees the context and its KV memory. The next prompt makes new ones."""
        if self._driver is not None:
            self._driver.close()
        self._driver = self._sequence = self._pace = self._positions = self._copy = self._drafter = None
        self._ages = None
        self._n_copy_cells = 0

    def set_plan(self, plan: Plan) -> None:
        """Sets the plan of later compressions. Raises NothingToCompressError, ProfileError."""
        tables = self.tables(plan)
        if self.cache is not None:
            self.cache.set_plan(plan, tables)
        elif self._driver is not None:
            self._driver.require_full(plan)

    def make_room(self, pieces: list[Piece], plan: Plan) -> None:
        """Makes the context before the first prompt, and checks that the pieces fit.

        Raises ContextError, OutOfMemoryError, NothingToCompressError, BudgetError.
        """
        if self._settings.stream:
            if self._driver is None:
                self._open(stream_context(self._model, self._vision, self._settings, pieces, plan), plan)
                self.pace.compress()  # a compression without tokens checks that the plan can compress
            return
        n = sum(p.n_tokens for p in pieces)
        images = [p.n_tokens for p in pieces if isinstance(p, ImagePiece)]
        what = f"{n} tokens" + (f" ({sum(images)} of images)" if images else "")
        largest = max(images, default=0)
        if self.cache is not None and plan != self.cache.plan:
            self.set_plan(plan)
        self.not_bounded = self._why_not_bounded(pieces, n, plan) if self._settings.bounded else ""
        self._recount()
        self._turn(n + extra_tokens(plan, n, largest))
        if self._driver is None:
            check_protection(plan, n)
            self._make_context(n, largest, what, plan)
        elif n > (room := self.room - len(self.sequence.unread)):
            raise ContextError(
                f"the message has {what}, but only {room} tokens of the context of {self.context.n_ctx} are free; "
                f"raise --ctx or start a new conversation"
            )
        elif largest > self.context.n_ubatch < ubatch_for(self._vision, largest):
            raise ContextError(
                f"an image of {largest} tokens is too large for a later message; start a new conversation with this "
                f"image"
            )

    def _frees_room(self, n_tokens: int) -> bool:
        """Returns whether renumbering the positions makes room for n_tokens more.

        False if the plan keeps all rows, or if the KV pairs then exceed the size of the context.
        """
        positions, cache, copy = self._positions, self.cache, self._copy
        if positions is None or cache is None or not positions.needed(n_tokens):
            return False
        apart = copy.n_cells if copy is not None and copy.n_past != self.sequence.n_past else 0
        fits = max(self.sequence.pairs_held(), apart + 1) + n_tokens <= self.context.n_ctx
        return fits and not positions.why_not and cache.plan.method != "full"

    def _turn(self, n_tokens: int) -> None:
        if self._positions is None or not self._frees_room(n_tokens):
            return
        copy, before = self._copy, self.sequence.n_past
        self._positions.make_room(n_tokens)
        if copy is not None and copy.n_past != before:
            self._n_copy_cells = copy.n_cells  # llama.cpp's cells of the copy, which the sequence no longer shares
        elif copy is not None:  # nothing was read since the mark: copy the renumbered sequence again
            copy.drop()
            copy.follow(self.sequence)

    def _recount(self) -> None:
        renumbered = self._positions is not None and self._positions.n_renumberings
        if self._sequence is not None and (renumbered or self._sequence.pairs_without_cell):
            self._sequence.recount()

    def _make_context(self, n_prompt: int, largest_image: int, what: str, plan: Plan) -> None:
        trained = self._model.n_ctx_train or DEFAULT_CTX
        more = max(ROOM_TO_ANSWER, extra_tokens(plan, n_prompt, largest_image))
        automatic = max(min(trained, DEFAULT_CTX), min(trained, n_prompt + more))
        n_ctx = self._settings.n_ctx or automatic
        if n_prompt > n_ctx:
            advice = "raise --ctx" if self._settings.n_ctx else "set --ctx above the model's training length"
            raise ContextError(f"the prompt has {what}, the context holds {n_ctx}; {advice}, or shorten the prompt")
        n_ubatch, peak = ubatch_for(self._vision, largest_image), 0
        if self._bounded:
            kept = native_plan.plan_budget(plan, n_prompt)
            n_ubatch, peak = max(n_ubatch, n_prompt), kept + n_prompt // max(self._model.n_layer, 1)
        self._open(ContextSize(n_ctx, n_ubatch, self._settings.storage, n_prompt, peak_tokens=peak), plan)

    @property
    def _bounded(self) -> bool:
        return self._settings.bounded and not self.not_bounded

    def _why_not_bounded(self, pieces: list[Piece], n: int, plan: Plan) -> str:
        covered = native_plan.plan_budget(plan, n, later=self.cache is not None) >= n
        if covered and not KvType.parse(self._settings.kv_type).quantised:
            return "the budget covers the whole prompt"
        if self._driver is not None and self.cache is None:
            return f"kvedge cannot manage the KV cache of {self._model.path.name}"
        if self._driver is not None and n > self.context.n_ubatch:
            return (
                f"the message has {n} tokens, and one pass holds {self.context.n_ubatch}, the size of the first message"
            )
        if shares_cache(self._model.header):
            return f"layers of {self._model.path.name} use the whole KV cache of an earlier layer"
        if any(isinstance(p, ImagePiece) for p in pieces):
            try:
                self._table = self._table or TokenTable(self._model.header)
            except UnsupportedError as error:
                return str(error)
        return bounded_batch.why_not(self._vision, pieces) or native_plan.why_not_bounded(plan, self._settings.kv_type)

    def _open(self, size: ContextSize, plan: Plan) -> None:
        tables = self.tables(plan)
        outputs = MOST + 1 if self._settings.drafts else 0
        size = replace(size, n_seq=2 if self._settings.undo else 1, n_outputs=outputs)
        driver = Driver(self._model, self._vision, size, self._threads)
        with undoing(driver.close):
            driver.take_over(plan, tables, keep=self._settings.keeping, or_full=True)
        self._driver = driver
        self._sequence = driver.context.at = Sequence(driver)
        if self._settings.drafts:
            self._sequence.lookup = Lookup() if self._settings.lookup else None
            self._drafter = Drafter(driver, self._sequence, self.extend, self._settings.exact)
        if driver.cache is None and self._bounded:
            self.not_bounded = f"kvedge cannot manage the KV cache of {self._model.path.name}"
        if self._settings.keep and driver.cache is not None:
            self._ages = Ages(self._sequence, driver.cache, self._settings.age)
        elif driver.cache is not None and self._settings.positions != "count":
            trained, bound = self._settings.most_positions(self._model.n_ctx_train), plan.budget.pairs or 0
            self._positions = Positions(self._sequence, driver.cache, trained, bound)
        if self._settings.stream and driver.cache is not None:
            self._pace = Pace(driver, self._sequence, driver.cache, self._settings, self._positions)

    def tables(self, plan: Plan) -> dict[str, ProfileTable]:
        """Returns the profiles that the plan needs, by stage. Raises ProfileError."""
        return profiles.tables_for(plan, self._model.path, self._settings.profile, spare=True)

    def save(self, path: str | os.PathLike[str], model: str, note: Note) -> None:
        """Writes the cache and a note to a file, with whole rows if note.whole. model: fingerprint of the model file.

        Raises SessionFileError, UnsupportedError.
        """
        if self.cache is None:
            raise UnsupportedError(
                f"kvedge cannot manage the KV cache of {self._model.path.name}, so its sessions cannot be saved"
            )
        self.cache.save(encoded(path), model, note.encode(), whole=note.whole)

    def load(self, path: str | os.PathLike[str], model: str, note: Note, plan: Plan) -> None:
        """Makes a new context with the cache of a file. Raises what make_room raises, and SessionFileError."""
        name = os.fsdecode(path)

        def fill(cache: libkvedge.Cache) -> None:
            cache.load(encoded(path), model)
            lists = {name: tuple(getattr(note, name)) for name in ("unread", "images", "answer")}
            at = Snapshot(b"", note.n_past, note.n_cells, held=note.held, **lists)
            self.sequence.stand(at, name)

        self._fill(note, plan, name, Path(name).stat().st_size, fill)

    def fork(self, at: Snapshot, model: str, note: Note, plan: Plan) -> None:
        """Makes a new context that continues from a snapshot. Raises what make_room raises, and SessionFileError."""
        self._fill(note, plan, "a fork", len(at.rows), lambda cache: self.sequence.restore(at, model))

    def check_holds(self, note: Note, name: str) -> int:
        """Returns the context size (tokens) for a saved conversation. name: for the error. Raises ContextError."""
        n_ctx = self._settings.n_ctx or note.n_ctx
        if note.n_cells > n_ctx:
            raise ContextError(f"{name} holds {note.n_cells} tokens, more than the context of {n_ctx}; raise --ctx")
        return n_ctx

    def _fill(self, note: Note, plan: Plan, name: str, n_bytes: int, fill: Callable[[libkvedge.Cache], None]) -> None:
        n_ctx = self.check_holds(note, name)
        self.close()
        memory.require(n_bytes, name, "close other programs")
        self._open(ContextSize(n_ctx, max(note.n_ubatch, 1), self._settings.storage), plan)
        with undoing(self.close):
            if self.cache is None:
                raise SessionFileError(f"{name} was saved with another model; load the model that saved {name}")
            fill(self.cache)
        if self._pace is not None:
            self._pace.compress()

    def mark(self) -> Mark:
        """Copies all that was read, in place of an older copy. Raises OutOfMemoryError, UnsupportedError.

        Copies compressed rows, the memory of the decode policy, and llama.cpp's own cells and states.
        """
        copy = Sequence(self.driver, 1)
        copy.drop()
        _require_window(self.context)
        n_bytes = self.cache.stats().bytes if self.cache is not None else 0
        memory.require(n_bytes, "a copy of the conversation", "close other programs")
        copy.follow(self.sequence)
        if self.cache is not None:
            self.cache.check()
        self._copy, self._n_copy_cells = copy, 0
        return Mark(copy, self.cache.plan if self.cache is not None else None, n_bytes)

    def return_to(self, mark: Mark) -> None:
        """Restores exactly what was read at the mark. Uses the copy up. Raises OutOfMemoryError."""
        peak = self.sequence.peak_bytes() if self.cache is not None else 0
        self.sequence.follow(mark.copy)
        self.sequence.peak = peak
        mark.copy.drop()
        self._copy, self._n_copy_cells = None, 0
        if self.cache is not None:
            self.cache.check()
            if mark.plan is not None and mark.plan != self.cache.plan:
                self.set_plan(mark.plan)

    def encode(self, pieces: list[Piece], progress: Progress, cancel: threading.Event | None) -> None:
        """Computes the embeddings of the images. Raises ImageError, CancelledError, StateError."""
        encode(self._vision, pieces, progress, cancel)

    def prefill(self, pieces: list[Piece], progress: Progress, cancel: threading.Event | None) -> None:
        """Reads the pieces, and makes the logits of the last token. Raises ContextError, CancelledError."""
        if self._bounded:
            self._prefill_whole(pieces, progress, cancel)
            return
        if self._ages is not None:
            self._ages.free()
        self.context.stop_when(cancel)
        self.sequence.read(pieces, progress, cancel)
        self.sequence.replay(progress, cancel)
        self.context.stop_when(None)

    def _prefill_whole(self, pieces: list[Piece], progress: Progress, cancel: threading.Event | None) -> None:
        """Reads the pieces in one pass; libkvedge compresses each layer before the next one runs."""
        context, cache, sequence = self.context, self.cache, self.sequence
        if cache is None:
            raise StateError("a bounded prompt needs a model whose KV cache kvedge can manage; omit bounded")
        if self._table is not None and self._vision is not None and any(isinstance(p, ImagePiece) for p in pieces):
            prompt = bounded_batch.gather(pieces, self._table, self._vision, self._model, sequence.n_past)
        else:
            prompt = bounded_batch.gather_text(pieces, sequence.n_past)
        sequence.count_pending(cache, prompt.n_tokens)
        sequence.replay_s = 0.0
        layers = max(cache.stats().n_layers, 1)
        seen = -1

        def look() -> None:
            nonlocal seen
            if (done := cache.bounded_layers()) > seen:
                seen = done
                progress("reading the prompt, layer by layer", done / layers)

        stop_if_set(cancel)
        context.stop_when(cancel, look)
        try:
            cache.bound_prompt(prompt.image_mask)
            with self.driver.explained():
                context.decode_whole(prompt)
        finally:
            context.stop_when(None)
        sequence.see(pieces)
        progress("reading the prompt, layer by layer", 1.0)

    def extend(self, token: int) -> None:
        """Reads one generated token, and makes its logits. Raises ContextError."""
        self._turn(1)
        if self._thread_chooser is not None:
            self.context.set_threads(self._thread_chooser.threads(), self._threads)
        began = time.perf_counter()
        self.sequence.extend(token)
        if self._thread_chooser is not None:
            self._thread_chooser.took(time.perf_counter() - began)
        if self._pace is not None:
            self._pace.after(1, now=self.context.room < 1)

    def go_on(self, generation: Generation) -> str:
        """Reads the last chosen token, and chooses the next token, or several drafted tokens.

        Returns the text that became certain. Raises ContextError, GrammarError.
        """
        context = self.context
        if self._drafter is None:
            self.extend(generation.token)
            return generation.choose(context, self.room)
        self._turn(1)
        room, positions = self.room, self._positions
        if positions is not None and self._frees_room(room):  # renumber before the trained length
            room = positions.trained - self.sequence.n_past
        return self._drafter.step(generation, room, lambda: generation.choose(context, self.room))

    def compress(self) -> None:
        """Compresses what was read since the last compression: the last answer and the prompt."""
        if self._pace is not None:
            self._pace.compress()
        elif self.cache is not None:
            try:
                if self._ages is not None:
                    self._ages.listen()
                self.sequence.compress()
                self._recount()
                if self._ages is not None:
                    self._ages.pass_by()
            except StateError:
                self.cache.check()  # raises the error that stopped a bounded prompt, if one exists
                raise

    def check_cut(self) -> None:
        """Raises UsageError, UnsupportedError or StateError if `cut_out` is impossible."""
        cache = self.cache
        if self._ages is None or cache is None:
            raise UsageError("dropping a turn needs the uncompressed KV rows: set keep to 'ram' or 'disk'")
        if cache.replays:
            raise UnsupportedError(
                f"no turn can be dropped with method '{cache.plan.method}', which reads the conversation twice"
            )
        if not cache.stats().whole_bytes:
            raise StateError(f"no turn can be dropped: {cache.keep_problem() or 'no uncompressed KV rows are kept'}")
        cache.renumber(0, 1)  # changes nothing; raises if the keys of the model cannot be renumbered

    def cut_out(self, begin: TokenBoundary, end: TokenBoundary) -> None:
        """Removes the tokens between two boundaries, and the last mark. Raises StateError, OutOfMemoryError."""
        if self._copy is not None:
            self._copy.drop()
            self._copy, self._n_copy_cells = None, 0
        self.sequence.cut_out(begin, end)

    @property
    def ages(self) -> Ages:
        """Returns the ages, which limit each image. Raises UsageError without whole rows."""
        if self._ages is None:
            raise UsageError("demoting an image needs the uncompressed KV rows: set keep to 'ram' or 'disk'")
        return self._ages

    def pairs_held(self) -> float:
        """Returns the KV pairs per KV head, averaged over heads and layers. 0 without a cache of kvedge."""
        return self._sequence.pairs_held() if self._sequence is not None else 0

    def notes(self) -> list[str]:
        """Returns notes about what the last compression could not do as planned."""
        notes = self._sequence.notes() if self._sequence is not None else []
        positions = self._positions
        if positions is not None and positions.why_not and positions.needed(0) and not self._has_noted:
            self._has_noted = True
            notes.append(f"positions exceed the model's training length of {positions.trained}: {positions.why_not}")
        return notes

    def measure_again(self, kv: Kv) -> None:
        """Updates the figures that change during an answer: peak KV memory, and bytes of whole rows."""
        if self.cache is not None:
            stats = self.cache.stats()
            kv.peak_bytes = self.sequence.peak_bytes()
            kv.whole_bytes, kv.whole_file_bytes = stats.whole_bytes, stats.whole_file_bytes


def _require_window(context: Context) -> None:
    """Raises UnsupportedError if a windowed layer of llama.cpp has no free cells left for a copy.

    A windowed layer reuses cells behind its window, except cells shared with a copy. The layer has cells for two
    windows and one ubatch, rounded up to 256, at most n_ctx."""
    window = context.llama.llama_model_n_swa(context.model.handle)
    cells = -(-min(context.n_ctx, 2 * window + context.n_ubatch) // 256) * 256
    if window > 0 and cells < context.n_ctx and context.at.n_cells + window + context.n_ubatch > cells:
        raise UnsupportedError(
            f"the conversation is too long to copy: llama.cpp stores its layers with a window of {window} tokens"
        )
