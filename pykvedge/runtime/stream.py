"""Reads a stream, a prompt of any length: reads pieces one by one, and compresses to a limit in between."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from pykvedge.errors import ContextError
from pykvedge.library.libkvedge import Cache
from pykvedge.models.composer import Composer, PromptText
from pykvedge.models.images import Picture
from pykvedge.models.model import Model, Progress
from pykvedge.models.prompt import label
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.plans.plan import Plan
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.llama_context import DEFAULT_CTX, ROOM_TO_ANSWER, ContextSize, ubatch_for
from pykvedge.runtime.report import Kv, Stream, Tokens
from pykvedge.runtime.sequence import Positions, Sequence, cut
from pykvedge.runtime.settings import Settings


class Pace:
    """Reads a stream into a sequence, and compresses the sequence at the right times."""

    def __init__(
        self, driver: Driver, sequence: Sequence, cache: Cache, settings: Settings, positions: Positions | None = None
    ) -> None:
        self._driver, self._sequence, self._cache, self._settings = driver, sequence, cache, settings
        self._positions = positions
        self._since = 0  # tokens read since the last compression

    @property
    def step(self) -> int:
        """Returns how many text tokens are read at a time."""
        return min(self._driver.context.n_ubatch, self._settings.stream_tokens)

    def compress(self) -> None:
        """Compresses now. Raises the errors of kvedge_compress_stream."""
        self._cache.compress_stream()
        self._sequence.n_cells = self._cache.cells()
        self._since = 0

    def after(self, n_tokens: int, image: bool = False, now: bool = False) -> None:
        """Counts n_tokens as read, and compresses if due. image: the tokens are an image. now: always compress."""
        self._since += n_tokens
        if now or self._since >= self._settings.stream_tokens or (image and self._settings.stream is True):
            self.compress()

    def read(self, pieces: Iterable[Piece], progress: Progress, cancel: threading.Event | None, tokens: Tokens) -> None:
        """Reads the pieces one by one, compresses in between, and makes the logits of the last token.

        Adds the pieces to `tokens`. Raises ContextError, ImageError, OutOfMemoryError, CancelledError.
        """
        context, n_images = self._driver.context, 0
        context.stop_when(cancel)
        steps = cut(pieces, self.step)
        step = next(steps, None)
        while step is not None:
            stop_if_set(cancel)
            image = isinstance(step, ImagePiece)
            if image:
                n_images += 1
                progress(f"reading image {n_images}, {tokens.prompt} tokens so far", 0.0)
            # requests the piece behind an image only after the image was read; a prompt never ends with an image
            following = None if image else next(steps, None)
            self._read_step(step, cancel, last=not image and following is None)
            tokens.add([step])
            step = next(steps, None) if image else following
        context.stop_when(None)

    def _read_step(self, step: Piece, cancel: threading.Event | None, last: bool) -> None:
        """Reads one step. last: the prompt's last step, which needs logits and a compression before the answer."""
        context, vision = self._driver.context, self._driver.vision
        self._require_room(step.n_tokens)
        if self._positions is not None:
            self._positions.make_room(step.n_tokens)
        if isinstance(step, ImagePiece) and vision is not None:
            if step.n_tokens > context.n_ubatch and vision.non_causal():
                raise ContextError(
                    f"an image of {step.n_tokens} tokens is too large for a later message; start a new conversation "
                    f"with this image"
                )
            vision.encode(step, functools.partial(stop_if_set, cancel))
            self._sequence.read_step(step, want_logits=False)
            vision.drop(step)
        else:
            self._sequence.read_step(step, want_logits=last)
        self.after(step.n_tokens, image=isinstance(step, ImagePiece), now=last)

    def _require_room(self, n_tokens: int) -> None:
        context, model = self._driver.context, self._driver.model
        if context.room >= n_tokens:
            return
        self.compress()
        if context.room >= n_tokens:
            return
        if self._cache.stats().n_layers < model.n_layer:
            raise ContextError(
                f"the context of {context.n_ctx} tokens is full, because llama.cpp stores some layers of this model "
                f"uncompressed; raise --ctx"
            )
        raise ContextError(
            f"a piece of {n_tokens} tokens does not fit in the context of {context.n_ctx} tokens; raise --ctx"
        )

    def measure(self, plan: Plan) -> tuple[Kv, Stream]:
        cache, model, sequence = self._cache, self._driver.model, self._sequence
        stats, sequence.measured_pairs = cache.stats(), sequence.pairs_held()
        full, layers = max(sequence.plain_bytes(stats.n_tokens), stats.bytes), sequence.per_layer()
        kv = Kv(full, stats.bytes, stats.peak_bytes, layers, stats.n_tokens, round(sequence.measured_pairs))
        now = Stream(plan.budget.pairs or 0, stats.n_tokens, stats.n_compressions, stats.bytes, full, sequence.n_past)
        now.trained = self._settings.most_positions(model.n_ctx_train)
        if self._positions is not None:
            now.turned, now.why_counted = self._positions.n_renumberings, self._positions.why_not
        return kv, now


def stream_context(
    model: Model, vision: Vision | None, settings: Settings, pieces: list[Piece], plan: Plan
) -> ContextSize:
    """Returns a context size for a stream. pieces: its first pieces, with an image if the stream has images."""
    largest = max((p.n_tokens for p in pieces if isinstance(p, ImagePiece)), default=0)
    step = max(largest, settings.stream_tokens)
    automatic = max(min(model.n_ctx_train or DEFAULT_CTX, DEFAULT_CTX), step + ROOM_TO_ANSWER)
    n_ctx = settings.n_ctx or automatic
    held = min((plan.budget.pairs or 0) + step, n_ctx)
    return ContextSize(n_ctx, ubatch_for(vision, largest), settings.storage, held)


def beginning(pieces: Iterator[Piece]) -> list[Piece]:
    """Takes the pieces up to the first image: the image's size decides how many tokens one pass must hold."""
    first: list[Piece] = []
    for piece in pieces:
        first.append(piece)
        if isinstance(piece, ImagePiece):
            break
    return first


def segments(
    text: str, marker: str, pictures: Iterable[Picture], earlier: list[Picture]
) -> Iterator[tuple[str, Picture | None]]:
    """Cuts a message into texts, each with the picture behind it. `marker` stands once per picture, or once for all.

    Pictures that share a marker get labels (Message.content). earlier: of earlier messages. Requests pictures singly.
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
        told = bool(earlier) or some[0].page  # the text already has the first label
        seen = [*earlier, some[0]]
        yield before if told else f"{before}{label(some[0], earlier)}: ", some[0]
        for picture in itertools.chain(some[1:], pictures):
            yield f"\n{label(picture, seen)}: ", picture
            seen.append(replace(picture, rgb=b""))
    if found:
        yield after, None


@dataclass
class Source:
    """Makes the pieces of a message when they are needed. Remembers the pictures without their pixels."""

    vision: Vision | None
    composer: Composer
    message: PromptText
    planned: Callable[[list[Piece]], list[Piece]]  # prunes pieces by the plan
    seen: list[Picture] = field(default_factory=list)
    open: list[Piece] = field(default_factory=list)  # pieces of the last picture; some may be unread

    def pieces(self, parts: Iterable[tuple[str, Picture | None]]) -> Iterator[Piece]:
        """Yields the pieces, part by part."""
        for text, picture in parts:
            prompt = replace(self.message, text=text)
            if picture is None or self.vision is None:
                if text:
                    yield TextPiece(self.composer.tokens(prompt))
                continue
            self.open = self.planned(
                self.composer.pieces(replace(prompt, text=text + self.composer.marker), [picture])
            )
            yield from self.open
            self.seen.append(replace(picture, rgb=b""))
