"""A GrammarTable is the vocabulary of a model as llguidance takes it, which follows grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvedge.errors import ModelError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class GrammarTable:
    """It holds no pointer into the model."""

    def __init__(self, tokens: list[bytes], ends: list[int], unseen: list[int]) -> None:
        """Takes a second for 100,000 tokens.

        tokens: what they stand for. ends: those that end an answer. unseen: those that are no text of one.
        Raises ModelError for a model that has no token to end an answer with.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        if not ends:
            raise ModelError("the model has no token that ends an answer, so that none can follow a grammar")
        self.ends = ends
        self.kept: dict[object, tuple[str, Any]] = {}  # grammars that were made for it (runtime/grammar.py)
        self.allowed = np.ones(len(tokens), bool)  # tokens that may be part of an answer, or its end
        self.allowed[unseen], self.allowed[ends] = False, True
        table = _Table(tokens, ends, unseen)
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(table), eos_token=ends)
        table.tokenizer = self.tokenizer

    def cut(self, text: bytes) -> list[int]:
        """Cuts bytes into tokens that are the same bytes. Raises ModelError where the model has none for one."""
        tokens = self.tokenizer.tokenize_bytes(text)
        if self.tokenizer.decode_bytes(tokens) != text:
            raise ModelError("the model has no tokens for a part of the answer")
        return tokens


class _Table:
    """What llguidance asks of a tokeniser."""

    bos_token_id = None
    tokenizer: LLTokenizer | None = None

    def __init__(self, tokens: list[bytes], ends: list[int], special: list[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, ends[0], special

    def __call__(self, text: bytes) -> Sequence[int]:
        """Cuts a text into the longest tokens there are, which need not be those that the model would."""
        return self.tokenizer.greedy_tokenize(text.decode()) if self.tokenizer is not None else []
