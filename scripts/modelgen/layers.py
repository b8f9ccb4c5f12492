"""The common parts of text models, and the strength of their weights.

The strengths make random weights behave like a model and not like noise: together the layers add about one unit of
residual, heads differ in how sharply they attend, and logits have a standard deviation of a few units, so that greedy
decoding has clear winners.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gguf import GGMLQuantizationType

from .tokens import Vocabulary
from .writer import F16, Q4_0, Q6_K, Tensor, Value, fitting_type, general_meta, matrix, vector

_HEAD_GAINS = (0.5, 2.0)
KEY_GAIN = 1.5
_LOGIT_STD = 2.5
_HUSH = 0.04


@dataclass(frozen=True)
class TextSpec:
    """The shape of a text model."""

    arch: str
    vocab: Vocabulary
    n_layers: int
    n_heads: int
    n_heads_kv: int
    head_size: int
    n_ff: int
    n_ctx_train: int
    name: str = "random"
    rope_base: float = 10000.0
    eps: float = 1e-5
    tied: bool = False
    weight: GGMLQuantizationType = F16
    key_outliers: float = 1.0  # factor of two channel pairs of every key; their queries are divided by it
    width: int = 0  # width of the embeddings; 0: n_heads * head_size
    meta: Mapping[str, Value] = field(default_factory=dict)  # overrides the metadata of the architecture

    @property
    def n_embd(self) -> int:
        return self.width or self.heads_width

    @property
    def heads_width(self) -> int:
        return self.n_heads * self.head_size

    @property
    def embedding_std(self) -> float:
        # A tied matrix is also the output, so its strength is chosen for the logits.
        return _LOGIT_STD / math.sqrt(self.n_embd) if self.tied else 1.0

    @property
    def out_gain(self) -> float:
        return 1 / math.sqrt(2 * self.n_layers)


Model = tuple[dict[str, Value], list[Tensor]]
Layer = Callable[[TextSpec, int], list[Tensor]]


def base_meta(spec: TextSpec) -> dict[str, Value]:
    a = spec.arch
    return {
        **general_meta(a, "model", spec.name, spec.weight),
        f"{a}.vocab_size": spec.vocab.size,
        f"{a}.context_length": spec.n_ctx_train,
        f"{a}.embedding_length": spec.n_embd,
        f"{a}.block_count": spec.n_layers,
        f"{a}.feed_forward_length": spec.n_ff,
        f"{a}.attention.layer_norm_rms_epsilon": spec.eps,
    }


def attention_meta(spec: TextSpec) -> dict[str, Value]:
    """Returns the metadata of a model with attention."""
    a = spec.arch
    return {
        **base_meta(spec),
        f"{a}.attention.head_count": spec.n_heads,
        f"{a}.attention.head_count_kv": spec.n_heads_kv,
        f"{a}.attention.key_length": spec.head_size,
        f"{a}.attention.value_length": spec.head_size,
        f"{a}.rope.dimension_count": spec.head_size,
        f"{a}.rope.freq_base": spec.rope_base,
    }


def head_bands(heads: int, rows: int, unit: float) -> tuple[tuple[int, float], ...]:
    """Returns row bands with gains from flat to sharp: allocators that compare heads need different heads."""
    low, high = _HEAD_GAINS
    return tuple((rows, unit * low * (high / low) ** (h / max(1, heads - 1))) for h in range(heads))


def norm(name: str, size: int, mean: float = 1.0) -> Tensor:
    return vector(name, size, mean=mean, std=0.1 * mean)


def outlying(bands: tuple[tuple[int, float], ...], gain: float) -> tuple[tuple[int, float], ...]:
    """Makes the last two channel pairs of each head `gain` times as strong. RoPE rotates within a pair."""
    return bands if gain == 1 else tuple(x for rows, std in bands for x in ((rows - 4, std), (4, gain * std)))


def qkv(spec: TextSpec, b: str) -> list[Tensor]:
    n, unit = spec.n_embd, 1 / math.sqrt(spec.n_embd)
    kv, out = spec.n_heads_kv * spec.head_size, spec.key_outliers
    bands = outlying(head_bands(spec.n_heads, spec.head_size, unit), 1 / out)
    keys = outlying(((spec.head_size, KEY_GAIN * unit),) * spec.n_heads_kv, out)
    return [
        Tensor(f"{b}.attn_q.weight", (spec.heads_width, n), bands, 0.0, fitting_type(spec.weight, (n,))),
        Tensor(f"{b}.attn_k.weight", (kv, n), keys, 0.0, fitting_type(spec.weight, (n,))),
        matrix(f"{b}.attn_v.weight", (kv, n), unit, spec.weight),
    ]


def attn_out(spec: TextSpec, b: str, width: int | None = None) -> Tensor:
    width = width or spec.heads_width
    # Attention averages values, so the output needs a larger gain than the input.
    std = 2 * spec.out_gain / math.sqrt(width)
    return matrix(f"{b}.attn_output.weight", (spec.n_embd, width), std, spec.weight)


def ffn(spec: TextSpec, b: str) -> list[Tensor]:
    n, ff, unit = spec.n_embd, spec.n_ff, 1 / math.sqrt(spec.n_embd)
    return [
        norm(f"{b}.ffn_norm.weight", n),
        matrix(f"{b}.ffn_gate.weight", (ff, n), unit, spec.weight),
        matrix(f"{b}.ffn_up.weight", (ff, n), unit, spec.weight),
        matrix(f"{b}.ffn_down.weight", (n, ff), 2 * spec.out_gain / math.sqrt(ff), spec.weight),
    ]


def attention(spec: TextSpec, b: str) -> list[Tensor]:
    return [norm(f"{b}.attn_norm.weight", spec.n_embd), *qkv(spec, b), attn_out(spec, b)]


def ends(spec: TextSpec, output_norm: str = "output_norm.weight") -> list[Tensor]:
    n, shape = spec.n_embd, (spec.vocab.size, spec.n_embd)
    # llama.cpp also quantises the matrix of the logits more finely in a Q4_0 file.
    fine = Q6_K if spec.weight == Q4_0 and n % 256 == 0 else spec.weight
    logit = _LOGIT_STD / math.sqrt(n)
    loud = spec.vocab.bands(logit, _HUSH * logit)
    if spec.tied:
        # The norm has both signs: otherwise the last token, still in the residual, would always win.
        last = vector(output_norm, n, std=1.0)
        return [Tensor("token_embd.weight", shape, loud, 0.0, fitting_type(fine, shape)), last]
    return [
        matrix("token_embd.weight", shape, spec.embedding_std, spec.weight),
        norm(output_norm, n),
        Tensor("output.weight", shape, loud, 0.0, fitting_type(fine, shape)),
    ]


def stack(spec: TextSpec, layer: Layer) -> list[Tensor]:
    return [t for i in range(spec.n_layers) for t in layer(spec, i)]


def plain(spec: TextSpec, i: int) -> list[Tensor]:
    return [*attention(spec, f"blk.{i}"), *ffn(spec, f"blk.{i}")]


def biased(spec: TextSpec, i: int) -> list[Tensor]:
    b, kv = f"blk.{i}", spec.n_heads_kv * spec.head_size
    biases = [
        vector(f"{b}.attn_q.bias", spec.heads_width, std=0.5),
        vector(f"{b}.attn_k.bias", kv, std=0.5),
        vector(f"{b}.attn_v.bias", kv, std=0.1),
    ]
    return [*plain(spec, i), *biases]


def mrope_sections(head_size: int) -> list[int]:
    """Returns the rotary pairs for time, height and width, in the proportions of Qwen2-VL (16, 24, 24 of 64)."""
    pairs = head_size // 2
    space = 3 * pairs // 8
    return [pairs - 2 * space, space, space, 0]


def normed(spec: TextSpec, i: int, mean: float = 1.5) -> list[Tensor]:
    # Normalised queries and keys: the norm's weight sets the sharpness.
    norms = [norm(f"blk.{i}.attn_{x}_norm.weight", spec.head_size, mean=mean) for x in "qk"]
    return [*plain(spec, i), *norms]
