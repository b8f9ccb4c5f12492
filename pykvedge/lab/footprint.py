"""What a conversation will take of memory, from the metadata of the files alone: nothing is loaded.

Every figure is bytes of resident memory. The compute buffers follow llama.cpp's allocator: in the widest place of a
layer, the feed-forward block, four vectors as wide as the model and two as wide as the block are alive for each
token of a pass (in stock llama.cpp three: patches/0004). scripts/check_plan.py compares the sums with measured runs.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from pykvedge.errors import ModelError
from pykvedge.models.gguf import Header, Tensor, tensor_bytes
from pykvedge.models.imagetokens import ImageGrid
from pykvedge.plans.kvtypes import KvType
from pykvedge.plans.plan import Plan
from pykvedge.runtime.llama_context import N_UBATCH

ROOM_TO_ANSWER = 512  # tokens beyond the prompt that stock llama.cpp's context must hold
_VOCABULARY = 260  # bytes a token of the vocabulary takes in llama.cpp's tables
_GRAPH = 4 << 20  # bytes of llama.cpp's graphs, and of what it allocates for its bookkeeping

# ggml types that llama.cpp keeps a second, rearranged copy of, by instruction set; the rows must be a multiple of 8
_REPACKED = {
    "avx2": {2, 12, 20, 39},
    "avx512": {2, 10, 12, 20, 39},
    "avx512vnni": {2, 10, 12, 20, 39},
    "neondot": {2, 8, 12, 13, 14, 20, 39},
    "neoni8mm": {2, 8, 12, 13, 14, 20, 39},
}


_ROWS = 8
# AMX takes flat weights of these types, rows a multiple of _AMX_ROWS, before any other code sees them; its copy is
# larger than the file's by this factor (sums of q8_0, widened scales of the others). F16 is copied as it is.
AMX = "amx"
_AMX = {1: 1.0, 2: 1.0, 3: 1.0, 8: 38 / 34, 12: 148 / 144, 13: 180 / 176, 14: 1.0, 23: 138 / 136}
_AMX_ROWS = 32
_BESIDE_AMX = "avx512vnni"  # what processors with AMX have for the other weights


@dataclass(frozen=True)
class Layer:
    """KV geometry of a full-attention layer."""

    n_heads_kv: int
    width: int  # numbers of one token: keys and values of all KV heads


@dataclass(frozen=True)
class ModelShape:
    """What of a language model decides about memory."""

    n_embd: int
    n_ff: int
    n_head: int
    n_vocab: int
    n_ctx_train: int
    layers: tuple[Layer, ...]
    head_k: int
    weights: int  # bytes of the file that stay mapped
    in_place: int  # of those, bytes that are read where they are
    repacked: int  # bytes of the copies in another order

    @classmethod
    def of(cls, header: Header, simd: str) -> ModelShape:
        """simd: instruction set of this machine (libkvedge.simd()). Raises ModelError where metadata is missing."""
        arch, values = header.architecture, header.values

        def number(name: str, default: int | None = None) -> int:
            found = values.get(f"{arch}.{name}", default)
            if not isinstance(found, int) or found < 1:
                raise ModelError(f"{header.path} does not say its {arch}.{name}; its memory cannot be planned")
            return found

        n_embd, n_layer = number("embedding_length"), number("block_count")
        n_head = _number_or_list(header, "attention.head_count", n_layer)
        n_head_kv = _number_or_list(header, "attention.head_count_kv", n_layer, n_head)
        head = n_embd // max(max(n_head), 1)
        head_k, head_v = number("attention.key_length", head), number("attention.value_length", head)
        used = int(values.get(f"{arch}.expert_used_count", 0))
        n_ff = max(_number_or_list(header, "feed_forward_length", n_layer, [4 * n_embd] * n_layer))
        if used:
            n_ff = max(n_ff, used * number("expert_feed_forward_length", n_ff))
        layers = tuple(
            Layer(n_head_kv[i], n_head_kv[i] * (head_k + head_v)) for i in range(n_layer) if _attends(header, i)
        )
        n_vocab = header.arrays.get("tokenizer.ggml.tokens", 0) or int(values.get(f"{arch}.vocab_size", 0))
        return cls(
            n_embd, n_ff, max(n_head), n_vocab, number("context_length", 4096), layers, head_k,
            *_weights(header, simd),
        )  # fmt: skip

    def kv_per_token(self, element: int) -> int:
        """Bytes of one token's keys and values over all layers."""
        return sum(layer.width for layer in self.layers) * element

    def compute(self, n_tokens: int, stock: bool = False) -> int:
        """Bytes of llama.cpp's compute buffer that a pass of n_tokens touches, and of its work space."""
        kv = max((layer.width for layer in self.layers), default=0)
        # stock's third finds a place where the attention was if it is no wider than two vectors of the model
        wide = 3 if stock and self.n_ff > 2 * self.n_embd else 2
        widest = max(4 * self.n_embd + wide * self.n_ff, 3 * self.n_embd + 2 * self.n_head * self.head_k + 2 * kv)
        return n_tokens * 4 * widest + self.work_space(n_tokens) + 2 * 4 * self.n_vocab

    def work_space(self, n_tokens: int) -> int:
        """Bytes outside of the compute buffer that products of matrices use: activations as q8_0."""
        return n_tokens * (max(self.n_ff, self.n_embd) * 34 // 32)


def _number_or_list(header: Header, name: str, n_layer: int, default: list[int] | None = None) -> list[int]:
    """One value for each layer, of a metadata value that is one number or an array of them."""
    key = f"{header.architecture}.{name}"
    found = header.lists.get(key, header.values.get(key, default))
    many = [found] * n_layer if isinstance(found, int) else list(found or [])
    if len(many) < n_layer or not all(isinstance(n, int) and n >= 0 for n in many):
        raise ModelError(f"{header.path} does not say its {key}; its memory cannot be planned")
    return many[:n_layer]


def _attends(header: Header, layer: int) -> bool:
    names = ("attn_k.weight", "attn_qkv.weight", "attn_kv_a_mqa.weight")
    return any(f"blk.{layer}.{name}" in header.tensors for name in names)


def machine_simd() -> str:
    """The instruction set by the name that libkvedge gives it, AMX where ggml uses it; a guess without libraries."""
    from pykvedge import errors
    from pykvedge.native import ggml
    from pykvedge.runtime import libkvedge

    try:
        memory = [name for name, _ in ggml.buffer_types(ggml.cpu())]
        return AMX if "AMX" in memory else libkvedge.simd()
    except errors.LibraryError:
        return "neondot" if platform.machine().lower() in ("arm64", "aarch64") else "avx2"


def program_bytes(header: Header) -> int:
    """What a session's process takes before a model is loaded, and the model's vocabulary: this process is measured."""
    from pykvedge import errors
    from pykvedge.native import llamacpp, memory

    importlib.import_module("pykvedge.chat.session")
    with suppress(errors.LibraryError):
        llamacpp.start(False, vision=True)
    vocabulary = header.arrays.get("tokenizer.ggml.tokens", 0) + header.arrays.get("tokenizer.ggml.merges", 0)
    return memory.rss_bytes() + _VOCABULARY * vocabulary


def _copied(tensor: Tensor, simd: str) -> float:
    """How large the rearranged copy of a weight is, as a multiple of the weight; 0: there is none."""
    if len(tensor.shape) < 2:
        return 0.0
    if simd == AMX:
        flat = all(n == 1 for n in tensor.shape[2:])
        if flat and tensor.type in _AMX and tensor.shape[1] % _AMX_ROWS == 0:
            return _AMX[tensor.type]
        simd = _BESIDE_AMX
    return float(tensor.shape[1] % _ROWS == 0 and tensor.type in _REPACKED.get(simd, ()))


def _weights(header: Header, simd: str) -> tuple[int, int, int]:
    """Bytes of the file that stay mapped (first to last tensor used in place), that are used, of rearranged copies."""
    tied = "output.weight" not in header.tensors
    first, last, in_place, repacked = header.file_size, 0, 0, 0
    for name, tensor in header.tensors.items():
        n_bytes = tensor_bytes(tensor) or 0
        copied = _copied(tensor, simd)
        # an embedding that is looked up stays as it is; one that makes the logits, too, is copied for them
        looked_up = name in ("token_embd.weight", "per_layer_token_embd.weight")
        repacked += int(n_bytes * copied) if copied and (not looked_up or (tied and name == "token_embd.weight")) else 0
        if not copied or looked_up:
            first, last, in_place = min(first, tensor.offset), max(last, tensor.offset + n_bytes), in_place + n_bytes
    return max(last - first, 0), in_place, repacked


def encoder_compute(mmproj: Header, grid: ImageGrid) -> int:
    """Bytes that the encoding of one image takes beside the weights."""
    values = mmproj.values
    width = int(values.get("clip.vision.embedding_length", 0))
    ff = int(values.get("clip.vision.feed_forward_length", 4 * width))
    by_size = str(values.get("clip.projector_type", "")).startswith("qwen")
    return grid.n_patches * 4 * (ff + (2 if by_size else 4) * width) + grid.pixels * 3 * 4


# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What is to run."""

    plan: Plan
    n_images: int = 0
    image_tokens: int = 0  # of one image
    text_tokens: int = 64
    n_ctx: int = 0  # of stock llama.cpp; 0: the prompt and room to answer, at least what the model's default gives
    kv_type: str = "f16"
    threads: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt."""
        return self.text_tokens + self.n_images * self.image_tokens


@dataclass(frozen=True)
class Footprint:
    """Resident bytes by what they are for; `full` is kvedge without compression, `stock` llama.cpp without kvedge.

    Stock keeps the working memory of the image encoder while it reads the prompt; kvedge gives it back first, so that
    its peaks are those of whichever takes more. It gives back llama.cpp's compute buffer when the prompt is complete.
    """

    program: int  # the process itself, its libraries, the vocabulary
    weights: int
    repacked: int
    encoder: int
    encoder_compute: int
    compute: int
    compute_stock: int
    n_ctx: int
    prompt_tokens: int
    kept_tokens: int  # pairs per head that the plan keeps of the prompt
    kv_stock: int
    kv_prompt: int
    kv_kept: int
    scores: int
    reclaimable: int  # of each peak, mapped pages whose tensors exist a second time: the system may drop them
    scores_and_layer: int  # what compressing needs at its peak beside the prompt: scores, and one layer's kept rows
    peak_stock: int
    peak_full: int
    peak_prefill: int  # compressed
    kv_bounded: int  # largest amount of KV memory of a prompt that is compressed layer by layer, with its scores
    compute_bounded: int  # a pass over all of its tokens
    peak_bounded: int
    answer_full: int  # while the answer is generated
    after_compression: int


@dataclass(frozen=True)
class Files:
    """The parts of a footprint that do not depend on the prompt."""

    shape: ModelShape
    program: int
    encoder: int = 0
    encoder_compute: int = 0


def footprint(files: Files, request: Request) -> Footprint:
    """The memory that a first message of that size takes."""
    shape, plan, types = files.shape, request.plan, KvType.parse(request.kv_type)
    element = types.plain.bytes_per_value  # of the prompt until it is compressed
    n_tokens = request.prompt_tokens
    kept = min(plan.count(n_tokens), n_tokens)
    per_token = int(shape.kv_per_token(1) * element)
    n_ctx = request.n_ctx or max(min(shape.n_ctx_train, 4096), n_tokens + ROOM_TO_ANSWER)
    one_pass = min(N_UBATCH, max(request.text_tokens, request.image_tokens if request.n_images else 0))
    # an image's embeddings are held by the encoder, by the session, and by the batch that reads them
    embeddings = 4 * shape.n_embd * request.image_tokens * (request.n_images + 2 if request.n_images else 0)
    fixed = _attention_scratch(shape, n_tokens, request.threads) + embeddings + _GRAPH
    compute = shape.compute(one_pass) + fixed
    stock = shape.compute(one_pass, stock=True) - shape.compute(one_pass)
    # the prompt as one batch of embeddings: ours, and llama.cpp's copy
    whole = shape.compute(n_tokens) + fixed + 2 * 4 * shape.n_embd * n_tokens
    n_layers = max(len(shape.layers), 1)
    mask = N_UBATCH * n_ctx * 2
    scores = _score_bytes(shape, plan, n_tokens) if kept < n_tokens else 0
    kv_kept = int(shape.kv_per_token(1) * types.held_bytes_per_value(kept) * kept)
    changed = kept < n_tokens or types.quantised
    widest = max((layer.width for layer in shape.layers), default=0)
    largest = int(widest * types.held_bytes_per_value(kept) * kept) if changed else 0
    loaded = files.program + shape.weights + shape.repacked + files.encoder
    encoding = loaded + embeddings + files.encoder_compute
    base = loaded + compute
    bounded = kv_kept + int(widest * element) * n_tokens + scores // n_layers
    answer = embeddings + _GRAPH + shape.work_space(one_pass) + shape.compute(1)
    return Footprint(
        program=files.program,
        weights=shape.weights,
        repacked=shape.repacked,
        encoder=files.encoder,
        encoder_compute=files.encoder_compute,
        compute=compute,
        compute_stock=compute + stock + mask,
        n_ctx=n_ctx,
        prompt_tokens=n_tokens,
        kept_tokens=kept,
        kv_stock=per_token * n_ctx,
        kv_prompt=per_token * n_tokens,
        kv_kept=kv_kept,
        scores=scores,
        reclaimable=shape.weights - shape.in_place if shape.repacked else 0,
        peak_stock=base + files.encoder_compute + stock + mask + per_token * n_ctx,
        scores_and_layer=scores + largest,
        peak_full=max(encoding, base + per_token * n_tokens),
        peak_prefill=max(encoding, base + per_token * n_tokens + scores + largest),
        kv_bounded=bounded,
        compute_bounded=whole,
        peak_bounded=max(encoding, loaded + whole + bounded),
        answer_full=loaded + answer + per_token * n_tokens,
        after_compression=loaded + answer + kv_kept,
    )


def _attention_scratch(shape: ModelShape, n_keys: int, threads: int) -> int:
    return threads * min(64 * (n_keys + 64) * 4, 1 << 20)


def _score_bytes(shape: ModelShape, plan: Plan, n_tokens: int) -> int:
    """Accumulators while the prompt is read, and the scores of all layers when it is compressed."""
    from pykvedge.plans import registry

    heads = sum(layer.n_heads_kv for layer in shape.layers)
    sums = {"cumulative": 8, "mean": 16}.get(plan.scorer, 0) * heads * n_tokens
    if plan.allocator == "entropy" and plan.settings("allocator")["attention"] == "cross":
        # every query in half precision, and three numbers about what it saw
        sums += n_tokens * len(shape.layers) * shape.n_head * (2 * shape.head_k + 12)
    window = registry.scorer(plan.scorer).whole_up_to(plan.settings("scorer"))
    return sums + 4 * heads * n_tokens + 4 * window * shape.n_head * shape.head_k * len(shape.layers)


def most_images(files: Files, request: Request, available: int, kind: str) -> int:
    """Largest number of images in one prompt whose peak fits. kind: "stock", "full", "compressed" or "bounded"."""

    def fits(n: int) -> bool:
        f = footprint(files, replace(request, n_images=n, n_ctx=0))
        peaks = {"stock": f.peak_stock, "full": f.peak_full, "compressed": f.peak_prefill, "bounded": f.peak_bounded}
        peak = peaks[kind]
        return peak - f.reclaimable <= available

    return _largest(fits)


def most_turns(files: Files, request: Request, available: int) -> int:
    """Largest number of messages, each with one image and compressed before the next, that fit."""
    once = footprint(files, replace(request, n_images=1, n_ctx=0))
    return _largest(lambda n: once.peak_prefill - once.reclaimable + (n - 1) * once.kv_kept <= available if n else True)


def _largest(fits: Callable[[int], bool]) -> int:
    """Largest n that fits, of a condition that holds up to some n; -1 if it does not hold for 0."""
    if not fits(0):
        return -1
    low, high = 0, 1
    while high < 1 << 24 and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
