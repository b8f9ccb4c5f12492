"""Computes the memory of a conversation from the metadata of its files, without loading anything.

All figures are bytes of resident memory. models/shape.py computes the sizes of tensors.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from gguf import GGML_QUANT_SIZES

from pykvedge.library import native_plan
from pykvedge.models.gguf import Header, Tensor, tensor_bytes
from pykvedge.models.imagetokens import ImageGrid
from pykvedge.models.shape import ModelShape, mask_bytes
from pykvedge.native import ggml, llamacpp
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.runtime.llama_context import DEFAULT_CTX, N_UBATCH, ROOM_TO_ANSWER
from pykvedge.runtime.replay import extra_tokens
from pykvedge.system import memory

_VOCABULARY = 260  # bytes per token of the vocabulary in llama.cpp's tables
_LIBRARIES = 3 << 20  # bytes of library files that are mapped when a prompt is read
_GRAPH = 4 << 20  # bytes of llama.cpp's graphs and bookkeeping
_MERGING = ("averaged", "nearest", "pivotal", "weighted")  # reducers that merge
_MATCHED_ROWS = 48  # rows that a thread compares with all kept rows at a time
_FEWEST_QUERIES, _MATCHED_QUERIES, _ADDED_QUERIES = 512, 60, 128  # per head: least, at once with all, with kept rows
_UNEVEN = 3  # a row's odds to stay in the largest head, relative to the average head
_ROWS = 256  # a multiple of the row counts that instructions process at once


@dataclass(frozen=True)
class Weights:
    """Bytes of a language model's weights. mapped: of the file, from the first to the last tensor read there.

    in_place: of these tensors only. repacked: of copies in another order.
    """

    mapped: int
    in_place: int
    repacked: int

    @classmethod
    def of(
        cls, header: Header, away: frozenset[str] = frozenset(), copied: Callable[[Tensor], float] | None = None
    ) -> Weights:
        """away: names of tensors on devices. copied: replaces copied_share in tests."""
        share = copied or copied_share
        tied = "output.weight" not in header.tensors
        first, last, in_place, repacked = header.file_size + header.other_bytes, 0, 0, 0
        for name, tensor in header.tensors.items():
            if name in away:
                continue
            n_bytes = tensor_bytes(tensor) or 0
            again = share(tensor)
            # a looked-up embedding stays as it is; a tied embedding, which also makes the logits, is copied too
            looked_up = name in ("token_embd.weight", "per_layer_token_embd.weight")
            if again and (not looked_up or (tied and name == "token_embd.weight")):
                repacked += int(n_bytes * again)
            if not again or looked_up:
                first, last = min(first, tensor.offset), max(last, tensor.offset + n_bytes)
                in_place += n_bytes
        return cls(max(last - first, 0), in_place, repacked)


def program_bytes(header: Header) -> int:
    """Returns the bytes of this process before a model is loaded, plus the model's vocabulary."""
    importlib.import_module("pykvedge.chat.session")
    llamacpp.start(False, vision=True)
    vocabulary = header.arrays.get("tokenizer.ggml.tokens", 0) + header.arrays.get("tokenizer.ggml.merges", 0)
    return memory.rss_bytes() + _LIBRARIES + _VOCABULARY * vocabulary


def copied_share(tensor: Tensor) -> float:
    """Returns the size of the copy that llama.cpp rearranges for this processor, relative to the weight. 0: no copy.

    Asks ggml in the same way as llama.cpp, but about a matrix with fewer rows, so no large buffer is allocated.
    """
    if len(tensor.shape) < 2 or not tensor_bytes(tensor) or tensor.shape[0] % GGML_QUANT_SIZES[tensor.type][0]:
        return 0.0
    k, n, *experts = tensor.shape
    return _copied(tensor.type, k, n if n <= _ROWS else _ROWS + n % _ROWS, min(prod(experts), 2))


@functools.cache
def _copied(kind: int, k: int, n: int, experts: int) -> float:
    *others, _ = ggml.buffer_types(ggml.cpu())
    for _, place in others:
        weight = ggml.Weight(kind, place, (experts, n, k), 1)
        if weight.supported(N_UBATCH):
            return weight.n_bytes / (experts * n * ggml.call("row_size", kind, k))
    return 0.0


def encoder_compute(mmproj: Header, grid: ImageGrid) -> int:
    """Returns the bytes that encoding one image takes, beside the weights."""
    values = mmproj.values
    width = int(values.get("clip.vision.embedding_length", 0))
    ff = int(values.get("clip.vision.feed_forward_length", 4 * width))
    by_size = str(values.get("clip.projector_type", "")).startswith("qwen")
    prepared = grid.parts * grid.pixels * 3 * 4  # all parts, until the last part is encoded
    copies = 2 * grid.pixels * 3 * 4 if by_size else 0  # input of mtmd's graph; small for parts
    return grid.n_patches * 4 * (ff + (2 if by_size else 4) * width) + prepared + copies


@dataclass(frozen=True)
class Request:
    """The conversation whose memory is computed."""

    plan: Plan
    n_images: int = 0
    image_tokens: int = 0  # of the largest image
    text_tokens: int = 64
    n_ctx: int = 0  # for llama.cpp alone; 0: the prompt and room to answer, at least the model's default
    kv_type: str = "f16"
    threads: int = 1
    keep: str = ""  # where whole rows stay behind the kept rows: "ram" or "disk"; empty: nowhere
    all_images: int = 0  # tokens of all images; 0: n_images of the largest size
    keep_type: str = "f16"  # type of whole rows

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + (self.all_images or self.n_images * self.image_tokens)


@dataclass(frozen=True)
class Footprint:
    """Resident bytes by purpose. `full`: kvedge without compression. `stock`: llama.cpp alone.

    llama.cpp keeps the image encoder's working memory while it reads the prompt. kvedge frees this memory first, so its
    peak is the larger of both steps. kvedge also frees llama.cpp's compute buffer when the prompt is complete.
    """

    program: int  # process, libraries, vocabulary
    weights: int
    repacked: int
    encoder: int
    encoder_compute: int
    compute: int
    compute_stock: int
    n_ctx: int
    prompt_tokens: int
    kept_tokens: int  # KV pairs per head that the plan keeps of the prompt
    kv_stock: int
    kv_prompt: int
    kv_kept: int
    scores: int
    reclaimable: int  # part of each peak: mapped pages of copied tensors, which the system may drop
    # peak of a compression beside the prompt: scores, and either one layer's kept rows with the reducer's working
    # memory, or W_O
    scores_and_layer: int
    grams: int  # W_O W_O' of all heads; the first compression computes them, later ones reuse them
    peak_stock: int
    peak_full: int
    peak_prefill: int  # with compression
    kv_bounded: int  # peak KV memory of a prompt compressed layer by layer, with scores
    compute_bounded: int  # one pass over all tokens of that prompt
    peak_bounded: int
    answer_full: int  # during the answer, without compression
    after_compression: int
    whole_memory: int = 0  # whole rows in memory behind the kept rows, with scores
    whole_file: int = 0  # whole rows in a file; the system may drop its pages from memory


@dataclass(frozen=True)
class Files:
    """Parts of a footprint that do not depend on the prompt."""

    shape: ModelShape
    weights: Weights
    program: int
    encoder: int = 0
    encoder_compute: int = 0


def footprint(files: Files, request: Request) -> Footprint:
    """Returns the memory that a first message of this size takes."""
    shape, weights, plan, types = files.shape, files.weights, request.plan, KvType.parse(request.kv_type)
    element = types.plain.bytes_per_value  # of the prompt before compression
    n_tokens = request.prompt_tokens
    kept = native_plan.plan_budget(plan, n_tokens)
    per_token = shape.kv_per_token(element)
    again = extra_tokens(plan, n_tokens, request.image_tokens) if kept < n_tokens else 0  # second pass
    n_ctx = request.n_ctx or max(min(shape.n_ctx_train, DEFAULT_CTX), n_tokens + max(ROOM_TO_ANSWER, again))
    largest_image = request.image_tokens if request.n_images else 0
    one_pass = min(N_UBATCH, max(request.text_tokens, largest_image))
    # the encoder, the session and the decoded batch each hold an image's embeddings
    embeddings = 4 * shape.n_embd * (n_tokens - request.text_tokens + 2 * largest_image)
    fixed = request.threads * min(64 * (n_tokens + 64) * 4, 1 << 20) + embeddings + _GRAPH  # first term: attention
    compute = shape.compute(one_pass) + fixed
    stock = shape.compute(one_pass, stock=True) - shape.compute(one_pass)
    # the prompt as one batch of embeddings, held by kvedge and copied by llama.cpp
    whole = shape.compute(n_tokens) + fixed + 2 * 4 * shape.n_embd * n_tokens
    mask = mask_bytes(n_ctx, N_UBATCH)
    heads = [(shape.n_head, layer.n_heads_kv, shape.head_k) for layer in shape.layers]
    scores = native_plan.score_bytes(plan, n_tokens, heads)
    kv_kept = int(shape.kv_per_token(1) * types.held_bytes_per_value(kept) * kept) + _bias_bytes(request, shape, kept)
    widest = max((layer.width for layer in shape.layers), default=0)
    reducing = _reducing_bytes(request, shape, kept) if kept < n_tokens else 0
    new_rows = int(widest * types.held_bytes_per_value(kept) * kept) if kept < n_tokens or types.quantised else 0
    grams, weights_of_layer = _projection_bytes(plan, shape) if kept < n_tokens else (0, 0)
    largest = max(new_rows + reducing, per_token * again, weights_of_layer)  # these follow each other
    loaded = files.program + weights.mapped + weights.repacked + files.encoder
    encoding, base = loaded + embeddings + files.encoder_compute, loaded + compute
    bounded = kv_kept + int(widest * element) * n_tokens + scores // max(len(shape.layers), 1)
    bounded += max(weights_of_layer, reducing)
    answer = embeddings + _GRAPH + shape.work_space(one_pass) + shape.compute(1)
    found = Footprint(
        program=files.program, weights=weights.mapped, repacked=weights.repacked,
        encoder=files.encoder, encoder_compute=files.encoder_compute,
        compute=compute, compute_stock=compute + stock + mask, compute_bounded=whole,
        n_ctx=n_ctx, prompt_tokens=n_tokens, kept_tokens=kept,
        kv_stock=per_token * n_ctx, kv_prompt=per_token * n_tokens, kv_kept=kv_kept, kv_bounded=bounded,
        scores=scores, scores_and_layer=scores + largest, grams=grams,
        reclaimable=weights.mapped - weights.in_place if weights.repacked else 0,
        peak_stock=base + files.encoder_compute + stock + mask + per_token * n_ctx,
        peak_full=max(encoding, base + per_token * n_tokens),
        peak_prefill=max(encoding, base + per_token * n_tokens + scores + largest + grams),
        peak_bounded=max(encoding, loaded + whole + bounded + grams),
        answer_full=loaded + answer + per_token * n_tokens,
        after_compression=loaded + answer + kv_kept + grams,
    )  # fmt: skip
    return _keeping(found, request, shape, reducing) if request.keep else found


def _keeping(f: Footprint, request: Request, shape: ModelShape, reducing: int) -> Footprint:
    """Adds whole rows behind the kept rows. With them, compressing a layer does not free its prompt rows."""
    stored = KvType.parse(request.keep_type)
    rows = int(shape.kv_per_token(1) * stored.bytes_per_value * f.prompt_tokens) if stored.quantised else f.kv_prompt
    memory, file = (rows + f.scores, 0) if request.keep == "ram" else (f.scores, rows)
    most = max(f.scores_and_layer, f.scores + f.kv_kept + reducing)
    base = f.program + f.weights + f.repacked + f.encoder + f.compute
    return replace(
        f,
        scores_and_layer=most,
        peak_prefill=max(f.peak_prefill, base + f.kv_prompt + most + f.grams),
        after_compression=f.after_compression + memory,
        whole_memory=memory,
        whole_file=file,
    )


def _projection_bytes(plan: Plan, shape: ModelShape) -> tuple[int, int]:
    """Returns the bytes of weighting values by the output projection: Gram matrices that stay, one layer's weights.

    `l1` keeps no matrices. A Gram matrix is stored as its lower triangle in float32.
    """
    if not plan.projects:
        return 0, 0
    sizes = [layer.width // layer.n_heads_kv - shape.head_k for layer in shape.layers if layer.n_heads_kv]
    grams = sum(4 * shape.n_head * d * (d + 1) // 2 for d in sizes) if plan.critical != "l1" else 0
    return grams, 4 * shape.n_embd * shape.n_head * max(sizes, default=0)


def _reducing_bytes(request: Request, shape: ModelShape, kept: int) -> int:
    """Returns a reducer's working memory: all rows of a head and the kept rows in float32, per thread.

    Merging reducers also hold the kept keys twice, and their products with some other rows. Reducer match holds a
    square matrix of the kept rows, and their products with its queries.
    """
    plan, n = request.plan, request.prompt_tokens
    if plan.allocator != "uniform":
        kept = int(n * _UNEVEN * kept / (n + (_UNEVEN - 1) * kept))  # in the head that keeps most
    merges = _MATCHED_ROWS if plan.reducer in _MERGING else 0
    most = 0
    for layer in shape.layers if plan.reducer != "evict" else ():
        heads = max(layer.n_heads_kv, 1)
        row, apart = layer.width // heads, max(request.threads // heads, 1)  # threads per head
        floats = (n + kept) * (row + 1)
        floats += (2 * shape.head_k + merges * apart) * kept + 3 * n if merges else 0
        if plan.reducer == "match":
            queries = min(max(_FEWEST_QUERIES, plan.settings("reducer")["queries"] * kept), n * shape.n_head // heads)
            floats += (row + _MATCHED_QUERIES) * n + (row + shape.head_k + kept) * queries
            floats += (kept + 2 * _ADDED_QUERIES + row) * kept
        most = max(most, 4 * floats * min(request.threads, heads))
    return most


def _bias_bytes(request: Request, shape: ModelShape, kept: int) -> int:
    """Returns the bytes of the kept rows' biases: a float32 per KV pair, if the plan's reducer makes biases."""
    biased = request.plan.settings("reducer").get("bias", "none") != "none" and kept < request.prompt_tokens
    return 4 * kept * sum(layer.n_heads_kv for layer in shape.layers) if biased else 0


def most_images(files: Files, request: Request, available: int, kind: str) -> int:
    """Returns the most images in one prompt whose peak fits. kind: "stock", "full", "compressed" or "bounded"."""

    def fits(n: int) -> bool:
        f = footprint(files, replace(request, n_images=n, all_images=0, n_ctx=0))
        peaks = {"stock": f.peak_stock, "full": f.peak_full, "compressed": f.peak_prefill, "bounded": f.peak_bounded}
        peak = peaks[kind]
        return peak - f.reclaimable <= available

    return _largest(fits)


def most_turns(files: Files, request: Request, available: int) -> int:
    """Returns the most messages that fit. Each has one image, and is compressed before the next message."""
    once = footprint(files, replace(request, n_images=1, all_images=0, n_ctx=0))
    more = once.kv_kept + once.whole_memory
    return _largest(lambda n: once.peak_prefill - once.reclaimable + (n - 1) * more <= available if n else True)


def _largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest n for which fits(n) is true, or -1 if fits(0) is false. fits must be true up to some n."""
    if not fits(0):
        return -1
    low, high = 0, 1
    while high < 1 << 24 and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
