"""The shape of a language model, from the metadata of its file, and the memory that follows from the shape.

`kvedge fit` plans conversations with it (fit/footprint.py), and every new context is checked against it
(runtime/llama_context.py). The compute buffers follow llama.cpp's allocator: in the widest place of a layer, the
feed-forward block, four vectors of the model's width and two of the block's width are alive per token of a pass (three
in stock llama.cpp: patches/0004). tests/test_footprint.py compares the sums with measured runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvedge.errors import ModelError
from pykvedge.models.gguf import Header


@dataclass(frozen=True)
class Layer:
    """KV geometry of a full-attention layer."""

    index: int  # number of the layer in the model
    n_heads_kv: int
    width: int  # numbers of one token: keys and values of all KV heads


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a language model that determine its memory."""

    n_embd: int
    n_ff: int
    n_head: int
    n_vocab: int
    n_ctx_train: int
    layers: tuple[Layer, ...]
    head_k: int

    @classmethod
    def of(cls, header: Header) -> ModelShape:
        """Raises ModelError if metadata is missing."""
        arch, values = header.architecture, header.values

        def number(name: str, default: int | None = None) -> int:
            found = values.get(f"{arch}.{name}", default)
            if not isinstance(found, int) or found < 1:
                raise ModelError(
                    f"{header.path} has no {arch}.{name} in its metadata, so its memory cannot be estimated"
                )
            return found

        n_embd, n_layer = number("embedding_length"), number("block_count")
        n_head = _number_or_list(header, "attention.head_count", n_layer)
        n_head_kv = _number_or_list(header, "attention.head_count_kv", n_layer, n_head)
        head = n_embd // max(max(n_head), 1)
        head_k, head_v = number("attention.key_length", head), number("attention.value_length", head)
        used = max(_number_or_list(header, "expert_used_count", n_layer, [0] * n_layer))
        n_ff = max(_number_or_list(header, "feed_forward_length", n_layer, [4 * n_embd] * n_layer))
        if used:
            n_ff = max(n_ff, used * number("expert_feed_forward_length", n_ff))
        layers = tuple(
            Layer(i, n_head_kv[i], n_head_kv[i] * (head_k + head_v)) for i in range(n_layer) if _attends(header, i)
        )
        n_vocab = header.arrays.get("tokenizer.ggml.tokens", 0) or number("vocab_size", 1)
        return cls(n_embd, n_ff, max(n_head), n_vocab, number("context_length", 4096), layers, head_k)

    def kv_per_token(self, element: float) -> int:
        """Returns the bytes of one token's keys and values over all layers."""
        return int(sum(layer.width for layer in self.layers) * element)

    def compute(self, n_tokens: int, stock: bool = False) -> int:
        """Returns the bytes of llama.cpp's compute buffer that a pass of n_tokens uses, with the work space."""
        kv = max((layer.width for layer in self.layers), default=0)
        # stock llama.cpp's third vector reuses the attention's memory if it is no wider than two vectors of the model
        wide = 3 if stock and self.n_ff > 2 * self.n_embd else 2
        widest = max(4 * self.n_embd + wide * self.n_ff, 3 * self.n_embd + 2 * self.n_head * self.head_k + 2 * kv)
        return n_tokens * 4 * widest + self.work_space(n_tokens) + 2 * 4 * self.n_vocab

    def work_space(self, n_tokens: int) -> int:
        """Returns the bytes that matrix products use outside of the compute buffer: activations as q8_0."""
        return n_tokens * (max(self.n_ff, self.n_embd) * 34 // 32)


def mask_bytes(n_ctx: int, n_tokens: int) -> int:
    """Returns the bytes of llama.cpp's mask for a pass of n_tokens in a context of n_ctx."""
    return n_tokens * n_ctx * 2


def shares_cache(header: Header) -> bool:
    """Returns whether some layers read the keys and values of an earlier layer (Gemma 3n, Gemma 4 E2B and E4B)."""
    return _own_layers(header) is not None


def _own_layers(header: Header) -> int | None:
    """Returns the number of first layers that have their own keys and values; None: all layers."""
    arch, values = header.architecture, header.values
    if arch == "gemma3n":
        return 20  # llama.cpp's value; the file does not say it
    n_layer, shared = values.get(f"{arch}.block_count"), values.get(f"{arch}.attention.shared_kv_layers")
    return n_layer - shared if isinstance(n_layer, int) and isinstance(shared, int) and shared > 0 else None


def _number_or_list(header: Header, name: str, n_layer: int, default: list[int] | None = None) -> list[int]:
    """Returns one value per layer. The metadata value is one number or an array."""
    key = f"{header.architecture}.{name}"
    found = header.lists.get(key, header.values.get(key, default))
    many = [found] * n_layer if isinstance(found, int) else found
    counts = [n for n in many if isinstance(n, int) and n >= 0] if isinstance(many, list) else []
    if len(counts) < n_layer:
        raise ModelError(f"{header.path} has no {key} in its metadata, so its memory cannot be estimated")
    return counts[:n_layer]


def _attends(header: Header, layer: int) -> bool:
    own = _own_layers(header)
    if own is not None and layer >= own:
        return False
    names = ("attn_k.weight", "attn_qkv.weight", "attn_kv_a_mqa.weight")
    return any(f"blk.{layer}.{name}" in header.tensors for name in names)
