"""Scores of answers, divergences of distributions, and their intervals. Needs NumPy only.

ROUGE-L is Lin's (2004) sentence-level F1 on lower-cased words, as in the rouge-score package without stemmer.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

_WORD = re.compile(r"[^\W_]+")
REPEATS = 2000  # resamplings of a bootstrap interval


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns log-probabilities float64 from logits [..., n_vocab] of any float type."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """Returns KL(p || q) in nats from log-probabilities [n_vocab]. Tokens with p = 0 add nothing."""
    seen = log_p > -np.inf
    return float((np.exp(log_p[seen]) * (log_p[seen] - log_q[seen])).sum())


def words(text: str) -> list[str]:
    """Returns the lower-cased runs of letters and digits."""
    return _WORD.findall(text.lower())


def normalised(text: str) -> str:
    """Returns the words joined by one space: case, punctuation and white space do not count."""
    return " ".join(words(text))


def rouge_l(answer: str, reference: str) -> float:
    """Returns ROUGE-L F1 in 0..1; 0 if one of the texts has no words."""
    a, b = words(answer), words(reference)
    if not a or not b:
        return 0.0
    common = _common_subsequence(a, b)
    return 2 * common / (len(a) + len(b))


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence. A row of the table is one integer (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    everything = (1 << len(a)) - 1
    row = everything
    for word in b:
        hits = row & places.get(word, 0)
        row = (row + hits | row - hits) & everything
    return len(a) - row.bit_count()


def exact_match(answer: str, reference: str) -> float:
    """Returns 1 if both texts are equal, except for white space around them; else 0."""
    return float(answer.strip() == reference.strip())


def contains(answer: str, reference: str) -> float:
    """Returns 1 if the words of the reference occur in the answer as one run; else 0."""
    return float(bool(words(reference)) and f" {normalised(reference)} " in f" {normalised(answer)} ")


def letter(i: int, n_choices: int) -> str:
    """Returns the letter of choice i; "" if there are more choices than letters (MileBench's GPR1200)."""
    return chr(ord("a") + i) if n_choices <= 26 else ""


def chosen(answer: str, choices: Sequence[str]) -> int | None:
    """Returns the choice that an answer names: the answer equals it, or has letter and text, its text, or its letter.

    Returns None for no choice. Of several choices the first named one wins, and at the same place the longest.
    """
    exact = [choice.strip() for choice in choices]
    if exact.count(answer.strip()) == 1:  # words alone do not tell +5 from -5
        return exact.index(answer.strip())
    text = f" {normalised(answer)} "
    names = [normalised(choice) for choice in choices]
    letters = [letter(i, len(choices)) for i in range(len(choices))]
    whole = [f" {a} {name} " if a else "" for a, name in zip(letters, names, strict=True)]
    for candidates in (
        whole,
        [f" {name} " if name else "" for name in names],
        [f" {a} " if a else "" for a in letters],
    ):
        found = [(text.find(c), -len(c), i) for i, c in enumerate(candidates) if c and c in text]
        if found:
            return min(found)[2]
    return None


def choice_match(answer: str, reference: str, choices: Sequence[str]) -> float:
    """Returns 1 if the answer names the choice of the reference (a choice's text or letter); else 0."""
    right = place_of(reference, choices)
    return float(right is not None and chosen(answer, choices) == right)


def place_of(reference: str, choices: Sequence[str]) -> int | None:
    """Returns the choice that a reference equals or names, or None."""
    alike = [i for i, choice in enumerate(choices) if normalised(choice) == normalised(reference)]
    return alike[0] if len(alike) == 1 else chosen(reference, choices)


def pooled(amounts: np.ndarray, weights: np.ndarray, form: Callable[[np.ndarray], np.ndarray] = np.asarray) -> float:
    """Returns form(sum of amounts / sum of weights), both [n]. Perplexity: amounts NLL, weights tokens, form exp."""
    return float(form(np.asarray(amounts.sum() / weights.sum())))


LEAST = 5  # with fewer samples there is no interval, because they say too little about other samples
SHARE = 0.95  # share of intervals that hold the true value


def paired_interval(
    amounts: np.ndarray,
    weights: np.ndarray,
    base: np.ndarray,
    form: Callable[[np.ndarray], np.ndarray] = np.asarray,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Returns a bootstrap interval of pooled(amounts) - pooled(base). Whole samples are drawn, the same for both.

    amounts, weights, base: [n] per sample. Returns None for fewer than LEAST samples. The quantiles lie further out
    than plain percentiles, by as much as Student's interval is wider than the normal one (Hesterberg 2015, sec. 5.2).
    """
    n = len(amounts)
    if n < LEAST:
        return None
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=REPEATS).astype(np.float64)
    total = draws @ weights
    differences = form(draws @ amounts / total) - form(draws @ base / total)
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student(n - 1))
    low, high = np.quantile(differences, [tail, 1 - tail])
    return float(low), float(high)


def score_interval(scores: np.ndarray, base: np.ndarray) -> tuple[float, float] | None:
    """Returns the interval of the mean difference of scores in 0..1, [n] of the same samples; None below LEAST.

    Two made-up samples are added: their differences have mean 0 and add 1 to the sum of squares (Agresti & Min 2005,
    for matched pairs). Without them, 20 equal answers of two methods would promise an equal 21st answer.
    """
    n = len(scores)
    if n < LEAST:
        return None
    differences, total = scores - base, n + 2
    mean = float(differences.sum()) / total
    spread = (float((differences**2).sum()) + 1) / total - mean**2
    half = student(n - 1) * math.sqrt(spread / total)
    return max(mean - half, -1.0), min(mean + half, 1.0)


@functools.cache
def student(freedom: int, share: float = SHARE) -> float:
    """Returns the two-sided quantile of Student's t for `share`, from 4 degrees of freedom, by numeric integration."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    t = np.arange(0.0, 30.0, 0.001)
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(t**2 / freedom))
    mass = np.cumsum((density[1:] + density[:-1]) / 2) * 0.001
    return float(np.interp(share / 2, mass, t[1:]))
