"""A Reader reads a prompt once, and compresses copies of it by several plans.

A prompt's keys and values depend neither on the budget nor on the treatment of evicted pairs. One reading therefore
serves all plans with the same `reading_key`: libkvedge copies the sequence with its scores so far, and each copy is
compressed by its plan. The measurement equals that of a session, except that the prompt is not read again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from pykvedge.errors import ContextError, KvedgeError
from pykvedge.models.model import Model
from pykvedge.models.profiles import tables_for
from pykvedge.models.vision import ImagePiece, Piece, Vision
from pykvedge.plans import registry
from pykvedge.plans.making import check_protection
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import ContextSize, ubatch_for
from pykvedge.runtime.loaded import Loan
from pykvedge.runtime.sequence import Sequence
from pykvedge.runtime.settings import Keep, Settings

# sequences: the prompt, a compressed copy, a copy with one of several questions, a copy for an answer
PROMPT, BRANCH, ASKED, SIDE = range(4)
STEP = 1024  # context sizes are multiples of it, in tokens
SPARE = 8


# scorers that gather nothing while the prompt is read
_BLIND = ("position", "dct", "keydiff", "knorm", "vnorm", "random")
_WINDOWED = ("window", "mixkv", "modal")  # scorers that use the last queries only


def reading_key(plan: Plan) -> tuple[Any, ...]:
    """Returns a key that is equal for plans that gather the same data while the prompt is read."""
    settings = sorted(plan.params.items())
    scorer = [plan.scorer, *(pair for pair in settings if pair[0].startswith("scorer."))]
    if plan.scorer in _BLIND:
        scorer = []
    elif plan.scorer in _WINDOWED:
        scorer = ["window", plan.settings("scorer")["window"]]
    allocator = [pair for pair in settings if pair[0].startswith("allocator.")] if plan.allocator == "entropy" else None
    queries = registry.reducer(plan.reducer).queries
    own = plan.method if plan.profile_kinds() else ""  # if its profile is missing, only this method is left out
    return (own, plan.budget.ratio == 1.0, scorer, allocator, queries, plan.decode, plan.pruner, str(plan.image_tokens))


class Reader:
    """A Reader has a context of the model. Close it when done. Errors are those of Context and of libkvedge."""

    def __init__(
        self,
        model: Model,
        vision: Vision | None,
        threads: int,
        kv_type: str | KvType,
        n_ctx: int = 0,
        n_outputs: int = 0,
        keep: Keep | None = None,
    ) -> None:
        """n_ctx: tokens of the context; 0: as many as needed, up to the length of the model's training.

        n_outputs: tokens of one pass that can have logits, for `feed`. keep: the place of whole rows behind kept rows.
        """
        self.model, self.vision = model, vision
        self._threads, self._kv_type, self._n_ctx, self._n_outputs = threads, kv_type, n_ctx, n_outputs
        self._keep = keep
        self.later_floor: int | None = 0  # least tokens that a later message keeps; None: as in a chat
        self._driver: Driver | None = None
        self._sequences: list[Sequence] = []
        self._cancel: threading.Event | None = None
        self._logits: dict[int, np.ndarray] = {}  # of the last token of each sequence

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def stop_when(self, cancel: threading.Event) -> None:
        """Makes decoding raise CancelledError when the event is set."""
        self._cancel = cancel

    def make_room(self, n_conversation: int, n_answer: int, largest_image: int, n_again: int = 0) -> None:
        """Makes a context, or a larger one, for a conversation of n_conversation tokens and two answers to it.

        n_again: tokens that a second pass over a prompt needs at a time. Raises ContextError if the conversation
        exceeds --ctx or the model's length.
        """
        limit = self._n_ctx or self.model.n_ctx_train or n_conversation + n_answer
        if n_conversation + n_answer > limit:
            most = f"context holds {limit}; raise --ctx" if self._n_ctx else f"model was trained for {limit}; set --ctx"
            raise ContextError(
                f"the conversation and its answer have up to {n_conversation + n_answer} tokens, the {most}"
            )
        # each of the two answers needs cells; all sequences share the prompt's cells
        cells = n_conversation + max(2 * (n_answer + SPARE), n_again)
        n_ubatch = ubatch_for(self.vision, largest_image)
        have = self._driver.context if self._driver is not None else None
        if have is not None and cells <= have.n_ctx and n_ubatch <= have.n_ubatch:
            return
        self.close()
        n_ctx = -(-cells // STEP) * STEP
        size = ContextSize(n_ctx, n_ubatch, self._kv_type, 2 * n_conversation, n_seq=4, n_outputs=self._n_outputs)
        self._driver = Driver(self.model, self.vision, size, self._threads)
        self._sequences = [Sequence(self._driver, number) for number in range(4)]

    def start(self, plan: Plan) -> None:
        """Forgets everything. The next tokens are read for this plan. Raises NothingToCompressError."""
        driver = self._live()
        self._now = self._sequences[PROMPT]
        driver.context.clear()
        for one in self._sequences:
            one.begin()
        if driver.cache is None:
            driver.take_over(plan, tables_for(plan, self.model.path), self.later_floor, or_full=True)
        else:
            driver.cache.set_plan(plan, tables_for(plan, self.model.path))
        if self._keep is not None and driver.cache is not None:
            place = "" if plan.budget.ratio == 1.0 else self._keep.place  # a whole cache needs no whole rows behind it
            driver.cache.keep(place, self._keep.made_folder(), self._keep.space, self._keep.type)
        driver.context.stop_when(self._cancel)

    def copy(self, to: int) -> None:
        """Copies the current sequence to the sequence `to`, which becomes the current one."""
        copy = self._sequences[to]
        copy.follow(self._now)
        self._logits[to] = self.logits()
        self._now = copy

    @property
    def current(self) -> int:
        return self._now.number

    def back_to(self, number: int) -> None:
        """Drops the current sequence, a copy, and makes sequence `number` the current one."""
        self._now.drop()
        self._now = self._sequences[number]

    def drop_copies(self, of: int = PROMPT) -> None:
        """Makes sequence `of` the current one, and empties all sequences except this and the prompt's."""
        self._now = self._sequences[of]
        for copy in {BRANCH, ASKED, SIDE} - {of}:
            self._sequences[copy].drop()

    def set_plan(self, plan: Plan, tables: Mapping[str, ProfileTable] | None = None) -> None:
        """Sets the plan of the current sequence's next compression. Raises BudgetError if its protection does not fit.

        tables: profiles by stage, instead of the stored profiles.
        """
        driver = self._live()
        if driver.cache is not None:
            check_protection(plan, driver.cache.stats(self._now.number).n_pending)
            driver.cache.set_plan(plan, tables_for(plan, self.model.path) if tables is None else tables)

    def read(self, pieces: list[Piece]) -> None:
        """Appends pieces to the current sequence. If the last piece is text, its last logits are stored."""
        self._now.read(pieces, cancel=self._cancel)
        none = np.empty(0, np.float32)  # logits after an image are never used
        self._logits[self.current] = (
            none if isinstance(pieces[-1], ImagePiece) else self._live().context.logits().copy()
        )

    def extend(self, token: int) -> None:
        self._now.extend(token)
        self._logits[self.current] = self._live().context.logits().copy()

    def feed(self, tokens: list[int]) -> Iterator[np.ndarray]:
        """Appends tokens in as few passes as n_outputs allows. Yields the logits after each: [n_vocab] float32."""
        driver, most = self._live(), max(self._n_outputs, 1)
        for at in range(0, len(tokens), most):
            driver.context.at = self._now
            with driver.explained():
                rows = driver.context.decode_each(tokens[at : at + most])
            yield from rows

    def heads(self) -> list[tuple[int, int]]:
        """Returns (layer of the model, KV head) of all heads that kvedge stores; [] without a cache."""
        driver = self._live()
        if driver.cache is None:
            return []
        lengths = driver.cache.lengths(self.current)
        return [(i, h) for i, of in zip(driver.cache.layer_ids(), lengths, strict=True) for h in range(len(of))]

    def logits(self) -> np.ndarray:
        """Returns the logits of the last token of the current sequence: [n_vocab] float32."""
        return self._logits[self.current]

    def read_again(self) -> None:
        """Runs the second pass over the uncompressed part if the plan needs one. Copies then need none."""
        self._now.replay(cancel=self._cancel)

    def compress(self) -> None:
        """Compresses the current sequence. Raises KvedgeError if requested whole rows could not be kept."""
        self._now.compress()
        cache = self._live().cache
        if self._keep is not None and cache is not None and (problem := cache.keep_problem(self.current)):
            raise KvedgeError(f"--keep had no effect: {problem}")

    def keep(self, plan: Plan) -> None:
        """Keeps everything that was read last, and continues with a plan, whose decode policy then applies.

        If whole rows are kept, the last message was read over them, and all rows are compressed again by the plan.
        """
        driver = self._live()
        if self._keep is not None:
            self.compress()
        elif driver.cache is not None:
            driver.cache.set_plan(make_plan("full"))
            self._now.compress()
            driver.cache.set_plan(plan, tables_for(plan, self.model.path))

    def held(self) -> tuple[float, int]:
        """Returns the KV pairs per head (averaged over heads and layers) of the current sequence, and their bytes."""
        return self._now.pairs_held(), self._now.row_bytes() if self._live().cache is not None else 0

    def whole(self) -> tuple[int, int]:
        """Returns the bytes of whole rows behind the current sequence, and how many of these bytes are in a file."""
        cache = self._live().cache
        stats = cache.stats(self.current) if cache is not None else None
        return (stats.whole_bytes, stats.whole_file_bytes) if stats is not None else (0, 0)

    def pairs(self) -> list[list[list[int]]]:
        """Returns the token indices that the current sequence holds, per stored layer and KV head."""
        cache = self._live().cache
        if cache is None:
            return []
        lengths = cache.lengths(self.current)
        return [[cache.tokens(i, h, self.current) for h in range(len(of))] for i, of in enumerate(lengths)]

    def _live(self) -> Driver:
        if self._driver is None:
            raise KvedgeError("the reader has not read a conversation yet")
        return self._driver


@contextmanager
def reading(loan: Loan, settings: Settings, cancel: threading.Event, n_outputs: int = 0) -> Iterator[Reader]:
    """Yields a reader of a loaded model. Decoding ends when `cancel` is set. n_outputs: see Reader."""
    vision = Vision(loan.encoder) if loan.encoder else None
    kv_type, keep = settings.storage, settings.keeping
    with closing(Reader(loan.model, vision, loan.threads, kv_type, settings.n_ctx, n_outputs, keep)) as reader:
        reader.stop_when(cancel)
        yield reader
