"""Checks the metadata of a language model for values on which llama.cpp asserts.

llama.cpp itself refuses most broken files, for example wrong types of metadata and shapes of tensors. The values here
would end the process: in src/llama-model.cpp (load_hparams), in src/llama-vocab.cpp, and in ggml's norms and buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pykvedge.errors import ModelError
from pykvedge.models.gguf import TOKENS, Header, Scalar

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
_ALIGNED = 32  # bytes: ggml refuses a mapped tensor at another offset
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_LISTS = ("tokenizer.ggml.merges", "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.suppress_tokens")
_AS_WIDE = ("lfm2", "lfm2moe")
_STRING = 8


def check_values(header: Header) -> None:
    """Raises ModelError for a language model on which llama.cpp would end the process when it loads it or later."""
    for what in _faults(header):
        raise ModelError(f"{header.path} cannot be used: {what}; download or convert it again")


def rotates_nothing(header: Header) -> bool:
    """Returns whether a model says that RoPE rotates 0 numbers. llama.cpp then divides by 0."""
    return header.values.get(f"{header.architecture}.rope.dimension_count") == 0


def _faults(header: Header) -> Iterator[str]:
    arch, values = header.architecture, header.values
    n_layer, predicting = values.get(f"{arch}.block_count"), _whole(header, "nextn_predict_layers")
    if isinstance(n_layer, int) and not 1 <= n_layer <= _MAX_LAYERS:
        yield f"{arch}.block_count is {n_layer}, but llama.cpp allows 1 to {_MAX_LAYERS} layers"
    if isinstance(n_layer, int) and predicting > n_layer:
        yield f"{arch}.nextn_predict_layers is {predicting}, but the model has only {n_layer} layers"
    scaling = values.get(f"{arch}.rope.scaling.type", "none")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        yield f"{arch}.rope.scaling.type is not one of {', '.join(_ROPE_SCALINGS)}"
    for key, value in values.items():
        own = key.startswith(f"{arch}.") and isinstance(value, float)
        if own and (math.isnan(value) or (key.endswith("epsilon") and not 0 <= value < math.inf)):
            yield f"{key} is {value}, which is not allowed"
    if _whole(header, "attention.sliding_window") and _whole(header, "attention.sliding_window_pattern") == 1:
        yield f"{arch}.attention.sliding_window_pattern is 1, so no layer uses the sliding window"
    yield from _faults_of_heads(header)
    yield from _faults_of_experts(header)
    yield from _faults_of_vocabulary(header)
    for name, tensor in header.tensors.items():
        if (header.data_start + tensor.offset) % _ALIGNED:
            yield f"the tensor {name} does not begin at a multiple of {_ALIGNED} bytes"


def _faults_of_heads(header: Header) -> Iterator[str]:
    """Yields faults that llama.cpp does not compare with tensors: KV heads, LFM2's width, rotated pairs."""
    arch, width = header.architecture, _whole(header, "embedding_length")
    head = _whole(header, "attention.key_length")
    heads, shared = _each(header, "attention.head_count"), _each(header, "attention.head_count_kv")
    n_layer = max(len(heads), len(shared))
    if heads and shared:
        heads, shared = heads * (n_layer // len(heads)), shared * (n_layer // len(shared))
    for n_head, n in zip(heads, shared, strict=False):
        if n_head and n and n_head % n:
            yield f"its {n_head} attention heads are not a multiple of its {n} KV heads"
        if arch in _AS_WIDE and n_head and head and n_head * head != width:
            yield f"its {n_head} heads of size {head} do not add up to its width {width}"
    for end in ("", "_swa"):
        n, head = _whole(header, f"rope.dimension_count{end}"), _whole(header, f"attention.key_length{end}")
        if n % 2 or (head and n > head):
            most = f" of at most {head}" if head else ""
            yield f"{arch}.rope.dimension_count{end} is {n}, but must be an even number{most}"


def _faults_of_experts(header: Header) -> Iterator[str]:
    """Yields faults of a mixture of experts on which llama.cpp asserts."""
    n_experts, groups = _whole(header, "expert_count"), _whole(header, "expert_group_count")
    used, chosen = max(_each(header, "expert_used_count"), default=0), _whole(header, "expert_group_used_count")
    if header.architecture.startswith("hunyuan") and n_experts <= 1:
        return
    if n_experts > _MAX_EXPERTS:
        yield f"the model has {n_experts} experts, but llama.cpp allows up to {_MAX_EXPERTS}"
    if used > n_experts or (n_experts and not used):
        yield f"the model uses {used} of {n_experts} experts"
    if groups and (groups >= n_experts or (groups > 1 and (n_experts % groups or not 0 < chosen < groups))):
        yield f"the model uses {chosen} of {groups} groups of its {n_experts} experts"


def _faults_of_vocabulary(header: Header) -> Iterator[str]:
    if header.values.get("tokenizer.ggml.model") in ("none", "no_vocab"):
        yield "the model has no tokenizer"
    n, distinct = header.arrays.get(TOKENS, 0), header.distinct_tokens
    if n != distinct:
        yield f"{n - distinct} of the {n} tokens in its vocabulary are duplicates"
    for key in _LISTS:
        if key in header.values:
            yield f"{key} is not a list"
    if header.types.get(_LISTS[0], _STRING) != _STRING:
        yield f"{_LISTS[0]} is not a list of texts"


def _whole(header: Header, name: str) -> int:
    found: Scalar = header.values.get(f"{header.architecture}.{name}", 0)
    return found if isinstance(found, int) else 0


def _each(header: Header, name: str) -> list[int]:
    """Returns the value of each layer, or a list of the one value for all layers."""
    found = header.lists.get(f"{header.architecture}.{name}", [_whole(header, name)])
    return [n for n in found if isinstance(n, int)]
