"""A stream is a prompt of any length, which is read piece by piece and compressed to a bound on the way."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from pykvedge.errors import ContextError
from pykvedge.models.composer import Composer, Written
from pykvedge.models.images import Picture
from pykvedge.models.model import Model, Progress
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.plans.plan import Plan
from pykvedge.runtime import figures
from pykvedge.runtime.driver import cut
from pykvedge.runtime.engine import Engine
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.report import Kv, Stream, Tokens


def measure(engine: Engine, model: Model, plan: Plan, kv_type: str) -> tuple[Kv, Stream] | None:
    """Measures the stream so far; None is returned where there is none."""
    cache = engine.cache
    if cache is None:
        return None
    stats, held = cache.stats(), engine.pairs_held()
    full = figures.uncompressed(model, cache, kv_type)
    kv = Kv(full, stats.bytes, stats.peak_bytes, figures.per_layer(cache), stats.n_tokens, round(held))
    positions, bound = engine.context.n_past, plan.budget.pairs or 0
    return kv, Stream(bound, stats.n_tokens, stats.n_compressions, stats.bytes, positions, model.n_ctx_train)


def segments(
    text: str, marker: str, pictures: Iterable[Picture], before_these: int = 0
) -> Iterator[tuple[str, Picture | None]]:
    """Cuts a message in which `marker` stands once for all pictures, or once for each, with the one that follows.

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
    """A source has pieces of a message as they are needed, and pictures that were read, without their pixels."""

    vision: Vision | None
    composer: Composer
    message: Written
    planned: Callable[[list[Piece]], list[Piece]]  # what the plan's pruner leaves of them
    seen: list[Picture] = field(default_factory=list)
    open: list[Piece] = field(default_factory=list)  # of the last picture, some of which may not be read

    def pieces(self, parts: Iterable[tuple[str, Picture | None]]) -> Iterator[Piece]:
        """Yields the pieces of one part after the other."""
        for text, picture in parts:
            written = replace(self.message, text=text)
            if picture is None or self.vision is None:
                if text:
                    yield TextPiece(self.composer.tokens(written))
                continue
            self.open = self.planned(
                self.composer.pieces(replace(written, text=text + self.composer.marker), [picture])
            )
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
        image = isinstance(step, ImagePiece)
        if image:
            n_images += 1
            progress(f"reading image {n_images}, {tokens.prompt} tokens so far", 0.0)
        # what follows an image is only looked at when it was read; a prompt ends with text
        following = None if image else next(steps, None)
        _read_step(engine, vision, step, cancel, last=not image and following is None)
        tokens.add([step])
        step = next(steps, None) if image else following
    context.stop_when(None)


def _read_step(engine: Engine, vision: Vision | None, step: Piece, cancel: threading.Event | None, last: bool) -> None:
    """Reads one step. last: of the prompt; its logits are wanted, and the answer begins at the bound."""
    context, pace = engine.context, engine.pace
    pace.require_room(step.n_tokens)
    if isinstance(step, ImagePiece) and vision is not None:
        if step.n_tokens > context.n_ubatch and vision.non_causal():
            raise ContextError(
                f"an image of {step.n_tokens} tokens must come with the first message; start a new conversation"
            )
        vision.encode(step, functools.partial(stop_if_set, cancel))
        engine.driver.read_step(step, want_logits=False)
        vision.drop(step)
    else:
        engine.driver.read_step(step, want_logits=last)
    pace.after(step.n_tokens, image=isinstance(step, ImagePiece), now=last)
