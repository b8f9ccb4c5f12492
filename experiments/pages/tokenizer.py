"""The vocabulary: byte-level BPE, trained on the words of the pages and questions, with Qwen2's splitting of text."""

from __future__ import annotations

import functools
import json

from modelgen.tokens import QWEN_SPECIALS
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from kvedge_lab.demo_tasks.prompts import show_text
from kvedge_lab.page_tasks.pages import COLOURS, LEXICON
from kvedge_lab.page_tasks.tasks import ON_PAGE, QUESTIONS

END, START, SEEN, SEEN_END = "<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>"
SIZE = 1024
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _texts() -> list[str]:
    """Returns the training texts: each word alone and after a space. Codes are not included."""
    words = [*LEXICON, *COLOURS, "ok", "user", "assistant", "system", "Page", "Here", "these", "this"]
    texts = (*QUESTIONS.values(), ON_PAGE.format(1), show_text(1, "page"), show_text(2, "page"))
    words += [word.strip("?.") for text in texts for word in text.split() if word.strip("?.").isalpha()]
    return [form for word in dict.fromkeys(words) for form in (word, " " + word)] * 2


@functools.cache
def tokenizer() -> Tokenizer:
    """Trains the vocabulary. The same texts give the same vocabulary."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=SIZE - len(QWEN_SPECIALS), min_frequency=2, initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    made.train_from_iterator(_texts(), trainer)
    made.add_special_tokens(list(QWEN_SPECIALS))
    return made


def encode(text: str) -> list[int]:
    """Encodes as llama_tokenize(add_special=False, parse_special=True) does."""
    return tokenizer().encode(text).ids


def spans(text: str) -> list[tuple[int, int]]:
    """Returns the character range of each token."""
    return tokenizer().encode(text).offsets


def id_of(token: str) -> int:
    found = tokenizer().token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def merges() -> list[str]:
    """Returns the merges in GGUF's form and order."""
    pairs = json.loads(tokenizer().to_str())["model"]["merges"]
    return [" ".join(pair) for pair in pairs]


def pieces() -> list[str]:
    found = {number: token for token, number in tokenizer().get_vocab().items()}
    return [found[number] for number in range(len(found))]
