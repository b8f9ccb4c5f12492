"""Gives a model's vocabulary to llguidance, which follows grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvedge.errors import ModelError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class GrammarTable:
    """A vocabulary for llguidance. Holds no pointer into the model."""

    def __init__(self, tokens: list[bytes], ends: list[int], unseen: list[int]) -> None:
        """Takes a second for 100,000 tokens.

        tokens: bytes of each token. ends: tokens that end an answer. unseen: tokens that are no text of an answer.
        Raises ModelError for a model without an end token.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        if not ends:
            raise ModelError("the model has no token that ends an answer, so an answer cannot follow a grammar")
        self.ends = ends
        self.kept: dict[object, tuple[str, Any]] = {}  # grammars made for this vocabulary (runtime/grammar.py)
        self.allowed = np.ones(len(tokens), bool)  # tokens that an answer may contain, or end with
        self.allowed[unseen], self.allowed[ends] = False, True
        table = _Table(tokens, ends, unseen)
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(table), eos_token=ends)
        table.tokenizer = self.tokenizer

    def cut(self, text: bytes) -> list[int]:
        """Returns tokens with exactly these bytes. Raises ModelError if the model has no such tokens."""
        tokens = self.tokenizer.tokenize_bytes(text)
        if self.tokenizer.decode_bytes(tokens) != text:
            raise ModelError("the vocabulary of the model cannot write a part of the answer")
        return tokens


class _Table:
    """Implements the tokenizer interface that llguidance expects."""

    bos_token_id = None
    tokenizer: LLTokenizer | None = None

    def __init__(self, tokens: list[bytes], ends: list[int], special: list[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, ends[0], special

    def __call__(self, text: bytes) -> Sequence[int]:
        """Cuts a text greedily into the longest tokens. The model's own tokenizer may cut differently."""
        return self.tokenizer.greedy_tokenize(text.decode()) if self.tokenizer is not None else []
