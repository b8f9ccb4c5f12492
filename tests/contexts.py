"""Contexts of tiny models, with kvedge's or llama.cpp's KV memory, for tests that look at every token."""

import ctypes
from contextlib import contextmanager
from itertools import chain

import numpy as np
from attached import held
from batches import logits, open_model, send

from pykvedge.library import libkvedge
from pykvedge.native import libraries
from pykvedge.plans.plan import Plan


@contextmanager
def replaying(cache, chunk, sequence=0):
    """Decodes inside the `with` are a chunk of a second pass over the prompt; the chunk is removed afterwards."""
    cache.begin_replay(chunk, sequence)
    try:
        yield
    finally:
        cache.end_replay(sequence)


class TinyContext:
    """A context of a tiny model.

    With a plan, libkvedge owns the KV memory. Without a plan, llama.cpp owns it: f32, no flash attention.
    """

    def __init__(
        self, model, plan: Plan | None, kv_type: str = "f16", n_ctx: int = 8192, threads: int = 1, n_seq: int = 2
    ) -> None:
        self.llama = libraries.llama()
        self.model = open_model(model)
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = n_ctx, threads, threads
        params.n_batch = params.n_ubatch = 2048
        params.n_seq_max, params.kv_unified = n_seq, True
        if plan is None or kv_type == "f32":  # f32 also for the layers that llama.cpp stores
            params.flash_attn_type = self.llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.type_k = params.type_v = self.llama.GGML_TYPE_F32
        # without a plan: layer -> attention weights [H, n_tokens, n_keys] of the last batch
        self.attention: dict[int, np.ndarray] = {}
        self.n = dict.fromkeys(range(n_seq), 0)
        if plan is None:
            self._watch_stock(params)
        self._adjust(params)
        self.context = self.llama.llama_init_from_model(self.model, params)
        self.memory = self.llama.llama_get_memory(self.context)
        self.cache = plan and libkvedge.Cache(self.context, plan, kv_type, auto_compress=True)

    def _adjust(self, params) -> None:
        """Changes the context's parameters. A test can override this method."""

    def _watch_stock(self, params) -> None:
        ggml = ctypes.CDLL(str(libraries.require_dir() / libraries.file_name("ggml-base")))
        ggml.ggml_get_name.argtypes, ggml.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
        ggml.ggml_get_data_f32.argtypes = [ctypes.c_void_p]
        ggml.ggml_get_data_f32.restype = ctypes.POINTER(ctypes.c_float)
        ggml.ggml_nelements.argtypes, ggml.ggml_nelements.restype = [ctypes.c_void_p], ctypes.c_int64
        n_heads = self.llama.llama_model_n_head(self.model)

        def seen(tensor, ask, _):
            name = ggml.ggml_get_name(tensor).decode()
            if name.startswith("kq_soft_max-") and not ask:
                flat = np.ctypeslib.as_array(ggml.ggml_get_data_f32(tensor), (ggml.ggml_nelements(tensor),))
                rows = flat.reshape(n_heads, self._n_tokens, -1)
                self.attention[int(name.partition("-")[2])] = rows[:, :, : self._n_keys].copy()
            return not ask or name.startswith("kq_soft_max-")

        self._seen = self.llama.ggml_backend_sched_eval_callback(seen)
        params.cb_eval = self._seen

    def decode(self, *parts: list[int]) -> None:
        """Reads parts[i] into sequence i, all in one batch. Logits are computed after the last token of each part."""
        positions, sequences, wants = [], [], []
        for sequence, tokens in enumerate(parts):
            positions += range(self.n[sequence], self.n[sequence] + len(tokens))
            sequences += [sequence] * len(tokens)
            wants += [i == len(tokens) - 1 for i in range(len(tokens))]
            self.n[sequence] += len(tokens)
        self._n_tokens, self._n_keys = len(positions), self.n[0]
        assert send(self.context, positions, [*chain(*parts)], sequences=sequences, wants=wants) == 0

    def held(self, sequence: int = 0):
        """Returns the held token indices: [layer][KV head]."""
        return held(self.cache, sequence)

    def logits(self):
        """Returns the logits after the last token."""
        return logits(self.context)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.cache:
            self.cache.detach()
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


def random_tokens(n: int, seed: int = 0) -> list[int]:
    """Returns n random token ids. The same n and seed give the same ids."""
    return np.random.default_rng([seed, n]).integers(5, 1000, n).tolist()
