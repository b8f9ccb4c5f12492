"""Families of vision-language models: pairs of a language model and a projector, with their tokens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A language model and a projector. image_size: pixels of the tower. specials: mtmd's tokens around an image."""

    arch: str
    projector: str
    image_size: int
    patch_size: int = 14
    merge: int = 2
    specials: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # text tokens that mtmd looks up
    n_layers: int = 2  # layers of the language model; models with two kinds of layers need two of each
    spm: bool = False  # SentencePiece tokenizer; else byte-level


_IDEFICS = ("<fake_token_around_image>", "<global-img>")
_TILES = tuple(f"<row_{y}_col_{x}>" for y in (1, 2) for x in (1, 2))
_LFM2 = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_1_col_1|>", "<|img_row_1_col_2|>")
_GLM = ("<|begin_of_image|>", "<|end_of_image|>")
_KIMI = ("<|media_start|>", "<|media_end|>")
_GEMMA4 = ("<|image>", "<image|>")
_NEWLINES = "\u010a\u010a"  # two newlines, in the characters of byte-level tokens

FAMILIES: dict[str, Family] = {
    "qwen25vl": Family("qwen2vl", "qwen2.5vl_merger", 560),
    "qwen3vl": Family("qwen3vl", "qwen3vl_merger", 64, patch_size=16),
    "qwen35": Family("qwen35", "qwen3vl_merger", 64, patch_size=16, n_layers=4),
    "gemma3v": Family("gemma3", "gemma3", 112, specials=("<start_of_image>", "<end_of_image>"), n_layers=4, spm=True),
    "internvl": Family("qwen2", "internvl", 56, specials=("<img>", "</img>")),
    "smolvlm": Family("llama", "idefics3", 64, patch_size=16, specials=(*_IDEFICS, *_TILES), words=(_NEWLINES,)),
    "pixtral": Family("llama", "pixtral", 1024, patch_size=16, merge=1, specials=("[IMG_END]",)),
    "mistral3": Family("mistral3", "pixtral", 1540, specials=("[IMG_END]",)),
    "minicpmv": Family("qwen2", "resampler", 56, specials=("<image>", "</image>", "<slice>", "</slice>")),
    "lfm2vl": Family("lfm2", "lfm2", 64, patch_size=16, specials=_LFM2, n_layers=4),
    "llama4": Family("llama4", "llama4", 56, specials=("<|image_start|>", "<|image_end|>"), n_layers=4),
    "glm4v": Family("glm4", "glm4v", 112, specials=_GLM),
    "kimivl": Family("deepseek2", "kimivl", 112, specials=_KIMI),
    "gemma4v": Family("gemma4", "gemma4v", 224, patch_size=16, merge=3, specials=_GEMMA4, n_layers=4, spm=True),
    "gemma4e": Family("gemma4", "gemma4v", 224, patch_size=16, merge=3, specials=_GEMMA4, n_layers=6, spm=True),
}
