"""Streams: prompts of any length, read piece by piece, and compressed to a bound on the way."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pykvedge.errors import ContextError, UsageError
from pykvedge.models.images import Picture
from pykvedge.models.model import Model, Progress
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.plans.plan import Plan
from pykvedge.plans.stages import registry
from pykvedge.runtime import figures
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.llama_context import DEFAULT_CTX, ROOM_TO_ANSWER, Context, ContextSize, ubatch_for
from pykvedge.runtime.report import Kv, Stream, Tokens
from pykvedge.runtime.settings import Settings

if TYPE_CHECKING:
    from pykvedge.runtime.engine import Engine
    from pykvedge.runtime.libkvedge import Cache


def check(plan: Plan) -> None:
    """Raises UsageError with what stands in the way of a stream, as libkvedge would refuse it."""
    scorer, budget = registry.scorer(plan.scorer), plan.budget
    if budget.pairs is None:
        raise UsageError(
            f"a stream needs a bound in KV pairs per layer and head, such as --budget 2048; {budget} is a share, of a "
            "prompt that never ends"
        )
    if plan.allocator != "uniform":
        raise UsageError(f"all heads of a stream hold as many KV pairs: use allocator uniform, not '{plan.allocator}'")
    if plan.decode != "keep-all":
        raise UsageError(f"the bound of a stream holds for the answer, too: use decode keep-all, not '{plan.decode}'")
    settings = plan.settings("scorer")
    if scorer.reserve is not None or settings.get("share") == "layer":
        raise UsageError(
            f"method '{plan.method}' cannot compress a stream: its scorer, '{plan.scorer}', looks at all heads at once "
            "or at what is gone; take another, such as snapkv, mixkv, h2o, lookm or streaming-llm"
        )
    if plan.text_overflow == "keep_all":
        raise UsageError("text_overflow keep_all keeps text beyond the bound of a stream; use budget")
    whole = scorer.whole_up_to(settings)
    if whole > budget.pairs:
        raise UsageError(
            f"scorer '{plan.scorer}' keeps its last {whole} tokens whole, more than the bound of {budget.pairs}; "
            "raise --budget, or lower --set scorer.window"
        )


class Pace:
    """Compresses a stream when it is time to."""

    def __init__(self, cache: Cache, context: Context, settings: Settings, n_layers: int) -> None:
        """n_layers: of the model."""
        self._cache, self._context, self._settings, self._n_layers = cache, context, settings, n_layers
        self._since = 0  # tokens since it was compressed

    @property
    def step(self) -> int:
        """Tokens of text that are read at a time."""
        return min(self._context.n_ubatch, self._settings.stream_tokens)

    def compress(self) -> None:
        """Compresses now. Raises what kvedge_compress_stream reports."""
        self._cache.compress_stream()
        self._context.n_cells = self._cache.cells()
        self._since = 0

    def after(self, n_tokens: int, image: bool = False, now: bool = False) -> None:
        """n_tokens were read, an image or not. now: compress whatever the settings say."""
        self._since += n_tokens
        if now or self._since >= self._settings.stream_tokens or (image and self._settings.stream is True):
            self.compress()

    def require_room(self, n_tokens: int) -> None:
        """Makes room in the context for so many. Raises ContextError."""
        context = self._context
        if context.room >= n_tokens:
            return
        self.compress()
        if context.room >= n_tokens:
            return
        if self._cache.stats().n_layers < self._n_layers:
            raise ContextError(
                f"the context of {context.n_ctx} tokens is full: llama.cpp keeps some layers of this model, and --ctx "
                "bounds its streams; raise --ctx"
            )
        raise ContextError(f"{n_tokens} tokens at a time do not fit a context of {context.n_ctx}; raise --ctx")


def stream_context(
    model: Model, vision: Vision | None, settings: Settings, pieces: list[Piece], plan: Plan
) -> ContextSize:
    """A context for a stream that begins with these pieces, one of each kind if there are any."""
    largest = max((p.n_tokens for p in pieces if isinstance(p, ImagePiece)), default=0)
    step = max(largest, settings.stream_tokens)
    automatic = max(min(model.n_ctx_train or DEFAULT_CTX, DEFAULT_CTX), step + ROOM_TO_ANSWER)
    n_ctx = settings.n_ctx or automatic
    held = min((plan.budget.pairs or 0) + step, n_ctx)
    return ContextSize(n_ctx, ubatch_for(vision, largest), settings.kv_type, held)


def measure(engine: Engine, model: Model, plan: Plan, kv_type: str) -> tuple[Kv, Stream] | None:
    """Figures of the stream so far; None where there is none."""
    cache = engine.cache
    if cache is None:
        return None
    stats, held = cache.stats(), engine.pairs_held()
    full = figures.uncompressed(model, cache, kv_type)
    layers = [round(sum(heads) / len(heads), 2) for heads in cache.lengths() if heads]
    kept = [int(n) if n == int(n) else n for n in layers]
    kv = Kv(full, stats.bytes, stats.peak_bytes, kept, stats.n_tokens, round(held))
    positions, bound = engine.context.n_past, plan.budget.pairs or 0
    return kv, Stream(bound, stats.n_tokens, stats.n_compressions, stats.bytes, positions, model.n_ctx_train)


def segments(
    text: str, marker: str, pictures: Iterable[Picture], before_these: int = 0
) -> Iterator[tuple[str, Picture | None]]:
    """Parts of a message in which `marker` stands once for all pictures, or once for each, with the one that follows.

    Several that share a marker are named as Message.content names them, `before_these` others being there already.
    Pictures are asked for one at a time.
    """
    if marker and text.count(marker) > 1:
        *parts, last = text.split(marker)
        yield from zip(parts, pictures, strict=True)
        yield last, None
        return
    before, found, after = text.partition(marker)
    some = list(itertools.islice(pictures, 2)) if found else []
    if len(some) < 2:
        yield before, some[0] if some else None
    else:
        yield before if before_these else f"{before}Image 1: ", some[0]  # a later message names a single one as well
        for i, picture in enumerate(itertools.chain(some[1:], pictures), start=before_these + 2):
            yield f"\nImage {i}: ", picture
    if found:
        yield after, None


@dataclass
class Source:
    """Pieces of a message as they are needed, and the pictures that have been read, without their pixels."""

    vision: Vision | None
    tokenize: Callable[[str], list[int]]
    seen: list[Picture] = field(default_factory=list)
    open: list[Piece] = field(default_factory=list)  # of the last picture, some of which may not be read

    def pieces(self, parts: Iterable[tuple[str, Picture | None]]) -> Iterator[Piece]:
        """One part after the other."""
        for text, picture in parts:
            if picture is None or self.vision is None:
                if text:
                    yield TextPiece(self.tokenize(text))
                continue
            self.open = self.vision.split(text + self.vision.marker, [picture])
            yield from self.open
            self.seen.append(Picture(picture.name, picture.width, picture.height, b""))


def read(
    engine: Engine,
    vision: Vision | None,
    plan: Plan,
    pieces: Iterator[Piece],
    progress: Progress,
    cancel: threading.Event | None,
    tokens: Tokens,
) -> None:
    """Reads the pieces, one at a time, and compresses on the way; afterwards the logits of the last token are there.

    Counts them in `tokens`. Raises ContextError, ImageError, NothingToCompressError, OutOfMemoryError, CancelledError.
    """
    # up to the first image, which says how much one pass must hold
    first: list[Piece] = []
    for piece in pieces:
        first.append(piece)
        if isinstance(piece, ImagePiece):
            break
    engine.make_room(first, plan)
    context, n_images = engine.context, 0
    context.stop_when(cancel)
    steps = cut(itertools.chain(first, pieces), engine.pace.step)
    step = next(steps, None)
    while step is not None:
        stop_if_set(cancel)
        tokens.prompt += step.n_tokens
        if isinstance(step, ImagePiece):
            n_images += 1
            tokens.image += step.n_tokens
            progress(f"reading image {n_images}, {tokens.prompt} tokens so far", 0.0)
        # what follows an image is only looked at when it was read; a prompt ends with text
        image = isinstance(step, ImagePiece)
        following = None if image else next(steps, None)
        _read_step(engine, vision, step, cancel, last=not image and following is None)
        step = next(steps, None) if image else following
    context.stop_when(None)


def _read_step(engine: Engine, vision: Vision | None, step: Piece, cancel: threading.Event | None, last: bool) -> None:
    """last: of the prompt. Its logits are wanted, and the answer begins at the bound."""
    context, pace = engine.context, engine.pace
    pace.require_room(step.n_tokens)
    if isinstance(step, ImagePiece) and vision is not None:
        if step.n_tokens > context.n_ubatch and vision.non_causal():
            raise ContextError(
                f"an image of {step.n_tokens} tokens must come with the first message; start a new conversation"
            )
        vision.encode(step, functools.partial(stop_if_set, cancel))
        engine.read_step(step, want_logits=False)
        vision.drop(step)
    else:
        engine.read_step(step, want_logits=last)
    pace.after(step.n_tokens, image=isinstance(step, ImagePiece), now=last)


def cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """The pieces, text cut so that each step is one pass through the model: progress shows, and Ctrl-C is heard."""
    for piece in pieces:
        if isinstance(piece, ImagePiece):
            yield piece
        else:
            yield from (TextPiece(piece.tokens[i : i + most]) for i in range(0, piece.n_tokens, most))
