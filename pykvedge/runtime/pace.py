"""A stream has a pace: how large its context is, and when it is compressed."""

from __future__ import annotations

from pykvedge.errors import ContextError
from pykvedge.library.libkvedge import Cache
from pykvedge.models.model import Model
from pykvedge.models.vision import ImagePiece, Piece, Vision
from pykvedge.plans.plan import Plan
from pykvedge.runtime.llama_context import DEFAULT_CTX, ROOM_TO_ANSWER, Context, ContextSize, ubatch_for
from pykvedge.runtime.settings import Settings


class Pace:
    """Compresses a stream when it is time to."""

    def __init__(self, cache: Cache, context: Context, settings: Settings, n_layers: int) -> None:
        self._cache, self._context, self._settings, self._n_layers = cache, context, settings, n_layers
        self._since = 0  # tokens since it was compressed

    @property
    def step(self) -> int:
        """So many tokens of text are read at a time."""
        return min(self._context.n_ubatch, self._settings.stream_tokens)

    def compress(self) -> None:
        """Compresses now. Raises what kvedge_compress_stream reports."""
        self._cache.compress_stream()
        self._context.n_cells = self._cache.cells()
        self._since = 0

    def after(self, n_tokens: int, image: bool = False, now: bool = False) -> None:
        """Notes that n_tokens were read, an image or not. now: it compresses whatever the settings say."""
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
    """Sizes a context for a stream that begins with these pieces, one of each kind if there are any."""
    largest = max((p.n_tokens for p in pieces if isinstance(p, ImagePiece)), default=0)
    step = max(largest, settings.stream_tokens)
    automatic = max(min(model.n_ctx_train or DEFAULT_CTX, DEFAULT_CTX), step + ROOM_TO_ANSWER)
    n_ctx = settings.n_ctx or automatic
    held = min((plan.budget.pairs or 0) + step, n_ctx)
    return ContextSize(n_ctx, ubatch_for(vision, largest), settings.storage, held)
