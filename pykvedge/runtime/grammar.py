"""A Grammar says which tokens an answer may go on with. llguidance follows it, and keeps within bounds in each step."""

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
_OPTIONS = '%llguidance {"no_forcing": true}\n'  # the model chooses among all ways to write a text in tokens
_CLEARER = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf":
        "alternatives of oneOf may overlap, which cannot be obeyed; use anyOf",
    "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10": "it is too large",
    "Unimplemented keys: ": "what it says by these words cannot be obeyed: ",
}  # fmt: skip
_MOST_KEPT = 32  # grammars of a model
_MOST_SHOWN = 200  # characters of what is wrong with a grammar


class Grammar:
    """Follows one answer."""

    def __init__(self, sampling: Sampling, model: Model) -> None:
        """Raises GrammarError for a grammar that cannot be used, ModelError for a model that ends no answer."""
        self._table = model.table()
        lazy = sampling.grammar if isinstance(sampling.grammar, Lazy) else Lazy("")
        marks = {*lazy.preserved, *lazy.tokens}
        special = {token: model.written(token) for token in marks if model.is_unseen(token)}
        self._what, matcher = _kept(sampling, model, special)
        self._matcher = matcher.deep_copy()
        self._allowed = self._table.allowed.copy()
        self._allowed[list(special)] = True
        self._possible()  # what is too much for the first token is so before anything is read
        self._waiting: _Waiting | None = _Waiting(lazy, model, self._table, special)
        if (tokens := self._waiting.begun()) is not None:
            self._hold(tokens)

    def copy(self) -> Grammar | None:
        """Makes another one that goes on in the same way; None while the answer is free."""
        if self._waiting is not None:
            return None
        other = Grammar.__new__(Grammar)
        vars(other).update(vars(self), _matcher=self._matcher.deep_copy())
        return other

    def take(self, token: int) -> np.ndarray | None:
        """Goes on with a token. Where it cannot come next, nothing changes, and [n_vocab] bool tells what can.

        Raises GrammarError where that takes too much.
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
        """Makes the error for an answer that can neither go on nor end."""
        return GrammarError(f"the {self._what} allows nothing here that the model has a token for")

    def _possible(self) -> np.ndarray:
        """Tells which tokens can come next: [n_vocab] bool. Raises GrammarError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error() and "NoExtension" in self._matcher.get_error():
            raise self.dead_end()
        self._check()
        return np.unpackbits(bits, count=len(self._allowed), bitorder="little").astype(bool) & self._allowed

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the {self._what} cannot be followed: {_shown(self._matcher.get_error())}")

    def _hold(self, tokens: list[int]) -> None:
        """Holds the answer to the grammar from these tokens on, which were said. Raises GrammarError."""
        self._waiting = None
        fit = self._matcher.try_consume_tokens(tokens)
        self._check()
        if fit < len(tokens):
            raise GrammarError("the answer called the grammar in a way that the grammar does not allow")


class _Waiting:
    """Looks for the trigger of a grammar in an answer."""

    def __init__(self, lazy: Lazy, model: Model, table: GrammarTable, special: dict[int, str]) -> None:
        """special: tokens that stand for their text."""
        self._lazy, self._model, self._table = lazy, model, table
        self._special = {token: text.encode() for token, text in special.items()}
        self._said = [(-1, lazy.prefix.encode())]  # tokens, and the bytes that they stand for
        self._data = bytearray(lazy.prefix.encode())  # all of these

    def add(self, token: int) -> list[int] | None:
        """Goes on with a token. Returns the tokens from the trigger on, once it is there."""
        shown = self._special.get(token)
        self._said.append((token, self._model.piece(token) if shown is None else shown))
        self._data += self._said[-1][1]
        return self.begun()

    def begun(self) -> list[int] | None:
        """Returns the tokens from the trigger on, or None while it is not there."""
        lazy, data = self._lazy, self._data
        token, shown = self._said[-1]
        if token in lazy.tokens and not lazy.thinks(data[: len(data) - len(shown)].decode("utf-8", "replace")):
            return [token]
        text = data.decode("utf-8", "surrogateescape")
        at = lazy.begins(text)
        return None if at is None else self._from(len(text[:at].encode("utf-8", "surrogateescape")))

    def _from(self, start: int) -> list[int]:
        """Lists the tokens from a byte on; one that stands partly before it is cut."""
        out, at = list[int](), 0
        for token, shown in self._said:
            if at >= start and token >= 0:
                out.append(token)
            elif at + len(shown) > start:
                out += self._table.cut(shown[max(start - at, 0) :])
            at += len(shown)
        return out


def _kept(sampling: Sampling, model: Model, special: dict[int, str]) -> tuple[str, LLMatcher]:
    """Names what an answer follows, and returns what follows it, to be copied: tools make the same grammar each time,
    and a large one takes a tenth of a second. Raises GrammarError.
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
    for old in list(kept)[:-_MOST_KEPT]:
        kept.pop(old, None)
    return made


def _lark(sampling: Sampling, model: Model, special: dict[int, str]) -> tuple[str, str]:
    """Names what an answer follows, and writes it as llguidance reads it. Raises GrammarError.

    special: tokens that stand for their text where a literal of a grammar holds it.
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
    """Shortens what llguidance says to a line."""
    first = next(iter(error.splitlines()), "")
    if "regex parse error:" in first and (reason := re.search("^error: (.*)", error, re.MULTILINE)):
        first = f"regex: {reason[1]}"
    text = re.sub(r"^(at )?\d+\(\d+\): |failed to compile JSON schema: ", "", first)
    for said, meant in _CLEARER.items():
        text = text.replace(said, meant)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."
