"""Answers and distributions get scores, and scores get intervals. This needs NumPy only.

ROUGE-L is Lin's (2004) sentence-level F1 on lower-cased words, as the rouge-score package computes it without stemmer.
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
    """Turns logits [..., n_vocab] of any float type into log-probabilities, float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """Computes KL(p || q) in nats from log-probabilities [n_vocab]. Tokens with p = 0 add nothing."""
    seen = log_p > -np.inf
    return float((np.exp(log_p[seen]) * (log_p[seen] - log_q[seen])).sum())


def words(text: str) -> list[str]:
    """Finds the lower-cased runs of letters and digits."""
    return _WORD.findall(text.lower())


def normalised(text: str) -> str:
    """Joins the words by one space: case, punctuation and white space do not count."""
    return " ".join(words(text))


def rouge_l(answer: str, reference: str) -> float:
    """Computes ROUGE-L F1 in 0..1; it is 0 where one of the two has no words."""
    a, b = words(answer), words(reference)
    if not a or not b:
        return 0.0
    common = _common_subsequence(a, b)
    return 2 * common / (len(a) + len(b))


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Finds the length of the longest common subsequence. A row of the table is one integer (Hyyrö 2004)."""
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
    """Gives 1 if both are the same but for white space around them."""
    return float(answer.strip() == reference.strip())


def contains(answer: str, reference: str) -> float:
    """Gives 1 if the words of the reference stand in the answer, in a row."""
    return float(bool(words(reference)) and f" {normalised(reference)} " in f" {normalised(answer)} ")


def letter(i: int, n_choices: int) -> str:
    """Names the letter of choice i; it is empty where there are more choices than letters (MileBench's GPR1200)."""
    return chr(ord("a") + i) if n_choices <= 26 else ""


def chosen(answer: str, choices: Sequence[str]) -> int | None:
    """Finds the choice that an answer names: it is that choice, or has letter and text, its text, or a bare letter.

    None: none. Of several the one named first, and of those at the same place the longest.
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
    """Gives 1 if the answer names the choice of the reference, which is a choice's text, or its letter."""
    right = place_of(reference, choices)
    return float(right is not None and chosen(answer, choices) == right)


def place_of(reference: str, choices: Sequence[str]) -> int | None:
    """Finds the choice that a reference is, or names. None: none."""
    alike = [i for i, choice in enumerate(choices) if normalised(choice) == normalised(reference)]
    return alike[0] if len(alike) == 1 else chosen(reference, choices)


def pooled(amounts: np.ndarray, weights: np.ndarray, form: Callable[[np.ndarray], np.ndarray] = np.asarray) -> float:
    """Computes form(sum of amounts / sum of weights), both [n]. Perplexity: amounts NLL, weights tokens, form exp."""
    return float(form(np.asarray(amounts.sum() / weights.sum())))


LEAST = 5  # samples below which no interval is told: what was drawn says too little about what was not
SHARE = 0.95  # how often an interval holds the true value


def paired_interval(
    amounts: np.ndarray,
    weights: np.ndarray,
    base: np.ndarray,
    form: Callable[[np.ndarray], np.ndarray] = np.asarray,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Bootstraps the interval of pooled(amounts) - pooled(base): whole samples are drawn, the same for both.

    amounts, weights, base: [n] per sample. None of fewer than LEAST samples. The quantiles lie further out than the
    plain percentile's, by as much as Student's interval is wider than the normal one (Hesterberg 2015, section 5.2).
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
    """Finds the interval of the mean difference of scores in 0..1, [n] of the same samples. None below LEAST.

    Two made-up samples that changed, one each way by a half, and one that did not go with the real ones (Agresti & Min
    2005, for matched pairs): of 20 answers that are all alike in two methods nobody knows that the 21st is.
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
    """Finds the two-sided quantile of Student's t for `share`, from 4 degrees of freedom, by summing its density."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    t = np.arange(0.0, 30.0, 0.001)
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(t**2 / freedom))
    mass = np.cumsum((density[1:] + density[:-1]) / 2) * 0.001
    return float(np.interp(share / 2, mass, t[1:]))
