"""Match: kept rows get values and biases that give the prompt's queries the attention output of all rows.

Attention Matching (Zweiger et al. 2026, arXiv:2602.16284), section 3, with the keys that the scorer chose. Per KV
head: T rows are not protected, t of them stay, and n reference queries come from all query heads of the group:

    z_it = q_i . k_t / sqrt(d) + b_t,   m_i = max_t z_it,   y_i = sum_t e^(z_it - m_i),   Y = softmax(z) V
    M = e^(z - m) of the kept rows;  w = argmin |M w - y|^2 with e^-3 <= w <= e^3       the attention's mass
    X = softmax(z_kept + ln w);      C = argmin |X C - Y|^2 + ridge |X|_2^2 |C - V_kept|^2   its output

The rows become (k, C, b + ln w); b is 0 except for rows that had biases before. The mass of a row matters if the row
shares a softmax with rows outside this fit: protected rows, other rows of the cache, and future tokens. `bias` = head
uses one weight for all rows, the median of y_i / sum_j M_ij in the same box. `bias` = none leaves w = 1. `mass` =
relative divides the rows of M and y by y_i: a query that looks at many rows then counts as much as other queries.

The released code clamps an unbounded least-squares solution to the box and takes two gradient steps. This leaves up to
49 times the smallest residual. It has no ridge, so values become hundreds of times larger than any original value.
Here w comes from cyclic coordinate descent on M'M in the box, started from the one weight that is best for all rows:
at most 20 sweeps, until no sweep changes a weight by more than 1e-3 of the weight. More sweeps only change biases that
hardly any query uses, and no answer. The ridge keeps values near the original ones if queries do not determine them.

The paper obtains queries by asking the model about its context, or by letting the model repeat the context. Here the
queries are the prompt's queries, each against all rows, earlier and later (the paper's cheapest kind). They are stored
in half precision until the end of the prompt. max(queries * t, 512) queries are used: half of them from the last
tokens, which resemble the queries of an answer, the others from evenly spread earlier tokens.

With fewer queries than kept rows, or if values exceed the range of half precision, the head is evicted as by `evict`.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import softmax
from pykvedge.reference.stages.base import Head, Settings

FEWEST = 512
BOX = (float(np.exp(-3.0)), float(np.exp(3.0)))
SWEEPS = 20
STILL = 1e-3
TINY = 1e-30
LARGEST = 6e4


def reference_queries(q: np.ndarray, wanted: int) -> np.ndarray:
    """Returns `wanted` or more queries of q [g, n, d], if available, as halves: [g * m, d]. Half are the last."""
    group, n_tokens, size = q.shape
    count = min(n_tokens, -(-wanted // group))
    last = count // 2
    spread = (2 * np.arange(count - last) + 1) * (n_tokens - last) // (2 * (count - last))
    tokens = np.concatenate([spread, np.arange(n_tokens - last, n_tokens)])
    with np.errstate(over="ignore"):
        halves = (q * (np.float32(1) / np.sqrt(np.float32(size)))).astype(np.float16)
    return halves[:, tokens].reshape(-1, size).astype(np.float64)


def weights_in_box(m: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns argmin |m w - y|^2 with every weight in BOX, by coordinate descent. m [n, t], y [n] -> [t]."""
    gram, right = m.T @ m, m.T @ y
    across = gram.sum()
    w = np.full(len(right), np.clip(right.sum() / across, *BOX) if across > 0 else 1.0)
    for _ in range(SWEEPS):
        before = w.copy()
        for j, own in enumerate(np.diag(gram)):
            best = w[j] - (gram[j] @ w - right[j]) / own if own > 0 else BOX[0]
            w[j] = min(max(best, BOX[0]), BOX[1])
        if (np.abs(w - before) <= STILL * w).all():
            break
    return w


def weights(logits: np.ndarray, kept: np.ndarray, settings: Settings) -> np.ndarray:
    """Returns [t]: the factor of each kept row in the softmax. logits [n, T]."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    m, y = exponentials[:, kept], exponentials.sum(axis=1)
    if settings["bias"] == "none":
        return np.ones(len(kept))
    if settings["bias"] == "head":
        return np.full(len(kept), np.clip(np.median(y / np.maximum(m.sum(axis=1), TINY)), *BOX))
    return weights_in_box(m / y[:, None], np.ones_like(y)) if settings["mass"] == "relative" else weights_in_box(m, y)


def ridge_values(x: np.ndarray, outputs: np.ndarray, own: np.ndarray, ridge: float) -> np.ndarray:
    """Returns argmin |x c - outputs|^2 + ridge |x|_2^2 |c - own|^2. x [n, t], outputs [n, d], own [t, d] -> [t, d]."""
    penalty = ridge * np.linalg.norm(x, 2) ** 2
    return np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ outputs + penalty * own)


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Returns kept keys and fitted values, [n, d] float64 each; unless bias = none also biases [n]."""
    k, v = head.k.astype(np.float64), head.v.astype(np.float64)
    before = np.zeros(len(k)) if head.bias is None else head.bias.astype(np.float64)
    rows, fitted = np.flatnonzero(~head.protected), ~head.protected[head.kept]
    values, biases, t = v[head.kept], before[head.kept], int(fitted.sum())
    plain = (k[head.kept], values) if settings["bias"] == "none" else (k[head.kept], values, biases)
    if t in (0, len(rows)) or head.q is None:
        return plain
    q = reference_queries(head.q, max(FEWEST, settings["queries"] * t))
    if len(q) < t or not np.isfinite(q).all():
        return plain
    kept = np.searchsorted(rows, head.kept[fitted])
    logits = q @ k[rows].T + before[rows]
    w = weights(logits, kept, settings)
    x = softmax(logits[:, kept] + np.log(w))
    fit = ridge_values(x, softmax(logits) @ v[rows], values[fitted], settings["ridge"])
    if np.abs(fit).max() > LARGEST:
        return plain
    values[fitted] = fit
    biases[fitted] += np.log(w)
    return plain


SUMMARY = "fit biases and values of kept pairs, so that the prompt's queries get the same attention output"
SOURCE = "Zweiger et al. 2026, section 3"
