"""Drives one llama_context and its cache in libkvedge, for sessions, servers, evals and benchmarks."""

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
from pykvedge.runtime.llama_context import Context, ContextSize, SequenceEnd, check_memory
from pykvedge.runtime.settings import Keep


class Driver:
    """A context of a model; close the driver when done. `cache` is None if llama.cpp keeps the KV memory."""

    def __init__(
        self, model: Model, vision: Vision | None, size: ContextSize, threads: int, whole_cache: bool = False
    ) -> None:
        """whole_cache: llama.cpp keeps the KV memory and allocates it for the whole context at once.

        Raises OutOfMemoryError, and KvedgeError with llama.cpp's reason.
        """
        check_memory(model, size, threads, whole_cache)
        self.model, self.vision, self.size, self.threads = model, vision, size, threads
        self.context = Context(model, size, threads)
        self.cache: Cache | None = None

    @classmethod
    def lent(cls, context: Context, cache: Cache, vision: Any) -> Driver:
        """Makes a driver of a context that the caller keeps. vision: an object with Vision's decoding methods."""
        self = cls.__new__(cls)
        self.context, self.cache, self.vision = context, cache, vision
        return self

    def close(self) -> None:
        """Frees the context and its KV memory. A second call does nothing."""
        self.context.close()  # first: a context that lives on would reserve memory for llama.cpp's own attention
        if self.cache is not None:
            self.cache.detach()
            self.cache = None

    def take_over(
        self,
        plan: Plan,
        tables: Mapping[str, ProfileTable] | None = None,
        later_floor: int | None = None,
        keep: Keep | None = None,
        or_full: bool = False,
    ) -> None:
        """Gives the KV memory of the context to libkvedge. The context must be empty.

        tables: profiles of the plan's stages, by stage. later_floor: as in Cache. keep: where whole rows stay. or_full:
        if libkvedge cannot take the memory over, a plan of method full runs on llama.cpp's own memory. Raises
        NothingToCompressError, UsageError for an unusable folder, and the errors of Cache.
        """
        devices = DEVICES_ALL if self.model.offload.cpu_through_graph else DEVICES_AUTO
        options = {"profiles": tables, "later_floor": later_floor, "devices": devices}
        try:
            self.cache = Cache(self.context.handle, plan, self.size.kv_type, False, **options)  # type: ignore[arg-type]
        except (NothingToCompressError, LibraryError) as error:
            if not or_full or (isinstance(error, LibraryError) and plan.method != "full"):
                raise
            if KvType.parse(self.size.kv_type).quantised:
                raise NothingToCompressError(
                    f"kvedge cannot store the KV cache of {self.model.path.name}, so kv_type {self.size.kv_type} is "
                    f"not available; use f16, bf16 or f32"
                ) from error
            self.require_full(plan)
            check_memory(self.model, self.size, self.threads, whole_cache=True)
            return
        self.context.takes_gaps = True
        if keep is not None:
            self.cache.keep(keep.place, keep.made_folder(), keep.space, keep.type)

    def require_full(self, plan: Plan) -> None:
        """Raises NothingToCompressError for any plan except method full: kvedge's cache does not hold the KV memory."""
        if plan.method != "full":
            raise NothingToCompressError(
                f"{self.model.path.name} has no attention layer whose KV memory kvedge can take over, so method "
                f"'{plan.method}' has nothing to compress; use --method full"
            )

    def decode(self, at: SequenceEnd, piece: Piece, want_logits: bool) -> None:
        """Appends a piece of at most one pass to a sequence; an image must be encoded. want_logits: for the last token.

        Raises ContextError, CancelledError, and errors of libkvedge during the pass.
        """
        self.context.at = at
        with self.explained():
            if not isinstance(piece, ImagePiece):
                self.context.decode(piece.tokens, want_logits)
            elif self.vision is None:
                raise StateError("the model was loaded without an image encoder; load the model with its mmproj file")
            else:
                self.context.decode_image(self.vision, piece)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises libkvedge's own error instead of the error of a failed decode, if libkvedge caused the failure."""
        try:
            yield
        except KvedgeError as error:
            if self.cache is not None and not isinstance(error, CancelledError):
                self.cache.check()
            raise
