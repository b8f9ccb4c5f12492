"""The vocabulary, and the trainer's tokenizer, which behaves as llama.cpp's SPM tokenizer with this vocabulary.

Each word is built from its prefixes ("▁r", "▁re", "▁red"). Only these merges exist, so the greedy merging of SPM can
only walk along a word from its start. Other text falls apart into characters or bytes. Line breaks and the names of the
roles are user-defined tokens; llama.cpp puts a space before the text after them.
"""

from __future__ import annotations

from kvedge_lab.demo_tasks.scenes import COLOURS, COLUMN_NAMES, PLURALS, ROW_NAMES, SHAPES
from kvedge_lab.demo_tasks.tasks import NUMBERS

SPACE = "\u2581"
BOS, EOS, UNK = 1, 2, 0
USER_DEFINED = ("\n", "USER: ", "ASSISTANT:", "ASSISTANT: ")
WORDS = (
    *COLOURS,
    *SHAPES,
    *PLURALS.values(),
    *NUMBERS,
    *ROW_NAMES,
    *COLUMN_NAMES,
    *("ok", "What", "Which", "Where", "How", "Describe", "Image", "colour", "color", "shape", "is", "the", "object"),
    *("in", "image", "are", "many", "there", "code", "has", "difference", "between", "and", "at", "a", "an", "these"),
    *("images", "of", "does", "this", "say", "Here"),
)
# The form of llama.cpp's built-in "vicuna" template, which llama.cpp recognises by these role names.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + '</s>\\n' }}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


class Tokenizer:
    def __init__(self) -> None:
        prefixes = dict.fromkeys(SPACE + w[:n] for w in WORDS for n in range(1, len(w) + 1))
        characters = list(map(chr, range(33, 127)))
        self.byte_start = 3
        self.pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
        self.pieces += [*USER_DEFINED, SPACE, *characters, *prefixes]
        self.pieces += [f"<unused{k}>" for k in range(-len(self.pieces) % 32)]
        self.ids = {p: k for k, p in enumerate(self.pieces)}
        self.known = {SPACE, *prefixes}

    def __len__(self) -> int:
        return len(self.pieces)

    def _plain(self, text: str) -> list[int]:
        """Encodes text without special tokens. Adds the prefix space."""
        text = SPACE + text.replace(" ", SPACE)
        out, at = [], 0
        while at < len(text):
            end = at + 1
            if text[at] == SPACE:
                while end < len(text) and text[at : end + 1] in self.known:
                    end += 1
            piece = text[at:end]
            if piece in self.ids:
                out.append(self.ids[piece])
            else:
                out += [self.byte_start + b for b in piece.encode()]
            at = end
        return out

    def encode(self, text: str) -> list[int]:
        """Encodes as llama_tokenize(add_special=False, parse_special=True) does."""
        specials = sorted((*USER_DEFINED, "<s>", "</s>"), key=len, reverse=True)
        out, plain, at = [], "", 0
        while at < len(text):
            special = next((s for s in specials if text.startswith(s, at)), None)
            if special is None:
                plain, at = plain + text[at], at + 1
                continue
            out += self._plain(plain) if plain else []
            out.append(self.ids[special])
            plain, at = "", at + len(special)
        return out + (self._plain(plain) if plain else [])

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids).replace(SPACE, " ").strip()

    def token_types(self) -> list[int]:
        """Returns GGUF token types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
        types = [2, 3, 3] + [6] * 256 + [4] * len(USER_DEFINED)
        return types + [5 if p.startswith("<unused") else 1 for p in self.pieces[len(types) :]]

    def scores(self) -> list[float]:
        """Returns scores: longer pieces of a word first; any order would work."""
        return [float(len(p)) if p in self.known else -1000.0 for p in self.pieces]


assert all(c.isascii() for w in WORDS for c in w)
