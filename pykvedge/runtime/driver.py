"""A Driver has one llama_context and its cache in libkvedge. Sessions, evaluations and benchmarks read by it.

So what is measured is what a session does: prompts are cut into the same passes, and fail with the same words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from pykvedge.errors import CancelledError, KvedgeError, LibraryError, NothingToCompressError, StateError
from pykvedge.library.libkvedge import Cache
from pykvedge.models.composer import Composer
from pykvedge.models.model import Model, Progress, silent
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.native.abi import DEVICES_ALL, DEVICES_AUTO
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.llama_context import Context, ContextSize, check_memory
from pykvedge.runtime.replay import Part, Passage, Requests, parts


class Driver:
    """A context of a model; close it when done. `cache` is None where llama.cpp keeps the KV memory itself."""

    def __init__(
        self, model: Model, vision: Vision | None, size: ContextSize, threads: int, whole_cache: bool = False
    ) -> None:
        """whole_cache: llama.cpp is to keep the KV memory, which it allocates for the whole context at once.

        Raises OutOfMemoryError, and KvedgeError with llama.cpp's reason.
        """
        check_memory(model, size, threads, whole_cache)
        self._model, self._vision, self._size, self.threads = model, vision, size, threads
        self.context = Context(model, size, threads)
        self.cache: Cache | None = None
        self.replay_s = 0.0  # that the last second pass over a prompt took
        self._passages: dict[int, Passage] = {}  # by sequence, of a plan that asks for such a pass

    def close(self) -> None:
        """Frees the context and its KV memory. Does nothing the second time."""
        if self.cache is not None:
            self.cache.detach()
            self.cache = None
        self.context.close()

    def take_over(
        self, plan: Plan, tables: Mapping[str, ProfileTable] | None = None, later_floor: int | None = None
    ) -> None:
        """From now on libkvedge owns the KV memory of the context, which holds no tokens yet.

        tables: profiles of the plan's stages that need one. later_floor: as Cache has it. Raises
        NothingToCompressError, and what Cache raises.
        """
        kv_type = self._size.kv_type
        devices = DEVICES_ALL if self._model.offload.through_graph else DEVICES_AUTO
        self.cache = Cache(
            self.context.handle, plan, kv_type, False, profiles=tables, later_floor=later_floor, devices=devices
        )
        self.context.takes_gaps = True

    def take_over_if_possible(
        self, plan: Plan, tables: Mapping[str, ProfileTable] | None = None, later_floor: int | None = None
    ) -> None:
        """Does the same, but a plan that keeps everything also runs where kvedge has nothing to take over."""
        try:
            self.take_over(plan, tables, later_floor)
        except (NothingToCompressError, LibraryError) as error:
            if isinstance(error, LibraryError) and plan.method != "full":
                raise
            if KvType.parse(self._size.kv_type).quantised:
                raise NothingToCompressError(
                    f"{self._model.path.name} runs as it is, without kvedge's KV memory, so nothing can be stored as "
                    f"{self._size.kv_type}; use f16, bf16 or f32"
                ) from error
            self.require_full(plan)
            check_memory(self._model, self._size, self.threads, whole_cache=True)

    def require_full(self, plan: Plan) -> None:
        """Raises NothingToCompressError for a plan that a model without KV memory of kvedge's cannot follow."""
        if plan.method != "full":
            raise NothingToCompressError(
                f"{self._model.path.name} has no attention layer whose KV memory kvedge can take over, so method "
                f"'{plan.method}' has nothing to compress; use --method full"
            )

    # ---------------------------------------------------------------------------------------------------

    def read(self, pieces: Iterable[Piece], progress: Progress = silent, cancel: threading.Event | None = None) -> None:
        """Appends pieces to the current sequence; afterwards the logits of the last token are there.

        Raises ContextError, CancelledError, and what libkvedge met meanwhile.
        """
        steps = list(cut(pieces, self.context.n_ubatch))
        done, total = 0, sum(step.n_tokens for step in steps)
        if self.cache is not None:
            self.cache.expect(total, self.context.sequence)
        for i, step in enumerate(steps):
            progress("reading the prompt", done / total)
            stop_if_set(cancel)
            self.read_step(step, want_logits=i == len(steps) - 1)
            done += step.n_tokens
        progress("reading the prompt", 1.0)

    def read_step(self, step: Piece, want_logits: bool) -> None:
        """Appends a piece that one pass holds, an image encoded before. want_logits: of its last token."""
        self._decode(step, want_logits)
        if self.cache is not None and self.cache.replays:
            self._passages.setdefault(self.context.sequence, Passage()).add(step)

    def _decode(self, step: Piece, want_logits: bool) -> None:
        with self.explained():
            if not isinstance(step, ImagePiece):
                self.context.decode(step.tokens, want_logits)
            elif self._vision is None:
                raise StateError("the model was loaded without an image encoder")
            else:
                self.context.decode_image(self._vision, step)

    def extend(self, token: int) -> None:
        """Appends one generated token; afterwards its logits are there. Raises ContextError."""
        self.read_step(TextPiece([token]), want_logits=True)

    def compress(self) -> None:
        """Compresses what the current sequence has of the last prompt, after a second pass if there was none."""
        if self.cache is not None:
            self.replay()
            self.cache.compress(self.context.sequence)
            self.forget()

    def forget(self) -> None:
        """Forgets what the current sequence has read since it was compressed."""
        self._passages.pop(self.context.sequence, None)

    def known(self) -> Passage:
        """Returns what the current sequence has read since it was compressed, as far as a second pass asks for it."""
        return self._passages.get(self.context.sequence, Passage()).copy()

    def know(self, passage: Passage, sequence: int) -> None:
        """Notes that a sequence has read this since it was compressed."""
        self._passages[sequence] = passage.copy()

    def replay(self, progress: Progress = silent, cancel: threading.Event | None = None) -> None:
        """Reads the prompt a second time if the plan asks for that, and takes it back; its logits stay.

        Does nothing where the budget covers the prompt, or where that was done. Raises what read raises.
        """
        cache, context = self.cache, self.context
        passage = self._passages.get(context.sequence) or Passage()
        stats = cache.stats(context.sequence) if cache is not None and cache.replays else None
        self.replay_s, n = 0.0, stats.n_pending if stats else 0
        if cache is None or stats is None or passage.replayed == n or cache.keeps_all(context.sequence):
            return
        started = time.perf_counter()
        pieces = passage.last(n)
        told = bool(pieces) and isinstance(pieces[-1], TextPiece)
        logits = context.logits().copy() if told else None
        requests = Requests(Composer(self._model, self._vision))
        chunks = list(parts(cache.plan, pieces, n, context.room, requests, begins=n == stats.n_tokens))
        for part in chunks:
            self._read_again(cache, part, part is chunks[-1] and told, cancel)
            progress("reading the prompt again", part.chunk.last / n)
        if logits is not None:
            context.put_back(logits)
        passage.replayed, self._passages[context.sequence] = n, passage
        self.replay_s = time.perf_counter() - started

    def _read_again(self, cache: Cache, part: Part, want_logits: bool, cancel: threading.Event | None) -> None:
        context = self.context
        n_past, n_cells = context.n_past, context.n_cells
        steps = list(cut(part.pieces, context.n_ubatch))
        try:
            with cache.replaying(part.chunk, context.sequence):
                for i, step in enumerate(steps):
                    stop_if_set(cancel)
                    self._decode(step, want_logits and i == len(steps) - 1)
        finally:
            context.n_past, context.n_cells = n_past, n_cells

    def pairs_held(self) -> float:
        """Averages the KV pairs per KV head of the current sequence; they are 0 where there is no cache."""
        cache = self.cache
        lengths = [n for heads in cache.lengths(self.context.sequence) for n in heads] if cache is not None else []
        return sum(lengths) / len(lengths) if lengths else 0

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replaces the error of a failed decode by what libkvedge met inside it, where that was the cause."""
        try:
            yield
        except KvedgeError as error:
            if self.cache is not None and not isinstance(error, CancelledError):
                self.cache.check()
            raise


def cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Cuts text so that each step is one pass through the model: progress shows, and Ctrl-C is heard."""
    for piece in pieces:
        if isinstance(piece, ImagePiece):
            yield piece
        else:
            yield from (TextPiece(piece.tokens[i : i + most]) for i in range(0, piece.n_tokens, most))
