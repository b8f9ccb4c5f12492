"""What a conversation will take of memory is computed from the metadata of the files: nothing is loaded.

Every figure is bytes of resident memory; models/shape.py says what they follow from.
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

_VOCABULARY = 260  # bytes a token of the vocabulary takes in llama.cpp's tables
_LIBRARIES = 3 << 20  # bytes of libraries' files that come into memory when a prompt is read
_GRAPH = 4 << 20  # bytes of llama.cpp's graphs, and of what it allocates for its bookkeeping
_MERGING = ("averaged", "nearest", "pivotal", "weighted")  # reducers
_MATCHED_ROWS = 48  # that a thread compares with all kept ones at a time
_FEWEST_QUERIES, _MATCHED_QUERIES, _ADDED_QUERIES = 512, 60, 128  # of a head; with all rows at a time; with kept ones
_UNEVEN = 3  # times the odds of all heads that a row stays: about those of the head that keeps most
_ROWS = 256  # of which any number that instructions take at once is a divisor


@dataclass(frozen=True)
class Weights:
    """A language model's weights take bytes. mapped: of the file, from the first to the last tensor read there.

    in_place: of those tensors alone. repacked: of the copies in another order.
    """

    mapped: int
    in_place: int
    repacked: int

    @classmethod
    def of(
        cls, header: Header, away: frozenset[str] = frozenset(), copied: Callable[[Tensor], float] | None = None
    ) -> Weights:
        """away: tensors that lie on devices. copied: see copied_share, which is asked unless tests know better."""
        share = copied or copied_share
        tied = "output.weight" not in header.tensors
        first, last, in_place, repacked = header.file_size + header.other_bytes, 0, 0, 0
        for name, tensor in header.tensors.items():
            if name in away:
                continue
            n_bytes = tensor_bytes(tensor) or 0
            again = share(tensor)
            # an embedding that is looked up stays as it is; one that makes the logits, too, is copied for them
            looked_up = name in ("token_embd.weight", "per_layer_token_embd.weight")
            if again and (not looked_up or (tied and name == "token_embd.weight")):
                repacked += int(n_bytes * again)
            if not again or looked_up:
                first, last = min(first, tensor.offset), max(last, tensor.offset + n_bytes)
                in_place += n_bytes
        return cls(max(last - first, 0), in_place, repacked)


def program_bytes(header: Header) -> int:
    """Measures what this process takes before a model is loaded, and adds the model's vocabulary."""
    importlib.import_module("pykvedge.chat.session")
    llamacpp.start(False, vision=True)
    vocabulary = header.arrays.get("tokenizer.ggml.tokens", 0) + header.arrays.get("tokenizer.ggml.merges", 0)
    return memory.rss_bytes() + _LIBRARIES + _VOCABULARY * vocabulary


def copied_share(tensor: Tensor) -> float:
    """Tells how large the copy is that llama.cpp rearranges for this processor, as a share of a weight; 0: no copy.

    ggml is asked, as llama.cpp asks it, about a matrix of fewer rows: nothing of the weight's size is allocated.
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
    """Computes the bytes that encoding one image takes beside the weights."""
    values = mmproj.values
    width = int(values.get("clip.vision.embedding_length", 0))
    ff = int(values.get("clip.vision.feed_forward_length", 4 * width))
    by_size = str(values.get("clip.projector_type", "")).startswith("qwen")
    prepared = grid.parts * grid.pixels * 3 * 4  # of all parts, until the last one is encoded
    copies = 2 * grid.pixels * 3 * 4 if by_size else 0  # mtmd's input of the graph; of small parts it is little
    return grid.n_patches * 4 * (ff + (2 if by_size else 4) * width) + prepared + copies


@dataclass(frozen=True)
class Request:
    """A request says what is to run."""

    plan: Plan
    n_images: int = 0
    image_tokens: int = 0  # of one image, the largest
    text_tokens: int = 64
    n_ctx: int = 0  # of stock llama.cpp; 0: the prompt and room to answer, at least what the model's default gives
    kv_type: str = "f16"
    threads: int = 1
    keep: str = ""  # where whole rows stay behind the kept ones: "ram", "disk" or nowhere
    all_images: int = 0  # tokens of all images; 0: each has as many as the largest
    keep_type: str = "f16"  # of whole rows: as they are, or a quantised type

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + (self.all_images or self.n_images * self.image_tokens)


@dataclass(frozen=True)
class Footprint:
    """Resident bytes are told by what they are for; `full`: kvedge, uncompressed, `stock`: llama.cpp alone.

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
    # what compressing needs at its peak beside the prompt: scores, one layer's kept rows with what the reducer works
    # in, or W_O
    scores_and_layer: int
    grams: int  # W_O W_O' of all heads, which the first compression by such a plan leaves for the later ones
    peak_stock: int
    peak_full: int
    peak_prefill: int  # compressed
    kv_bounded: int  # largest amount of KV memory of a prompt that is compressed layer by layer, with its scores
    compute_bounded: int  # a pass over all of its tokens
    peak_bounded: int
    answer_full: int  # while the answer is generated
    after_compression: int
    whole_memory: int = 0  # of whole rows and their scores, behind the kept ones
    whole_file: int = 0  # of whole rows; pages in memory are the system's to drop


@dataclass(frozen=True)
class Files:
    """These parts of a footprint do not depend on the prompt."""

    shape: ModelShape
    weights: Weights
    program: int
    encoder: int = 0
    encoder_compute: int = 0


def footprint(files: Files, request: Request) -> Footprint:
    """Computes the memory that a first message of that size takes."""
    shape, weights, plan, types = files.shape, files.weights, request.plan, KvType.parse(request.kv_type)
    element = types.plain.bytes_per_value  # of the prompt until it is compressed
    n_tokens = request.prompt_tokens
    kept = native_plan.plan_budget(plan, n_tokens)
    per_token = shape.kv_per_token(element)
    again = extra_tokens(plan, n_tokens, request.image_tokens) if kept < n_tokens else 0  # beside the prompt's own
    n_ctx = request.n_ctx or max(min(shape.n_ctx_train, DEFAULT_CTX), n_tokens + max(ROOM_TO_ANSWER, again))
    largest_image = request.image_tokens if request.n_images else 0
    one_pass = min(N_UBATCH, max(request.text_tokens, largest_image))
    # an image's embeddings are held by the encoder, by the session, and by the batch that reads them
    embeddings = 4 * shape.n_embd * (n_tokens - request.text_tokens + 2 * largest_image)
    fixed = request.threads * min(64 * (n_tokens + 64) * 4, 1 << 20) + embeddings + _GRAPH  # first of attention
    compute = shape.compute(one_pass) + fixed
    stock = shape.compute(one_pass, stock=True) - shape.compute(one_pass)
    # the prompt as one batch of embeddings: ours, and llama.cpp's copy
    whole = shape.compute(n_tokens) + fixed + 2 * 4 * shape.n_embd * n_tokens
    mask = mask_bytes(n_ctx, N_UBATCH)
    heads = [(shape.n_head, layer.n_heads_kv, shape.head_k) for layer in shape.layers]
    scores = native_plan.score_bytes(plan, n_tokens, heads)
    kv_kept = int(shape.kv_per_token(1) * types.held_bytes_per_value(kept) * kept) + _bias_bytes(request, shape, kept)
    widest = max((layer.width for layer in shape.layers), default=0)
    reducing = _reducing_bytes(request, shape, kept) if kept < n_tokens else 0
    new_rows = int(widest * types.held_bytes_per_value(kept) * kept) if kept < n_tokens or types.quantised else 0
    grams, weights_of_layer = _projection_bytes(plan, shape) if kept < n_tokens else (0, 0)
    largest = max(new_rows + reducing, per_token * again, weights_of_layer)  # one follows the other
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
    """Adds whole rows behind the kept ones. No layer's rows go when its kept ones stand."""
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
    """What weighing values by the output projections takes: (Gram matrices that stay, one layer's weights meanwhile).

    By `l1` nothing stays. The lower triangle of a head's matrix is kept, in float32.
    """
    if not plan.projects:
        return 0, 0
    sizes = [layer.width // layer.n_heads_kv - shape.head_k for layer in shape.layers if layer.n_heads_kv]
    grams = sum(4 * shape.n_head * d * (d + 1) // 2 for d in sizes) if plan.critical != "l1" else 0
    return grams, 4 * shape.n_embd * shape.n_head * max(sizes, default=0)


def _reducing_bytes(request: Request, shape: ModelShape, kept: int) -> int:
    """What a reducer works in: in float32, for each thread, all rows of a head and those that stay.

    Reducers that merge also have the kept keys twice, and products of them with some of the others. The one that fits
    rows to queries has a square matrix of the kept rows, and products of them with its queries.
    """
    plan, n = request.plan, request.prompt_tokens
    if plan.allocator != "uniform":
        kept = int(n * _UNEVEN * kept / (n + (_UNEVEN - 1) * kept))  # of the head that has most
    merges = _MATCHED_ROWS if plan.reducer in _MERGING else 0
    most = 0
    for layer in shape.layers if plan.reducer != "evict" else ():
        heads = max(layer.n_heads_kv, 1)
        row, apart = layer.width // heads, max(request.threads // heads, 1)  # threads of one head
        floats = (n + kept) * (row + 1)
        floats += (2 * shape.head_k + merges * apart) * kept + 3 * n if merges else 0
        if plan.reducer == "match":
            queries = min(max(_FEWEST_QUERIES, plan.settings("reducer")["queries"] * kept), n * shape.n_head // heads)
            floats += (row + _MATCHED_QUERIES) * n + (row + shape.head_k + kept) * queries
            floats += (kept + 2 * _ADDED_QUERIES + row) * kept
        most = max(most, 4 * floats * min(request.threads, heads))
    return most


def _bias_bytes(request: Request, shape: ModelShape, kept: int) -> int:
    """A float32 for each pair, where the plan gives rows biases that are left of others."""
    biased = request.plan.settings("reducer").get("bias", "none") != "none" and kept < request.prompt_tokens
    return 4 * kept * sum(layer.n_heads_kv for layer in shape.layers) if biased else 0


def most_images(files: Files, request: Request, available: int, kind: str) -> int:
    """Finds the most images in one prompt whose peak fits. kind: "stock", "full", "compressed" or "bounded"."""

    def fits(n: int) -> bool:
        f = footprint(files, replace(request, n_images=n, all_images=0, n_ctx=0))
        peaks = {"stock": f.peak_stock, "full": f.peak_full, "compressed": f.peak_prefill, "bounded": f.peak_bounded}
        peak = peaks[kind]
        return peak - f.reclaimable <= available

    return _largest(fits)


def most_turns(files: Files, request: Request, available: int) -> int:
    """Finds the largest number of messages that fit, each with one image and compressed before the next."""
    once = footprint(files, replace(request, n_images=1, all_images=0, n_ctx=0))
    more = once.kv_kept + once.whole_memory
    return _largest(lambda n: once.peak_prefill - once.reclaimable + (n - 1) * more <= available if n else True)


def _largest(fits: Callable[[int], bool]) -> int:
    """Finds the largest n that fits, of a condition that holds up to some n; -1 if it does not hold for 0."""
    if not fits(0):
        return -1
    low, high = 0, 1
    while high < 1 << 24 and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
