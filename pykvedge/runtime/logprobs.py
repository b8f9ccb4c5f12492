"""Computes the probabilities of an answer's tokens and of the likeliest alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Alternative:
    """A token that was possible. logprob: natural logarithm of its probability."""

    id: int
    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    id: its number. text, data: its text and its bytes. If data ends inside a character, text has a replacement
    character; a special token has no text. logprob: natural logarithm of the model's probability, from all logits
    before any setting of a Sampling. top: the likeliest tokens, in descending order.
    """

    id: int
    text: str
    data: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object of `kvedge chat --json --logprobs N`. The logarithm of a probability of 0 is None."""
        return {**_plain(self), "top": [_plain(other) for other in self.top]}


def _plain(token: Token | Alternative) -> dict[str, Any]:
    logprob = token.logprob if math.isfinite(token.logprob) else None
    return {"id": token.id, "text": token.text, "bytes": list(token.data), "logprob": logprob}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the probabilities, [n_vocab] float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def token(chosen: int, logits: np.ndarray, n: int, piece: Callable[[int], bytes]) -> Token:
    """Describes a token chosen by logits [n_vocab], with the n likeliest tokens.

    piece(token) returns a token's bytes. Among equally likely tokens the lower number comes first.
    """
    logprobs = log_softmax(logits)
    n = min(n, len(logprobs))
    least = np.partition(logprobs, -n)[-n] if n else np.inf
    near = np.flatnonzero(logprobs >= least)
    best = near[np.argsort(-logprobs[near], kind="stable")][:n]
    top = (_described(int(one), float(logprobs[one]), piece) for one in best)
    own = _described(chosen, float(logprobs[chosen]), piece)
    return Token(own.id, own.text, own.data, own.logprob, tuple(top))


def _described(number: int, logprob: float, piece: Callable[[int], bytes]) -> Alternative:
    data = piece(number)
    return Alternative(number, data.decode("utf-8", "replace"), data, logprob)
