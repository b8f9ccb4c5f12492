"""Turns text into rows of a model's token table, so text and images pass the layers together."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants

from pykvedge.errors import ModelError, UnsupportedError
from pykvedge.models.gguf import Header, tensor_bytes

TABLE = "token_embd.weight"

# Architectures that treat a row of the table like the token itself. Others scale or extend the rows of tokens only
# (Gemma 3 multiplies by the root of the width), which an embedding from outside would miss.
SAME_FOR_BOTH = frozenset(
    {"baichuan", "command-r", "internlm2", "lfm2", "llama", "minicpm", "mistral3", "olmo", "olmo2", "phi2", "phi3",
     "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "smollm3", "stablelm", "starcoder2"}
)  # fmt: skip


class TokenTable:
    """The token embeddings of a GGUF file, read row by row on demand."""

    def __init__(self, header: Header) -> None:
        """Raises UnsupportedError if a token is more than a row of the table, or the table's type has no reader."""
        if header.architecture not in SAME_FOR_BOTH:
            raise UnsupportedError(f"{header.path.name}: {header.architecture} models do not accept text as embeddings")
        tensor = header.tensors.get(TABLE)
        size = tensor_bytes(tensor) if tensor is not None else None
        elsewhere = tensor is not None and header.data_start + tensor.offset >= header.file_size  # in another file
        if tensor is None or len(tensor.shape) != 2 or size is None or elsewhere:
            raise UnsupportedError(f"the token table of {header.path.name} cannot be read")
        self.width, self.n_vocab = tensor.shape
        self._type = GGMLQuantizationType(tensor.type)
        try:
            start = header.data_start + tensor.offset
            data = np.memmap(header.path, dtype=np.uint8, mode="r", offset=start, shape=(size,))
        except (OSError, ValueError) as error:
            raise ModelError(f"{header.path} cannot be read: {error}") from None
        self._rows: Any = data.reshape(self.n_vocab, -1)

    def rows(self, tokens: list[int]) -> np.ndarray:
        """Returns [n, width] float32: the result of llama.cpp's get_rows for these tokens."""
        rows = np.ascontiguousarray(self._rows[np.asarray(tokens, dtype=np.int64)])
        try:
            out = quants.dequantize(rows, self._type)
        except NotImplementedError:
            raise UnsupportedError(f"a token table of type {self._type.name} cannot be read") from None
        return np.ascontiguousarray(out, dtype=np.float32).reshape(len(tokens), self.width)
