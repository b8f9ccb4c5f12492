"""Loads the mmproj by libmtmd, and makes embeddings of one image at a time, for any number of conversations."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pykvedge.errors import ImageError, ModelError, StateError
from pykvedge.models.imagetokens import token_limits
from pykvedge.models.mmproj_values import projector
from pykvedge.models.model import Model
from pykvedge.models.modelfile import check_mmproj
from pykvedge.native import ggml, libraries, llamacpp
from pykvedge.native.encoderwatch import EncoderWatch
from pykvedge.system import memory

WORKSPACE = 128 << 20  # bytes that encoding an image takes beside the weights, estimated
_SCHEDULER = 165 << 20  # address space of ggml's graphs of 8192 nodes, hardly touched; ggml asserts if it is missing
_LOOK_S = 0.05  # seconds between two calls of `look` while a thread waits


class Encoder:
    """A loaded mmproj. Several threads may call `encode`; they wait for each other."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Model,
        threads: int,
        use_gpu: bool,
        verbose: bool,
        limits: tuple[int, int] = (0, 0),
        packed: bool = True,
    ) -> None:
        """limits: the least and the most tokens of an image; 0: the encoder's value. packed: quantised weights are
        stored as the CPU multiplies them fastest (patches/0008); stock llama.cpp stores them as in the file.

        Raises ModelError if the file is no image encoder or does not fit the model, UsageError for limits if images
        have a fixed size, OutOfMemoryError.
        """
        header = self.header = check_mmproj(path, model.header)
        self.limits = token_limits(header, *limits) if any(limits) else None
        llama = llamacpp.start(verbose, vision=True)
        self.on_device = use_gpu and ggml.has_gpu()
        if not self.on_device:
            # mtmd aborts if memory for the weights is missing
            addresses = _SCHEDULER if memory.address_space_limit() is not None else 0
            memory.require(header.file_size + WORKSPACE + addresses, f"{path}", "close other programs")
        mtmd = self.mtmd = libraries.mtmd()
        self.projector = projector(header)
        # random, so no prompt contains the marker by accident
        self.marker = f"<__image_{secrets.token_hex(8)}__>"
        self.width = model.n_embd_input  # of the embeddings
        self._lock, self._next, self._at_work_for = threading.Lock(), threading.Lock(), 0
        params = mtmd.mtmd_context_params_default()
        params.n_threads, params.use_gpu = threads, use_gpu
        params.print_timings = params.warmup = False
        if hasattr(params, "pack_weights"):  # older bindings have no pack_weights
            params.pack_weights = packed
        params.media_marker = self.marker.encode()
        if self.limits is not None:
            params.image_min_tokens, params.image_max_tokens = self.limits
        layers = header.values.get("clip.vision.block_count")
        self._watch = EncoderWatch(layers if isinstance(layers, int) else 1)
        self._watch.install(params, llama.ggml_backend_sched_eval_callback)
        with llamacpp.collected_errors() as lines:
            self.handle = mtmd.mtmd_init_from_file(os.fsencode(path), model.handle, params)
        if not self.handle:
            self._watch.close()
            raise ModelError(f"{path} cannot be loaded: {llamacpp.reason(lines, 'mtmd does not say why')}")
        if not mtmd.mtmd_support_vision(self.handle):
            self.close()
            raise ModelError(f"{path} is not an image encoder; use the mmproj file of the model")

    def close(self) -> None:
        """Frees the image encoder. A second call does nothing."""
        if getattr(self, "handle", None):
            self.mtmd.mtmd_free(self.handle)
            self.handle = None
            self._watch.close()

    def encode(self, chunk: Any, n_tokens: int, look: Callable[[float], None]) -> np.ndarray:
        """Makes embeddings [n_tokens, width] float32 of mtmd's chunk of an image. Raises ImageError, StateError.

        look: called with the finished share; an exception from it ends the encoding.
        """
        with self._turn(look), llamacpp.collected_errors() as lines:
            status = self._watch.run(lambda: self.mtmd.mtmd_encode_chunk(self.handle, chunk), look)
            if status != 0:
                raise ImageError(f"the image cannot be encoded: {llamacpp.reason(lines, 'mtmd does not say why')}")
            out = np.ctypeslib.as_array(self.mtmd.mtmd_get_output_embd(self.handle), (n_tokens, self.width))
            return out.copy()  # the next image overwrites mtmd's array

    @contextmanager
    def _turn(self, look: Callable[[float], None]) -> Iterator[None]:
        """Lets one thread in at a time, because mtmd has one work space and one array of embeddings."""
        me = threading.get_ident()
        if self._at_work_for == me:
            raise StateError(
                "the image encoder is busy in this thread; do not ask about images in the function `progress`"
            )
        # a thread with many images waits behind a thread that waits already
        _acquire(self._next, look)
        try:
            _acquire(self._lock, look)
        finally:
            self._next.release()
        self._at_work_for = me
        try:
            yield
        finally:
            self._at_work_for = 0
            self._lock.release()


def _acquire(lock: threading.Lock, look: Callable[[float], None]) -> None:
    while not lock.acquire(timeout=_LOOK_S):
        look(0.0)
