"""Tokenizers for any text: every byte has a token; other tokens are pieces of letters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from string import ascii_lowercase, printable

from .writer import Value

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6

VICUNA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# In the order of Qwen2-VL.
QWEN_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer metadata, and the rows of tokens that a random model should rarely choose."""

    meta: dict[str, Value]
    size: int
    quiet: tuple[tuple[int, int], ...]

    def bands(self, loud: float, hushed: float) -> tuple[tuple[int, float], ...]:
        """Returns row bands for an embedding or output matrix: `hushed` for the quiet tokens, else `loud`."""
        bands: list[tuple[int, float]] = []
        at = 0
        for start, stop in self.quiet:
            bands += [(start - at, loud), (stop - start, hushed)]
            at = stop
        bands.append((self.size - at, loud))
        return tuple(band for band in bands if band[0])


def _pieces(space: str) -> Iterator[str]:
    """Yields pieces of letters, shorter pieces first. Each piece joins earlier pieces."""
    for letter in ascii_lowercase:
        yield space + letter
    for length in (2, 3, 4):
        for prefix in ("", space):
            for letters in product(ascii_lowercase, repeat=length):
                yield prefix + "".join(letters)


def spm(size: int, template: str = VICUNA, specials: Sequence[str] = ()) -> Vocabulary:
    """Returns a SentencePiece vocabulary like Llama's: <unk>, <s>, </s>, 256 bytes, pieces; `specials` come last."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    head = len(tokens)
    tokens += [char for char in printable if not char.isspace()]
    first_special = size - len(specials)
    if first_special < len(tokens):
        raise ValueError(f"a vocabulary of {size} tokens is too small: at least {len(tokens) + len(specials)}")
    tokens += [*islice(_pieces("\u2581"), first_special - len(tokens)), *specials]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (first_special - 259) + [CONTROL] * len(specials)
    meta: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(259 - i) for i in range(259, size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": template,
    }
    return Vocabulary(meta, size, ((0, head), (first_special, size)))


def _byte_characters() -> list[str]:
    """Returns the 256 characters that stand for bytes in a GPT-2 vocabulary, in its usual order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in shown] + [chr(0x100 + i) for i in range(256 - len(shown))]


def bpe(
    size: int, used: int | None = None, template: str = CHATML, specials: Sequence[str] = (), words: Sequence[str] = ()
) -> Vocabulary:
    """Returns a byte-level vocabulary like Qwen2-VL's. Tokens from number `used` on are padding.

    specials: more special tokens, after Qwen's. words: more text tokens, which no merge makes: programs look them up.
    """
    specials = (*QWEN_SPECIALS, *specials)
    used = size if used is None else used
    space = "\u0120"
    tokens = _byte_characters()
    first_special = used - len(specials)
    if first_special < len(tokens) + len(words):
        least = len(tokens) + len(words) + len(specials)
        raise ValueError(f"a vocabulary of {used} tokens is too small: at least {least}")
    pieces = list(islice(_pieces(space), first_special - len(tokens) - len(words)))
    known = {*tokens, *pieces}
    # Pieces of four letters only fill the vocabulary: their merges would slow down every load.
    short = [piece for piece in pieces if len(piece.removeprefix(space)) < 4]
    merges = [f"{p[:-n]} {p[-n:]}" for n in (1, 2) for p in short if len(p) > n and {p[:-n], p[-n:]} <= known]
    tokens += [*pieces, *words, *specials, *(f"[PAD{i}]" for i in range(used, size))]
    special = {name: first_special + i for i, name in enumerate(specials)}
    types = [NORMAL] * first_special + [CONTROL] * len(specials) + [UNUSED] * (size - used)
    meta: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": special["<|endoftext|>"],
        "tokenizer.ggml.eos_token_id": special["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": special["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }
    return Vocabulary(meta, size, ((94, 256), (first_special, size)))
