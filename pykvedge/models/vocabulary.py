"""A model's vocabulary: turns text into tokens, and tokens into text."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

from pykvedge.errors import ModelError, UsageError
from pykvedge.grammars.table import GrammarTable

LONG = 4096  # longer texts are tokenised in parts
_LINE = 8192  # characters of a line; a word of 20,000 overflows the stack of std::regex
_MANY = 256  # special tokens in a part that is tokenised at once


class Vocabulary:
    """The vocabulary of a llama_model, which may belong to another program's code."""

    def __init__(self, llama: Any, handle: Any) -> None:
        """llama: the bindings. handle: the llama_model, not owned."""
        self.llama, self.handle = llama, handle
        self.vocab = llama.llama_model_get_vocab(handle)
        self._table: GrammarTable | None = None
        self._table_lock = threading.Lock()

    @property
    def n_vocab(self) -> int:
        return self.llama.llama_vocab_n_tokens(self.vocab)

    def longest(self, most: int) -> int:
        """Returns the bytes of the longest text that is one token, or `most` if a token has at least so many bytes."""
        found = 1
        for token in range(self.n_vocab):
            found = max(found, len(self.piece(token)))
            if found >= most:
                return most
        return found

    def chat_template(self) -> str | None:
        """Returns the Jinja template in the model's metadata, or None."""
        text = self.llama.llama_model_chat_template(self.handle, None)
        return text.decode("utf-8", "replace") if text else None

    def special_text(self, which: str) -> str:
        """Returns the text of the "bos" or "eos" token; "" if the model has none."""
        token = getattr(self.llama, f"llama_vocab_{which}")(self.vocab)
        return self.written(token) if token >= 0 else ""

    @property
    def bos(self) -> int:
        """Returns the number of the token that begins a text; -1 if the model has none."""
        return int(self.llama.llama_vocab_bos(self.vocab))

    @functools.cached_property
    def adds_bos(self) -> bool:
        """Whether the tokeniser puts the token `bos` before prompts. Some kinds of tokenisers never do."""
        asked = self.bos >= 0 and self.llama.llama_vocab_get_add_bos(self.vocab)
        return bool(asked) and self._cut("", False, True)[:1] == [self.bos]

    def tokenize(self, text: str, special: bool = True, begins: bool = False) -> list[int]:
        """Cuts a text into tokens. special: the texts of special tokens become special tokens.

        begins: adds the tokens that begin and end the model's prompts.
        """
        if len(text) <= LONG:
            return self._cut(text, special, begins)
        around = self._cut("", special, True) if begins else []
        n_before = int(self.adds_bos and bool(around))
        parts = self._parted(text, _MANY) if special else [text]
        tokens = [token for part in parts for token in self._cut_lines(part, special)]
        return [*around[:n_before], *tokens, *around[n_before:]]

    def _cut_lines(self, text: str, special: bool) -> list[int]:
        """Cuts a text into pieces, if llama.cpp's regular expressions would overflow the stack on a long line."""
        by_words = self.llama.llama_vocab_type(self.vocab) == self.llama.LLAMA_VOCAB_TYPE_BPE
        if not by_words or max(map(len, text.split("\n"))) <= _LINE:
            return self._cut(text, special)
        out: list[int] = []
        for part in self._parted(text, 1) if special else [text]:
            first, *rest = _in_lines(part)
            out += self._cut(first, special)
            for line in rest:
                out += self._cut(line, False)
        return out

    def _parted(self, text: str, many: int) -> list[str]:
        """Splits a text before each `many`-th special token: llama.cpp's time grows with the square of their number.

        llama.cpp tokenises the text between two special tokens separately, so the result is the same. Special tokens
        that remove the blanks before them would change it; the text is not split there.
        """
        words = [word for word in self.special_words(text) if not self._eats(word, self.llama.LLAMA_TOKEN_ATTR_LSTRIP)]
        places = [found.start() for found in re.finditer("|".join(map(re.escape, words)), text)] if words else []
        ends = [*[place for place in places[many - 1 :: many] if place], len(text)]
        return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _cut(self, text: str, special: bool, begins: bool = False) -> list[int]:
        data = text.encode("utf-8", "replace")
        size = len(data) + 8
        while True:
            out = (self.llama.llama_token * size)()
            n = self.llama.llama_tokenize(self.vocab, data, len(data), out, size, begins, special)
            if n >= 0:
                return list(out[:n])
            if -n <= size:
                raise ModelError("the prompt cannot be tokenised")
            size = -n

    def table(self) -> GrammarTable:
        """Returns all tokens for grammars. Only the first call takes time. Raises ModelError."""
        with self._table_lock:
            if self._table is None:
                tokens = range(self.n_vocab)
                unseen = [token for token in tokens if self.is_unseen(token)]
                pieces = [self.piece(token) for token in tokens]
                for token in unseen:
                    pieces[token] = self.written(token).encode()
                self._table = GrammarTable(pieces, self.ends, unseen)
            return self._table

    def special_words(self, text: str) -> list[str]:
        """Returns the texts of the special tokens that `tokenize` finds in a text, the longest first.

        In a long text, the list also has special texts that overlap others.
        """
        if len(text) <= LONG:
            words = self._texts_of(self._cut(text, True))
        else:
            words = [word for begin, those in self._special.items() if begin in text for word in those]
        return sorted((word for word in words if word in text), key=len, reverse=True)

    @functools.cached_property
    def _special(self) -> dict[str, list[str]]:
        """First four characters -> the texts of special tokens that begin with them."""
        out: dict[str, list[str]] = {}
        for word in self._texts_of(range(self.n_vocab)):
            out.setdefault(word[:4], []).append(word)
        return out

    def _texts_of(self, tokens: Iterable[int]) -> list[str]:
        """Returns the texts of the special tokens in `tokens`."""
        return [text for token in set(tokens) if self.is_unseen(token) and (text := self.written(token))]

    def eats_blanks(self, word: str) -> bool:
        """Returns whether a word is the text of a special token that removes the blanks after it."""
        return self._eats(word, self.llama.LLAMA_TOKEN_ATTR_RSTRIP)

    def _eats(self, word: str, which: int) -> bool:
        tokens = self._cut(word, True)
        return len(tokens) == 1 and bool(self._attributes(tokens[0]) & which)

    def _attributes(self, token: int) -> int:
        return self.llama.llama_vocab_get_attr(self.vocab, token)

    def is_unseen(self, token: int) -> bool:
        """Returns whether a token is special: a mark for the model, not shown in answers."""
        unseen = self.llama.LLAMA_TOKEN_ATTR_CONTROL | self.llama.LLAMA_TOKEN_ATTR_UNKNOWN
        return bool(self._attributes(token) & unseen)

    def written(self, token: int) -> str:
        """Returns the name of a special token."""
        return self.llama.llama_vocab_get_text(self.vocab, token).decode("utf-8", "replace")

    def check(self, tokens: Iterable[int]) -> None:
        """Raises UsageError for an invalid token number, on which llama.cpp would end the process."""
        n_vocab = self.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise UsageError(f"the model has no token {token}, only tokens 0 to {n_vocab - 1}")

    def text(self, tokens: list[int]) -> str:
        """Returns the text of tokens, special tokens included. Raises UsageError for an invalid token number."""
        self.check(tokens)
        given, write = (self.llama.llama_token * len(tokens))(*tokens), self.llama.llama_detokenize
        found = _filled(16 * len(tokens) + 64, lambda *room: write(self.vocab, given, len(tokens), *room, False, True))
        return found.decode("utf-8", "replace")

    @functools.cached_property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        return [token for token in range(self.n_vocab) if self.is_end(token)]

    def is_end(self, token: int) -> bool:
        return bool(self.llama.llama_vocab_is_eog(self.vocab, token))

    def marks(self, texts: Iterable[str]) -> frozenset[int]:
        """Returns the special tokens among texts that are one token each."""
        single = {tokens[0] for text in texts if len(tokens := self.tokenize(text)) == 1}
        return frozenset(token for token in single if self.is_unseen(token))

    def piece(self, token: int) -> bytes:
        """Returns the bytes of a token, maybe a part of a character; b"" for a special token."""
        return _filled(64, lambda *room: self.llama.llama_token_to_piece(self.vocab, token, *room, 0, False))


def _filled(size: int, write: Callable[[Any, int], int]) -> bytes:
    """Returns llama.cpp's bytes. write(buffer, size): returns the number of bytes, or minus the needed size."""
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = write(buffer, size)
        if n >= 0:
            return buffer.raw[:n]
        size = -n


def _in_lines(text: str) -> list[str]:
    """Splits a text into pieces of at most _LINE characters, if possible between two words."""
    out, begin = [], 0
    while len(text) - begin > _LINE:
        end = begin + _LINE
        at = text.rfind(" ", begin + 1, end)
        while at > begin and (text[at - 1].isspace() or text[at + 1].isspace()):
            at = text.rfind(" ", begin + 1, at)
        out.append(text[begin : at if at > begin else end])
        begin += len(out[-1])
    return [*out, text[begin:]]
