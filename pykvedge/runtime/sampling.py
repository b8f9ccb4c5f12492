"""Settings for choosing the tokens of an answer, and for its end."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pykvedge.errors import GrammarError, UsageError, check_number
from pykvedge.grammars import source as grammar_source

# name: lowest and highest value
_REAL = {
    "temp": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
}
_POSITIVE = {"top_p": 1.0, "typical_p": 1.0, "repeat_penalty": 100.0}  # above 0, at most this value
MAX_LOGPROBS = 20
_WHOLE = {
    "top_k": (0, 2**31 - 1, "be 0 (off) or more"),
    "seed": (0, 2**32 - 1, "lie between 0 and 4294967295"),
    "max_tokens": (1, 2**31 - 1, "lie between 1 and 2147483647"),
    "repeat_last_n": (0, 2**20, "lie between 0 (off) and 1048576"),
    "logprobs": (0, MAX_LOGPROBS, f"lie between 0 and {MAX_LOGPROBS}"),
}
_LARGEST_BIAS = 1e6
_MAX_STOPS, _LONGEST_STOP = 64, 1000  # number of stop texts, and characters of each


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing tokens. All steps are llama.cpp's, in this order: logit_bias, the penalties, and with temp
    0 the likeliest token; otherwise top_k (0: off), typical_p (1: off), top_p (1: off), min_p (0: off), temp.

    seed: the same seed gives the same answer; None: a new seed for each answer.
    repeat_penalty (1: off), frequency_penalty, presence_penalty (0: off): lower the probability of tokens among the
    last repeat_last_n (0: off) tokens of this answer. Tokens of the prompt do not count.
    logit_bias: is added to the logits of tokens. A token is given by its number, or as text, which means every token of
    that text; -inf forbids a token.
    stop: a text, or several; the answer ends before the stop text that is complete first.
    grammar: the answer follows this grammar (llama.cpp's GBNF, from rule `root` on). A value with "::=" is text; any
    other value is a file. json_schema: the answer is JSON by this schema: a dict, text that begins with "{", or a file.
    regex: the whole answer matches this regular expression (Rust's, without look-around). Only one of the three.
    logprobs: a number from 0 to 20; the report then has the log probability of each token and of this many likeliest
    tokens.
    Raises UsageError for an invalid value; GrammarError is a UsageError.
    """

    temp: float = 0.0
    top_p: float = 0.95
    top_k: int = 40
    seed: int | None = None
    max_tokens: int = 512
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int | str, float] = field(default_factory=dict, hash=False)
    stop: str | Sequence[str] = ()  # becomes a tuple
    logprobs: int | None = None
    grammar: str | os.PathLike[str] | grammar_source.Lazy | None = None  # a file becomes its text
    json_schema: str | os.PathLike[str] | Mapping[str, Any] | None = None  # becomes its text
    regex: str | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _REAL.items():
            check_number(name, getattr(self, name), whole=False)
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} must lie between {least:g} and {most:g}, not {getattr(self, name)}")
        for name, most in _POSITIVE.items():
            check_number(name, getattr(self, name), whole=False)
            if not 0 < getattr(self, name) <= most:
                raise UsageError(f"{name} must be above 0 and at most {most:g}, not {getattr(self, name)}")
        for name, (least, most, what) in _WHOLE.items():
            if (value := getattr(self, name)) is None and name in ("seed", "logprobs"):
                continue
            check_number(name, value)
            if not least <= value <= most:
                raise UsageError(f"{name} must {what}, not {value}")
        _check_bias(self.logit_bias)
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        if sum(form is not None for form in (self.grammar, self.json_schema, self.regex)) > 1:
            raise GrammarError("grammar, json_schema and regex exclude each other; give one of them")
        if self.grammar is not None and not isinstance(self.grammar, grammar_source.Lazy):
            object.__setattr__(self, "grammar", grammar_source.grammar(self.grammar))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", grammar_source.schema(self.json_schema))
        if self.regex is not None:
            grammar_source.regex(self.regex)

    @property
    def constrained(self) -> bool:
        """Returns whether a grammar, a JSON schema or a regular expression limits the answer."""
        return self.grammar is not None or self.json_schema is not None or self.regex is not None

    @property
    def penalises(self) -> bool:
        """Returns whether any penalty is on."""
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return self.repeat_last_n > 0 and penalties != (1.0, 0.0, 0.0)


def checked_sampling(given: Sampling | None) -> Sampling:
    """Returns the given sampling; for None the default sampling. Raises UsageError for another type."""
    if given is not None and not isinstance(given, Sampling):
        raise UsageError(f"sampling must be a Sampling, not {given!r:.40}")
    return Sampling() if given is None else given


def _check_bias(biases: object) -> None:
    if not isinstance(biases, Mapping):
        raise UsageError(f"logit_bias must map tokens to numbers, not {biases!r:.40}")
    for token, bias in biases.items():
        if isinstance(token, bool) or not isinstance(token, int | str) or token == "":
            raise UsageError(f"a token in logit_bias must be a number or a text, not {token!r:.40}")
        check_number("a logit_bias", bias, whole=False)
        if not abs(bias) <= _LARGEST_BIAS and bias != -math.inf:
            raise UsageError(f"a logit_bias must lie between -1e6 and 1e6, or be -inf, not {bias}")


def _stop_texts(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or isinstance(texts, bytes) or not all(isinstance(t, str) for t in texts):
        raise UsageError(f"stop must be a text or a list of texts, not {given!r:.40}")
    if not all(texts) or len(texts) > _MAX_STOPS or max(map(len, texts), default=0) > _LONGEST_STOP:
        raise UsageError(
            f"stop takes up to {_MAX_STOPS} texts, each of 1 to {_LONGEST_STOP} characters; "
            f"given: {len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} characters"
        )
    return tuple(texts)
