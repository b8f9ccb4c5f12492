"""Limits the tokens of an answer by a grammar. llguidance follows the grammar, with bounded work per token."""

from __future__ import annotations

import contextlib
import re

import numpy as np
from llguidance import LLMatcher, LLParserLimits, regex_to_lark

from pykvedge.errors import GrammarError
from pykvedge.grammars import gbnf, schema
from pykvedge.grammars.source import Lazy
from pykvedge.grammars.table import GrammarTable
from pykvedge.models.model import Model
from pykvedge.runtime.sampling import Sampling

_LIMITS = LLParserLimits(
    max_items_in_row=1200, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=20_000,
    max_lexer_states=50_000, max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False,
)  # fmt: skip
_OPTIONS = '%llguidance {"no_forcing": true}\n'  # the model chooses how to split a text into tokens
_CLEARER = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf":
        "alternatives of oneOf that may overlap are not supported; use anyOf",
    "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10": "the grammar is too large",
    "Unimplemented keys: ": "these keywords are not supported: ",
}  # fmt: skip
_MAX_KEPT = 32  # grammars kept for each model
_MAX_SHOWN = 200  # characters shown of a grammar's error


class Grammar:
    """Follows the grammar of one answer, token by token."""

    def __init__(self, sampling: Sampling, model: Model) -> None:
        """Raises GrammarError for an unusable grammar, ModelError for a model without an end token."""
        self._table = model.table()
        lazy = sampling.grammar if isinstance(sampling.grammar, Lazy) else Lazy("")
        marks = {*lazy.preserved, *lazy.tokens}
        special = {token: model.written(token) for token in marks if model.is_unseen(token)}
        self._what, matcher = _kept(sampling, model, special)
        self._matcher = matcher.deep_copy()
        self._allowed = self._table.allowed.copy()
        self._allowed[list(special)] = True
        self._possible()  # raises now, before anything is read, if the first token takes too much work
        self._waiting: _Waiting | None = _Waiting(lazy, model, self._table, special)
        if (tokens := self._waiting.begun()) is not None:
            self._hold(tokens)

    def copy(self) -> Grammar | None:
        """Returns a copy for guesses, or None while the grammar waits for its trigger."""
        if self._waiting is not None:
            return None
        other = Grammar.__new__(Grammar)
        vars(other).update(vars(self), _matcher=self._matcher.deep_copy())
        return other

    def take(self, token: int) -> np.ndarray | None:
        """Accepts a token and returns None. If the token is not allowed, returns the allowed tokens, [n_vocab] bool.

        A refused token changes nothing. Raises GrammarError if the check takes too much work.
        """
        if self._waiting is not None:
            if (tokens := self._waiting.add(token)) is not None:
                self._hold(tokens)
            return None
        if token in self._table.ends:
            fits = self._matcher.is_stopped() or self._matcher.is_accepting()
        else:
            fits = bool(self._allowed[token]) and self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return None if fits else self._possible()

    def dead_end(self) -> GrammarError:
        """Returns the error for an answer that can neither continue nor end."""
        return GrammarError(f"the answer cannot continue: no token of the model fits the {self._what}")

    def _possible(self) -> np.ndarray:
        """Returns the allowed next tokens, [n_vocab] bool. Raises GrammarError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error() and "NoExtension" in self._matcher.get_error():
            raise self.dead_end()
        self._check()
        return np.unpackbits(bits, count=len(self._allowed), bitorder="little").astype(bool) & self._allowed

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the {self._what} cannot be followed: {_shown(self._matcher.get_error())}")

    def _hold(self, tokens: list[int]) -> None:
        """Starts the grammar with the answer's tokens from the trigger on. Raises GrammarError."""
        self._waiting = None
        fit = self._matcher.try_consume_tokens(tokens)
        self._check()
        if fit < len(tokens):
            raise GrammarError(
                "the answer contains the trigger of the grammar in a form that the grammar does not allow"
            )


class _Waiting:
    """Searches an answer for the trigger of its grammar."""

    def __init__(self, lazy: Lazy, model: Model, table: GrammarTable, special: dict[int, str]) -> None:
        """special: special tokens and their texts; the grammar sees the text."""
        self._lazy, self._model, self._table = lazy, model, table
        self._special = {token: text.encode() for token, text in special.items()}
        self._said = [(-1, lazy.prefix.encode())]  # tokens, each with its bytes
        self._data = bytearray(lazy.prefix.encode())  # the bytes of all tokens

    def add(self, token: int) -> list[int] | None:
        """Adds a token. Returns the tokens from the trigger on, or None before the trigger."""
        shown = self._special.get(token)
        self._said.append((token, self._model.piece(token) if shown is None else shown))
        self._data += self._said[-1][1]
        return self.begun()

    def begun(self) -> list[int] | None:
        """Returns the tokens from the trigger on, or None before the trigger."""
        lazy, data = self._lazy, self._data
        token, shown = self._said[-1]
        if token in lazy.tokens and not lazy.thinks(data[: len(data) - len(shown)].decode("utf-8", "replace")):
            return [token]
        text = data.decode("utf-8", "surrogateescape")
        at = lazy.begins(text)
        return None if at is None else self._from(len(text[:at].encode("utf-8", "surrogateescape")))

    def _from(self, start: int) -> list[int]:
        """Returns the tokens from byte `start` on. Cuts a token that begins before `start`."""
        out, at = list[int](), 0
        for token, shown in self._said:
            if at >= start and token >= 0:
                out.append(token)
            elif at + len(shown) > start:
                out += self._table.cut(shown[max(start - at, 0) :])
            at += len(shown)
        return out


def _kept(sampling: Sampling, model: Model, special: dict[int, str]) -> tuple[str, LLMatcher]:
    """Returns what an answer follows (for errors) and its matcher, which the caller copies. Raises GrammarError. Keeps
    matchers: tools make the same grammar each time, and a large grammar takes 0.1 s.
    """
    grammar = sampling.grammar.grammar if isinstance(sampling.grammar, Lazy) else sampling.grammar
    key = (grammar, sampling.regex, sampling.json_schema, tuple(sorted(special.items())))
    kept = model.table().kept
    with contextlib.suppress(KeyError):
        return kept[key]
    what, text = _lark(sampling, model, special)
    matcher = LLMatcher(model.table().tokenizer, _OPTIONS + text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(f"the {what} cannot be used: {_shown(matcher.get_error())}")
    made = kept[key] = what, matcher
    for old in list(kept)[:-_MAX_KEPT]:
        kept.pop(old, None)
    return made


def _lark(sampling: Sampling, model: Model, special: dict[int, str]) -> tuple[str, str]:
    """Returns what an answer follows (for errors) and the grammar in llguidance's format. Raises GrammarError.

    special: special tokens and their texts; a literal of a GBNF grammar with this text means the token.
    """
    what, grammar = "grammar", sampling.grammar
    try:
        if grammar is not None:
            written = grammar.grammar if isinstance(grammar, Lazy) else str(grammar)
            words = {text: token for token, text in special.items() if text}
            return what, gbnf.lark(written, model.tokenize, words)
        if sampling.regex is not None:
            return "regular expression", f"start: /{regex_to_lark(sampling.regex, '')}/"
        what = "JSON schema"
        return what, f"start: %json {schema.prepared(str(sampling.json_schema))}"
    except GrammarError as error:
        raise GrammarError(f"the {what} cannot be used: {error}") from None


def _shown(error: str) -> str:
    """Shortens an error of llguidance to one clear line."""
    first = next(iter(error.splitlines()), "")
    if "regex parse error:" in first and (reason := re.search("^error: (.*)", error, re.MULTILINE)):
        first = f"regex: {reason[1]}"
    text = re.sub(r"^(at )?\d+\(\d+\): |failed to compile JSON schema: ", "", first)
    for said, meant in _CLEARER.items():
        text = text.replace(said, meant)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."
