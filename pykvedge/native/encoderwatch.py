"""Watches an image encoder of libmtmd through kvedge_encoder: its progress, its cancellation, its memory."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

from pykvedge.native.abi import Look
from pykvedge.native.calls import CallbackErrors, call, lib


class EncoderWatch:
    """A kvedge_encoder, which watches one mtmd context. The constructor raises OutOfMemoryError."""

    def __init__(self, n_layers: int) -> None:
        self._n_layers = max(n_layers, 1)
        self._handle = c.c_void_p()
        call("encoder_create", c.byref(self._handle))

    def install(self, params: Any, callback: Any) -> None:
        """Registers the watch in an mtmd_context_params. callback: the bindings' type of cb_eval."""
        params.cb_eval = c.cast(lib().kvedge_encoder_eval, callback)
        params.cb_eval_user_data = self._handle

    def run(self, encode: Callable[[], int], look: Callable[[float], None]) -> int:
        """Calls encode() and returns its status; status 0 frees working memory. Calls look(share done) after each
        layer.

        An exception of look stops the encoder and is raised here."""
        errors = CallbackErrors()

        def at(layer: int, _: Any) -> bool:
            look(min((layer + 1) / self._n_layers, 1.0))
            return True

        called = Look(errors.wrap(at, False))
        lib().kvedge_encoder_set_look(self._handle, called, None)
        try:
            status = encode()
        finally:
            lib().kvedge_encoder_set_look(self._handle, Look(), None)
        if status == 0:
            self.release()
        errors.raise_first()
        return status

    def release(self) -> int:
        """Frees the encoder's working memory after an image. Returns the freed bytes; 0 on a GPU."""
        return lib().kvedge_encoder_release(self._handle)

    def close(self) -> None:
        """Ends the watch. Call this after mtmd_free. A second call does nothing."""
        lib().kvedge_encoder_free(self._handle)
        self._handle = c.c_void_p()
