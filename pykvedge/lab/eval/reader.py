"""Reader: reads a prompt once, and compresses copies of it by several plans.

A prompt's keys and values depend neither on the budget nor on what becomes of evicted pairs. So one reading serves all
plans with the same `reading_key`: libkvedge copies the sequence, with the scores gathered so far, and each copy is
compressed by its own plan. What is measured is what a session does; only the reading is not repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from pykvedge.errors import CancelledError, ContextError, KvedgeError, NothingToCompressError
from pykvedge.models.model import Model
from pykvedge.models.vision import ImagePiece, Piece, Vision
from pykvedge.plans.kvtypes import KvType
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import check_protection
from pykvedge.plans.profile import tables_for
from pykvedge.plans.stages.base import ProfileTable
from pykvedge.runtime import libkvedge
from pykvedge.runtime.llama_context import Context, ContextSize, check_memory, ubatch_for

PROMPT, BRANCH, SIDE = 0, 1, 2  # sequences: what was read, a compressed copy, a copy of that
STEP = 1024  # contexts grow by so many tokens
SPARE = 8


def reading_key(plan: Plan) -> tuple[Any, ...]:
    """Equal for plans that gather the same while the prompt is read."""
    members = (plan.scorer, plan.allocator, plan.decode)
    settings = tuple(sorted((k, v) for k, v in plan.params.items() if not k.startswith("reducer.")))
    return (plan.budget.ratio == 1.0, *members, settings)


class Reader:
    """A context of the model. Close it when done. Errors are those of Context and of libkvedge."""

    def __init__(self, model: Model, vision: Vision | None, threads: int, kv_type: str, n_ctx: int = 0) -> None:
        """n_ctx: tokens of the context, 0: as many as are needed, up to those that the model was trained for."""
        self.model, self.vision = model, vision
        self._threads, self._kv_type, self._n_ctx = threads, kv_type, n_ctx
        self._context: Context | None = None
        self._cache: libkvedge.Cache | None = None
        self._cancel: threading.Event | None = None
        self._logits: dict[int, np.ndarray] = {}  # of the last token of each sequence

    def close(self) -> None:
        """Frees the context."""
        if self._cache is not None:
            self._cache.detach()
            self._cache = None
        if self._context is not None:
            self._context.close()
            self._context = None

    def stop_when(self, cancel: threading.Event) -> None:
        """Decoding gives up with CancelledError when the event is set."""
        self._cancel = cancel

    def make_room(self, n_conversation: int, n_answer: int, largest_image: int) -> None:
        """Makes a context, or a larger one, for a conversation of so many tokens and two answers to it.

        Raises ContextError if it has more tokens than --ctx or the model allows.
        """
        limit = self._n_ctx or self.model.n_ctx_train or n_conversation + n_answer
        if n_conversation + n_answer > limit:
            raise ContextError(
                f"the conversation and its answer have up to {n_conversation + n_answer} tokens, the "
                + (
                    f"context holds {limit}; raise --ctx"
                    if self._n_ctx
                    else f"model was trained for {limit}; see --ctx"
                )
            )
        # the two answers lie in cells of their own, however many sequences share the prompt's
        cells = n_conversation + 2 * (n_answer + SPARE)
        n_ubatch = ubatch_for(self.vision, largest_image)
        have = self._context
        if have is not None and cells <= have.n_ctx and n_ubatch <= have.n_ubatch:
            return
        self.close()
        n_ctx = -(-cells // STEP) * STEP
        size = ContextSize(n_ctx, n_ubatch, self._kv_type, 2 * n_conversation, n_seq=3)
        check_memory(self.model, size, whole_cache=False)
        self._context = Context(self.model, size, self._threads)

    def start(self, plan: Plan) -> None:
        """Forgets everything; what is read next is read for this plan. Raises NothingToCompressError."""
        context = self._live()
        context.clear()
        if self._cache is None:
            try:
                self._cache = libkvedge.Cache(
                    context.handle, plan, self._kv_type, auto_compress=False, profiles=self._tables(plan)
                )
            except NothingToCompressError:
                if plan.method != "full" or KvType.parse(self._kv_type).quantised:
                    raise
        else:
            self._cache.set_plan(plan, self._tables(plan))
        context.stop_when(self._cancel)

    def _tables(self, plan: Plan) -> dict[str, ProfileTable]:
        return tables_for(plan, self.model.path)

    def copy(self, to: int) -> None:
        """The current sequence goes on as two; `to` is then the current one."""
        context = self._live()
        context.drop(to)
        context.copy_to(to)
        self._logits[to] = self._logits[context.sequence]
        context.switch(to)

    @property
    def current(self) -> int:
        """The sequence that is read into."""
        return self._live().sequence

    def back_to(self, sequence: int) -> None:
        """Ends the current sequence, a copy, and makes another the current one."""
        context = self._live()
        ended = context.sequence
        context.switch(sequence)
        context.drop(ended)

    def drop_copies(self) -> None:
        """Empties all copies of the prompt's sequence, which is then the current one."""
        context = self._live()
        if context.sequence != PROMPT:
            context.switch(PROMPT)
        for sequence in (BRANCH, SIDE):
            context.drop(sequence)

    def set_plan(self, plan: Plan) -> None:
        """The current sequence is compressed by this plan. Raises BudgetError if what it protects does not fit."""
        if self._cache is not None:
            check_protection(plan, self._cache.stats(self._live().sequence).n_pending)
            self._cache.set_plan(plan, self._tables(plan))

    def read(self, pieces: Sequence[Piece]) -> None:
        """Appends pieces to the current sequence; afterwards the logits of the last token are there."""
        context = self._live()
        try:
            for i, piece in enumerate(pieces):
                if isinstance(piece, ImagePiece):
                    if self.vision is None:
                        raise KvedgeError("the model was loaded without an image encoder")
                    context.decode_image(self.vision, piece)
                else:
                    context.decode(piece.tokens, want_logits=i == len(pieces) - 1)
        except CancelledError:
            raise
        except KvedgeError:
            self._check()
            raise
        self._logits[context.sequence] = context.logits().copy()

    def extend(self, token: int) -> None:
        """Appends a generated token to the current sequence."""
        context = self._live()
        try:
            context.decode([token], want_logits=True)
        except CancelledError:
            raise
        except KvedgeError:
            self._check()
            raise
        self._logits[context.sequence] = context.logits().copy()

    def logits(self) -> np.ndarray:
        """Of the last token of the current sequence: [n_vocab] float32."""
        return self._logits[self._live().sequence]

    def compress(self) -> None:
        """Compresses what the current sequence has of the last prompt."""
        if self._cache is not None:
            self._cache.compress(self._live().sequence)

    def held(self) -> tuple[float, int]:
        """(KV pairs per head, averaged over heads and layers; bytes of keys and values) of the current sequence."""
        if self._cache is None:
            return 0.0, 0
        sequence = self._live().sequence
        lengths = [n for heads in self._cache.lengths(sequence) for n in heads]
        return sum(lengths) / max(len(lengths), 1), self._cache.stats(sequence).bytes

    def _live(self) -> Context:
        if self._context is None:
            raise KvedgeError("no room was made for a conversation yet")
        return self._context

    def _check(self) -> None:
        if self._cache is not None:
            self._cache.check()
