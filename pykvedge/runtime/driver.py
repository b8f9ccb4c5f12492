"""A Driver has one llama_context and its cache in libkvedge. Sessions, servers, evals and benchmarks read by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pykvedge.errors import CancelledError, KvedgeError, LibraryError, NothingToCompressError, StateError
from pykvedge.library.libkvedge import Cache
from pykvedge.models.model import Model
from pykvedge.models.vision import ImagePiece, Piece, Vision
from pykvedge.native.abi import DEVICES_ALL, DEVICES_AUTO
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime.llama_context import Context, ContextSize, Place, check_memory
from pykvedge.runtime.settings import Keep


class Driver:
    """A context of a model; close it when done. `cache` is None where llama.cpp keeps the KV memory itself."""

    def __init__(
        self, model: Model, vision: Vision | None, size: ContextSize, threads: int, whole_cache: bool = False
    ) -> None:
        """whole_cache: llama.cpp is to keep the KV memory, which it allocates for the whole context at once.

        Raises OutOfMemoryError, and KvedgeError with llama.cpp's reason.
        """
        check_memory(model, size, threads, whole_cache)
        self.model, self.vision, self.size, self.threads = model, vision, size, threads
        self.context = Context(model, size, threads)
        self.cache: Cache | None = None

    @classmethod
    def lent(cls, context: Context, cache: Cache, vision: Any) -> Driver:
        """Drives a context that somebody else made and keeps. vision: as much of a Vision as decoding takes."""
        self = cls.__new__(cls)
        self.context, self.cache, self.vision = context, cache, vision
        return self

    def close(self) -> None:
        """Frees the context and its KV memory. Does nothing the second time."""
        if self.cache is not None:
            self.cache.detach()
            self.cache = None
        self.context.close()

    def take_over(
        self,
        plan: Plan,
        tables: Mapping[str, ProfileTable] | None = None,
        later_floor: int | None = None,
        keep: Keep | None = None,
        or_full: bool = False,
    ) -> None:
        """From now on libkvedge owns the KV memory of the context, which holds no tokens yet.

        tables: profiles of the plan's stages that need one. later_floor: as Cache has it. keep: where whole rows stay.
        or_full: a plan that keeps everything also runs where llama.cpp has to keep the memory itself. Raises
        NothingToCompressError, UsageError for a folder that cannot be used, and what Cache raises.
        """
        devices = DEVICES_ALL if self.model.offload.through_graph else DEVICES_AUTO
        options = {"profiles": tables, "later_floor": later_floor, "devices": devices}
        try:
            self.cache = Cache(self.context.handle, plan, self.size.kv_type, False, **options)  # type: ignore[arg-type]
        except (NothingToCompressError, LibraryError) as error:
            if not or_full or (isinstance(error, LibraryError) and plan.method != "full"):
                raise
            if KvType.parse(self.size.kv_type).quantised:
                raise NothingToCompressError(
                    f"{self.model.path.name} runs as it is, without kvedge's KV memory, so nothing can be stored as "
                    f"{self.size.kv_type}; use f16, bf16 or f32"
                ) from error
            self.require_full(plan)
            check_memory(self.model, self.size, self.threads, whole_cache=True)
            return
        self.context.takes_gaps = True
        if keep is not None:
            self.cache.keep(keep.place, keep.made_folder(), keep.space, keep.type)

    def require_full(self, plan: Plan) -> None:
        """Raises NothingToCompressError for a plan that a model without KV memory of kvedge's cannot follow."""
        if plan.method != "full":
            raise NothingToCompressError(
                f"{self.model.path.name} has no attention layer whose KV memory kvedge can take over, so method "
                f"'{plan.method}' has nothing to compress; use --method full"
            )

    def decode(self, at: Place, piece: Piece, want_logits: bool) -> None:
        """Appends a piece that one pass holds to a sequence, an image encoded before. want_logits: of its last token.

        Raises ContextError, CancelledError, and what libkvedge met meanwhile.
        """
        self.context.at = at
        with self.explained():
            if not isinstance(piece, ImagePiece):
                self.context.decode(piece.tokens, want_logits)
            elif self.vision is None:
                raise StateError("the model was loaded without an image encoder")
            else:
                self.context.decode_image(self.vision, piece)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replaces the error of a failed decode by what libkvedge met inside it, where that was the cause."""
        try:
            yield
        except KvedgeError as error:
            if self.cache is not None and not isinstance(error, CancelledError):
                self.cache.check()
            raise
