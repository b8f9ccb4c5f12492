"""Tiny models of many architectures and shapes: a few MB each, written in well under a second."""

from dataclasses import dataclass, replace
from pathlib import Path

from . import tokens
from .families import FAMILIES, Family
from .text import ARCHITECTURES, DEEPSTACK, TextSpec, text_model
from .vision import vision_model
from .vit import VisionSpec
from .writer import F16, F32, Q4_0, Q8_0, write_gguf

VISION_KINDS = ("llava", "qwen2vl", *FAMILIES)
KINDS = (*VISION_KINDS, *(arch for arch in ARCHITECTURES if arch not in VISION_KINDS))
WEIGHTS = {"f32": F32, "f16": F16, "q8_0": Q8_0, "q4_0": Q4_0}


@dataclass(frozen=True)
class TinySpec:
    """The shape of a tiny model. The width is n_heads * head_size, the feed-forward width is twice that.

    `image_size`: of the llava tower (patches of 14: 56 gives 16 image tokens). qwen2vl takes any size; families.py has
    the size of every other kind.
    """

    n_layers: int = 2
    n_heads: int = 4
    n_heads_kv: int = 2
    head_size: int = 64
    n_vocab: int = 1024
    n_ctx_train: int = 8192
    image_size: int = 56
    weight: str = "f16"
    seed: int = 0
    key_outliers: float = 1.0  # only llama: two channel pairs of every key are larger; the model computes the same


DEFAULT_SPEC = TinySpec()
# Sliding-window and hybrid models alternate two kinds of layers: four layers have each kind twice.
_DEFAULT_SPECS = {
    "gemma3": replace(DEFAULT_SPEC, n_layers=4),
    "lfm2": replace(DEFAULT_SPEC, n_layers=4),
    # 25 layers make its tables wide, so it has few heads and tokens
    "gemma3n": TinySpec(n_layers=25, n_heads=2, n_heads_kv=1, head_size=32, n_vocab=400),
    **{kind: replace(DEFAULT_SPEC, n_layers=family.n_layers, head_size=32) for kind, family in FAMILIES.items()},
}


def default_spec(kind: str) -> TinySpec:
    return _DEFAULT_SPECS.get(kind, DEFAULT_SPEC)


def _text_spec(kind: str, spec: TinySpec) -> TextSpec:
    family = FAMILIES.get(kind)
    arch = family.arch if family else "llama" if kind == "llava" else kind
    return TextSpec(
        arch=arch,
        vocab=_vocabulary(kind, spec, family),
        n_layers=spec.n_layers,
        n_heads=spec.n_heads,
        n_heads_kv=spec.n_heads_kv,
        head_size=spec.head_size,
        n_ff=2 * spec.n_heads * spec.head_size,
        n_ctx_train=spec.n_ctx_train,
        # llama.cpp changes the tokens of models with "phi3" in the name, so the name has no kind.
        name="kvedge tiny",
        weight=WEIGHTS[spec.weight],
        key_outliers=spec.key_outliers,
    )


def _vocabulary(kind: str, spec: TinySpec, family: Family | None) -> tokens.Vocabulary:
    if family and not family.spm:
        return tokens.bpe(spec.n_vocab, specials=family.specials, words=family.words)
    if family:
        return tokens.spm(spec.n_vocab, template=tokens.CHATML, specials=family.specials)
    make = tokens.bpe if kind in ("qwen2vl", "qwen2", "qwen3", "qwen3vl", "lfm2") else tokens.spm
    return make(spec.n_vocab, template=tokens.VICUNA if kind in ("llava", "llama") else tokens.CHATML)


def _vision_spec(kind: str, spec: TinySpec, text: TextSpec) -> VisionSpec:
    family, llava = FAMILIES.get(kind), kind == "llava"
    return VisionSpec(
        projector=family.projector if family else "mlp" if llava else "qwen2vl_merger",
        image_size=family.image_size if family else spec.image_size,
        patch_size=family.patch_size if family else 14,
        width=64,
        n_layers=3 if llava else 2,
        n_heads=2,
        n_ff=128,
        n_out=text.n_embd,
        out_std=text.embedding_std,
        name="kvedge tiny",
        merge=family.merge if family else 2,
        deepstack=tuple(range(DEEPSTACK)) if kind == "qwen3vl" else (),
    )


def write_tiny(kind: str, directory: str | Path, *, spec: TinySpec | None = None) -> tuple[Path, Path | None]:
    """Writes `directory`/model.gguf, and mmproj.gguf for vision kinds. The same spec gives the same bytes."""
    spec = spec or default_spec(kind)
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    text = _text_spec(kind, spec)
    model = out / "model.gguf"
    write_gguf(model, *text_model(text), seed=spec.seed)
    if kind not in VISION_KINDS:
        return model, None
    mmproj = out / "mmproj.gguf"
    write_gguf(mmproj, *vision_model(_vision_spec(kind, spec, text)), seed=spec.seed + 1)
    return model, mmproj
