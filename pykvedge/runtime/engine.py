"""The Engine reads prompts into a llama.cpp context whose KV memory libkvedge owns, and compresses them."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pykvedge.errors import ContextError, NothingToCompressError, SessionFileError, StateError, UnsupportedError
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
from pykvedge.runtime import bounded_batch, figures
from pykvedge.runtime.crew import Crew
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.llama_context import DEFAULT_CTX, ROOM_TO_ANSWER, Context, ContextSize, ubatch_for
from pykvedge.runtime.mark import Mark, bring_back, copy
from pykvedge.runtime.pace import Pace, stream_context
from pykvedge.runtime.replay import extra_tokens
from pykvedge.runtime.report import Kv
from pykvedge.runtime.sessionfile import Note, encoded
from pykvedge.runtime.settings import Settings
from pykvedge.runtime.snapshot import Snapshot
from pykvedge.system import memory


class Engine:
    """An engine has one sequence of tokens: text and images go in, logits come out, and what it read is compressed."""

    def __init__(
        self, model: Model, vision: Vision | None, settings: Settings, threads: int, crew: Crew | None
    ) -> None:
        """threads: as many read, and as many generate; where a crew is given, fewer if that is sooner."""
        self._model, self._vision = model, vision
        self._settings, self._threads = settings, threads
        self._crew = crew
        self._driver: Driver | None = None
        self._table: TokenTable | None = None
        self.not_bounded = ""  # why the last prompt was not read layer by layer although that was asked for
        self._set_plan: Plan | None = None  # that the cache follows
        self._reset()

    def _reset(self) -> None:
        self._pace: Pace | None = None  # of a stream
        self._n_compressions = 0
        self._compressed_tokens = 0  # since they were measured
        self._held = 0.0  # pairs per head after it

    @property
    def driver(self) -> Driver:
        """The driver has the context and the cache. Raises StateError before the first prompt."""
        if self._driver is None:
            raise StateError("nothing was read yet")
        return self._driver

    @property
    def context(self) -> Context:
        """The context exists from the first prompt on. Raises StateError before."""
        return self.driver.context

    @property
    def pace(self) -> Pace:
        """The pace says when a stream is compressed. Raises NothingToCompressError where there is none."""
        if self._pace is None:
            raise NothingToCompressError(f"kvedge does not hold the KV cache of {self._model.path.name}")
        return self._pace

    @property
    def cache(self) -> libkvedge.Cache | None:
        """The cache is the KV memory that libkvedge owns; it is None for a model that runs as it is."""
        return self._driver.cache if self._driver is not None else None

    def close(self) -> None:
        """Frees the context and its KV memory; the next prompt makes new ones."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        self._reset()

    def set_plan(self, plan: Plan) -> None:
        """Compresses prompts that complete from now on by this plan. Raises NothingToCompressError, ProfileError."""
        tables = self.tables(plan)
        if self.cache is not None:
            self.cache.set_plan(plan, tables)
            self._set_plan = plan
        elif self._driver is not None:
            self.driver.require_full(plan)

    # ---------------------------------------------------------------------------------------------------

    def make_room(self, pieces: list[Piece], plan: Plan) -> None:
        """Makes the context if there is none, and checks that the pieces fit.

        Raises ContextError, OutOfMemoryError, NothingToCompressError, BudgetError.
        """
        if self._settings.stream:
            if self._driver is None:
                self._open(stream_context(self._model, self._vision, self._settings, pieces, plan), plan)
                self.pace.compress()  # nothing yet, but whether it can be done
            return
        n = sum(p.n_tokens for p in pieces)
        images = [p.n_tokens for p in pieces if isinstance(p, ImagePiece)]
        what = f"{n} tokens" + (f" ({sum(images)} of images)" if images else "")
        largest = max(images, default=0)
        if self.cache is not None and plan != self._set_plan:
            self.set_plan(plan)
        self.not_bounded = self._why_not_bounded(pieces, n, plan) if self._settings.bounded else ""
        if self._driver is None:
            check_protection(plan, n)
            self._make_context(n, largest, what, plan)
        elif n > self.context.room:
            raise ContextError(
                f"the message has {what}, but only {self.context.room} of the context of {self.context.n_ctx} are "
                "left; raise --ctx or start a new conversation"
            )
        elif largest > self.context.n_ubatch < ubatch_for(self._vision, largest):
            raise ContextError(
                f"an image of {largest} tokens must come with the first message; start a new conversation"
            )

    def _make_context(self, n_prompt: int, largest_image: int, what: str, plan: Plan) -> None:
        trained = self._model.n_ctx_train or DEFAULT_CTX
        more = max(ROOM_TO_ANSWER, extra_tokens(plan, n_prompt, largest_image))
        automatic = max(min(trained, DEFAULT_CTX), min(trained, n_prompt + more))
        n_ctx = self._settings.n_ctx or automatic
        if n_prompt > n_ctx:
            advice = "raise --ctx" if self._settings.n_ctx else "set --ctx to go beyond what the model was trained for"
            raise ContextError(f"the prompt has {what}, the context holds {n_ctx}; {advice}, or send less")
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
            return f"kvedge does not hold the KV cache of {self._model.path.name}"
        if self._driver is not None and n > self.context.n_ubatch:
            return f"{n} tokens are more than the {self.context.n_ubatch} of the first message, which one pass holds"
        if shares_cache(self._model.header):
            return f"layers of {self._model.path.name} read the keys and values of an earlier one, all of them"
        if any(isinstance(p, ImagePiece) for p in pieces):
            try:
                self._table = self._table or TokenTable(self._model.header)
            except UnsupportedError as error:
                return str(error)
        return bounded_batch.why_not(self._vision, pieces) or native_plan.why_not_bounded(plan, self._settings.kv_type)

    def _open(self, size: ContextSize, plan: Plan) -> None:
        tables = self.tables(plan)
        driver = Driver(self._model, self._vision, replace(size, n_seq=2 if self._settings.undo else 1), self._threads)
        try:
            driver.take_over_if_possible(plan, tables)
        except BaseException:
            driver.close()
            raise
        self._driver, self._set_plan = driver, plan
        if driver.cache is None and self._bounded:
            self.not_bounded = f"kvedge does not hold the KV cache of {self._model.path.name}"
        if self._settings.stream and driver.cache is not None:
            self._pace = Pace(driver.cache, driver.context, self._settings, self._model.n_layer)

    def tables(self, plan: Plan) -> dict[str, ProfileTable]:
        """Returns the profiles that the plan needs, by stage. Raises ProfileError."""
        return profiles.tables_for(plan, self._model.path, self._settings.profile, spare=True)

    # ---------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], model: str, note: Note) -> None:
        """Writes the cache to a file, with a note that it completes. Raises SessionFileError, UnsupportedError."""
        context = self.context
        if self.cache is None:
            raise UnsupportedError(
                f"kvedge does not keep the memory of {self._model.path.name}, so its sessions cannot be saved"
            )
        note.n_ctx, note.n_ubatch = context.n_ctx, context.n_ubatch
        note.n_past, note.n_cells, note.held = context.n_past, context.n_cells, self._held
        self.cache.save(encoded(path), model, note.encode())

    def restore(self, path: str | os.PathLike[str], model: str, note: Note, plan: Plan) -> None:
        """Makes a new context with the cache of a file in it. Raises what make_room raises, and SessionFileError."""
        name = os.fsdecode(path)
        n_bytes = Path(name).stat().st_size
        self._restore(note, plan, name, n_bytes, lambda cache: cache.load(encoded(path), model))

    def fork(self, at: Snapshot, model: str, note: Note, plan: Plan) -> None:
        """Makes a new context with a packed cache in it. Raises what make_room raises, and SessionFileError."""
        self._restore(note, plan, "a fork", len(at.rows), lambda cache: libkvedge.unpack(cache, at.rows, model))

    def _restore(
        self, note: Note, plan: Plan, name: str, n_bytes: int, fill: Callable[[libkvedge.Cache], None]
    ) -> None:
        self.close()
        n_ctx = self._settings.n_ctx or note.n_ctx
        if note.n_cells >= n_ctx:
            raise ContextError(f"{name} holds {note.n_cells} tokens, the context {n_ctx}; raise --ctx")
        memory.require(n_bytes, name, "close other programs")
        self._open(ContextSize(n_ctx, max(note.n_ubatch, 1), self._settings.storage), plan)
        try:
            if self.cache is None:
                raise SessionFileError(f"{name} was saved with another model; load that one")
            fill(self.cache)
            self._stand(Snapshot(b"", note.n_past, note.n_cells), name)
            self._held = note.held
        except BaseException:
            self.close()
            raise
        if self._pace is not None:
            self._pace.compress()

    def _stand(self, at: Snapshot, name: str) -> None:
        stats = self._own_cache().stats()
        if stats.n_tokens < at.n_cells:
            raise SessionFileError(f"{name} contradicts itself; it cannot be used")
        self.context.n_past, self.context.n_cells = at.n_past, at.n_cells
        self._n_compressions, self._compressed_tokens = stats.n_compressions, at.compressed_tokens

    # ---------------------------------------------------------------------------------------------------

    def pack(self, model: str) -> Snapshot:
        """Returns what was read and compressed as bytes. Raises UnsupportedError, StateError, OutOfMemoryError."""
        context, cache = self.context, self._own_cache()
        memory.require(cache.stats().bytes, "a copy of the conversation", "close other programs")
        rows, compressed = libkvedge.pack(cache, model), self._compressed_tokens
        return Snapshot(rows, context.n_past, context.n_cells, compressed_tokens=compressed, held=self._held)

    def begin(self, at: Snapshot, model: str) -> None:
        """Goes on, in a context that nothing was read in, from what `pack` returned.

        Raises SessionFileError, StateError, OutOfMemoryError; what is read then is read from the beginning.
        """
        libkvedge.unpack(self._own_cache(), at.rows, model)
        self._stand(at, "what was kept of an earlier conversation")

    def _own_cache(self) -> libkvedge.Cache:
        if self.cache is None:
            raise UnsupportedError(
                f"kvedge does not keep the memory of {self._model.path.name}, so it cannot be put aside"
            )
        return self.cache

    # ---------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Keeps a copy of all that was read, in place of an older one. Raises OutOfMemoryError, UnsupportedError."""
        copied = copy(self.context, self.cache)
        return Mark(self.context.n_past, self.context.n_cells, self._set_plan, self._held, copied, self.driver.known())

    def return_to(self, mark: Mark) -> None:
        """Goes back to what was read at the mark, whose copy is used up. Raises OutOfMemoryError."""
        self._n_compressions, self._held = bring_back(self.context, self.cache, mark), mark.held
        self.driver.know(mark.passage, self.context.sequence)
        if mark.plan is not None and mark.plan != self._set_plan:
            self.set_plan(mark.plan)

    # ---------------------------------------------------------------------------------------------------

    def encode(self, pieces: list[Piece], progress: Progress, cancel: threading.Event | None) -> None:
        """Computes the embeddings of the images. Raises ImageError, CancelledError."""
        images = [p for p in pieces if isinstance(p, ImagePiece)]

        def look(i: int, share: float) -> None:
            progress(f"encoding image {i + 1} of {len(images)}", (i + share) / len(images))
            stop_if_set(cancel)

        for i, piece in enumerate(images):
            look(i, 0.0)
            if self._vision is None:
                raise StateError("the session has no image encoder")
            self._vision.encode(piece, functools.partial(look, i))

    def prefill(self, pieces: list[Piece], progress: Progress, cancel: threading.Event | None) -> None:
        """Reads the pieces; afterwards the logits of the last token are there. Raises ContextError, CancelledError."""
        context = self.context
        if self._bounded:
            self._prefill_whole(pieces, progress, cancel)
            return
        context.stop_when(cancel)
        self.driver.read(pieces, progress, cancel)
        self.driver.replay(progress, cancel)
        context.stop_when(None)

    def _prefill_whole(self, pieces: list[Piece], progress: Progress, cancel: threading.Event | None) -> None:
        """Reads the pieces in one pass; libkvedge compresses each layer before the next one runs."""
        context, cache, start = self.context, self.cache, self.context.n_past
        if cache is None:
            raise StateError("a bounded prompt needs a KV cache that kvedge holds")
        if self._table is not None and self._vision is not None and any(isinstance(p, ImagePiece) for p in pieces):
            prompt = bounded_batch.gather(pieces, self._table, self._vision, self._model, start)
        else:
            prompt = bounded_batch.gather_text(pieces, start)
        self._compressed_tokens += cache.stats().n_pending + prompt.n_tokens
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
        progress("reading the prompt, layer by layer", 1.0)

    def extend(self, token: int) -> None:
        """Reads one generated token; afterwards its logits are there. Raises ContextError."""
        if self._crew is not None:
            self.context.set_threads(self._crew.threads(), self._threads)
        began = time.perf_counter()
        self.driver.extend(token)
        if self._crew is not None:
            self._crew.took(time.perf_counter() - began)
        if self._pace is not None:
            self._pace.after(1, now=self.context.room < 1)

    def compress(self) -> None:
        """Compresses what was read since the last time: the answer of the last turn, and the prompt."""
        if self._pace is not None:
            self._pace.compress()
        elif self.cache is not None:
            pending = self.cache.stats().n_pending
            if not (self._bounded and pending == 0):
                self._compressed_tokens += pending
            try:
                self.driver.compress()
            except StateError:
                self.cache.check()  # what ended a bounded prompt
                raise

    # ---------------------------------------------------------------------------------------------------

    def pairs_held(self) -> float:
        """Averages the KV pairs per KV head over heads and layers; they are 0 for a model that runs as it is."""
        return self._driver.pairs_held() if self._driver is not None else 0

    def measure(self) -> Kv:
        """Measures the KV memory, right after compress."""
        kv_type = self._settings.kv_type
        if self.cache is None:
            # llama.cpp allocates for the whole context at once
            n = self._model.kv_bytes_per_token(KvType.parse(kv_type).plain.bytes_per_value) * self.context.n_ctx
            return Kv(n, n, n)
        n, held = self.cache.stats().n_compressions, self.pairs_held()
        # a prompt whose budget covers it is not compressed, and leaves the figures of the last compression alone
        out = figures.of_cache(self._model, self.cache, kv_type, compressed=n > self._n_compressions)
        out.compressed_tokens, out.kept_of_them = self._compressed_tokens, round(held - self._held)
        self._n_compressions, self._held, self._compressed_tokens = n, held, 0
        return out

    def notes(self) -> list[str]:
        """Says what the last compression could not do as the plan has it."""
        return figures.notes(self.cache) if self.cache is not None else []

    def peak_bytes(self, so_far: int) -> int:
        """Tells the largest amount of KV memory up to now, in bytes. so_far: the answer without a cache."""
        return self.cache.stats().peak_bytes if self.cache is not None else so_far
