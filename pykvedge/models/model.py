"""Loads language models by llama.cpp."""

from __future__ import annotations

import codecs
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pykvedge.errors import CancelledError, KvedgeWarning, ModelError, OutOfMemoryError
from pykvedge.models.model_values import rotates_nothing
from pykvedge.models.modelfile import check_model
from pykvedge.models.offload import Offload
from pykvedge.models.vocabulary import Vocabulary
from pykvedge.native import ggml, llamacpp
from pykvedge.native.calls import CallbackErrors
from pykvedge.system import memory

Progress = Callable[[str, float], None]  # (what, share done in 0..1)


def silent(what: str, share: float) -> None:
    """Ignores progress."""


class Model(Vocabulary):
    """A loaded GGUF model. Close every context of the model, then the model."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        offload: Offload = Offload(),  # noqa: B008 - frozen
        progress: Progress = silent,
        cancel: threading.Event | None = None,
        verbose: bool = False,
        vocabulary_only: bool = False,
    ) -> None:
        """offload: what goes to GPUs and other machines. vocabulary_only: loads no weights, only the tokeniser.

        Raises ModelError, LibraryError, DeviceError, OutOfMemoryError, UsageError, CancelledError.
        """
        self.offload = offload
        self.header = check_model(path)
        self.location = self.path.absolute()  # absolute: the process may change its working directory
        llama = self.llama = llamacpp.start(verbose, vision=False)
        params = llama.llama_model_default_params()
        devices = offload.apply(params, self.header)
        params.vocab_only = vocabulary_only
        if not vocabulary_only and (offload.cpu_only or not ggml.has_gpu()):
            n_bytes = self.header.file_size + self.header.other_bytes
            memory.require(n_bytes, f"{path}", "use a smaller model, or one of fewer bits")

        errors = CallbackErrors()

        def report(share: float, _: Any) -> bool:
            progress("loading the model", share)
            return cancel is None or not cancel.is_set()

        callback = llama.llama_progress_callback(errors.wrap(report, False))
        params.progress_callback = callback
        with llamacpp.collected_errors() as lines:
            self.handle = llama.llama_model_load_from_file(os.fsencode(path), params)
            del devices
        try:
            errors.raise_first()
        except BaseException:
            self.close()
            raise
        if cancel is not None and cancel.is_set():
            self.close()
            raise CancelledError
        if not self.handle:
            why = llamacpp.reason(lines, "llama.cpp does not say why")
            if llamacpp.FULL_DEVICE in why:
                raise OutOfMemoryError(
                    f"{path} cannot be loaded: {why}; put fewer layers on the device with --gpu-layers"
                )
            raise ModelError(f"{path} cannot be loaded: {why}")
        super().__init__(llama, self.handle)
        if why := self._fault():
            self.close()
            raise ModelError(f"{path} {why}")
        values = self.header.values
        if values.get("tokenizer.ggml.model") == "gpt2" and not values.get("tokenizer.ggml.pre"):
            warnings.warn(f"{path} does not say how its tokeniser splits words, so answers may be worse; convert the "
                          "model again", KvedgeWarning, stacklevel=2)  # fmt: skip

    def _fault(self) -> str:
        """Returns why the model cannot be used, or ""."""
        llama = self.llama
        if not llama.llama_model_has_decoder(self.handle) or llama.llama_model_has_encoder(self.handle):
            return "is not a decoder-only language model, so kvedge cannot use it; use another model"
        if llama.llama_model_is_diffusion(self.handle):
            return "is a diffusion model, which does not generate token by token; use another model"
        if llama.llama_vocab_n_tokens(self.vocab) < 1:
            return "has no vocabulary; convert the model again"
        for name in ("bos", "eos"):  # llama.cpp's tokenisers assert that the token exists
            adds, token = getattr(llama, f"llama_vocab_get_add_{name}"), getattr(llama, f"llama_vocab_{name}")
            if adds(self.vocab) and token(self.vocab) < 0:
                return f"has no {name} token, but adds this token to prompts; convert the model again"
        if rotates_nothing(self.header) and llama.llama_model_rope_type(self.handle) != llama.LLAMA_ROPE_TYPE_NONE:
            return "has a rope.dimension_count of 0; convert the model again"
        return ""

    def close(self) -> None:
        """Frees the model. A second call does nothing."""
        if getattr(self, "handle", None):
            self.llama.llama_model_free(self.handle)
            self.handle = None

    @property
    def path(self) -> Path:
        return self.header.path

    @property
    def n_ctx_train(self) -> int:
        """The number of tokens in the context of the training."""
        return self.llama.llama_model_n_ctx_train(self.handle)

    @property
    def n_embd_input(self) -> int:
        """The width of the embeddings that the model reads."""
        return self.llama.llama_model_n_embd_inp(self.handle)

    @property
    def has_mrope(self) -> bool:
        """Whether a token has several positions (time, row and column: M-RoPE)."""
        llama = self.llama
        return llama.llama_model_rope_type(self.handle) in (llama.LLAMA_ROPE_TYPE_MROPE, llama.LLAMA_ROPE_TYPE_IMROPE)

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a recurrent state, from which no token can be removed."""
        llama = self.llama
        return bool(llama.llama_model_is_recurrent(self.handle) or llama.llama_model_is_hybrid(self.handle))

    @property
    def n_layer(self) -> int:
        return self.llama.llama_model_n_layer(self.handle)

    def kv_bytes_per_token(self, element_bytes: float) -> int:
        """Returns the bytes of one token's keys and values over all layers, if every layer has plain attention."""
        return int(self.n_layer * self.llama.llama_model_n_head_kv(self.handle) * self.pair_width * element_bytes)

    @property
    def pair_width(self) -> int:
        """The numbers of a KV pair: the size of a key plus the size of a value of one head."""
        arch, values = self.header.architecture, self.header.values
        n_head = max(self.llama.llama_model_n_head(self.handle), 1)
        head = self.llama.llama_model_n_embd(self.handle) // n_head
        k = int(values.get(f"{arch}.attention.key_length", head))
        return k + int(values.get(f"{arch}.attention.value_length", head))


class TextStream:
    """Turns tokens into text. Holds bytes back until they form whole characters."""

    def __init__(self, model: Model, shown: frozenset[int] = frozenset()) -> None:
        """shown: special tokens whose text is returned."""
        self._model, self._shown = model, shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Returns the text that this token completes; may be ""."""
        shown = self._model.written(token).encode() if token in self._shown else self._model.piece(token)
        return self._decoder.decode(shown)

    def finish(self) -> str:
        """Returns the text of an unfinished character at the end; may be ""."""
        return self._decoder.decode(b"", final=True)
