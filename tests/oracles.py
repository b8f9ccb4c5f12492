"""Second opinions: the papers' equations once more, in loops over single numbers, sharing no code with the package."""

from __future__ import annotations

import math


def column_sums(q, k):
    """Attention that each token receives: q, k are lists of T vectors of one query head and its KV head."""
    size = len(k[0])
    total = [0.0] * len(k)
    for m, query in enumerate(q):
        logits = [sum(a * b for a, b in zip(query, k[n], strict=True)) / math.sqrt(size) for n in range(m + 1)]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        for n, w in enumerate(weights):
            total[n] += w / sum(weights)
    return total


def budget(n_tokens, ratio):
    """floor(n_tokens * ratio), at least one, by exact decimals."""
    from fractions import Fraction

    return max(1, math.floor(n_tokens * Fraction(str(ratio))))


def heavy_hitters(scores, n, recent):
    """H2O: the last `recent` tokens, and of the rest those with the largest scores."""
    n_tokens = len(scores)
    window = set(range(n_tokens - recent, n_tokens))
    rest = sorted((-scores[i], i) for i in range(n_tokens - recent))
    return sorted(window | {i for _, i in rest[: n - recent]})


def text_prior(scores, image, n, recent):
    """LOOK-M, eq. 5 and 8: every text token gains the largest score of the head, then as H2O."""
    top = max(scores)
    return heavy_hitters([s if i else s + top for s, i in zip(scores, image, strict=True)], n, recent)


def streaming(n_tokens, n, sinks):
    """StreamingLLM: the first tokens and the last ones."""
    sinks = min(sinks, n)
    return sorted({*range(sinks), *range(n_tokens - (n - sinks), n_tokens)})


def _cosine(a, b):
    norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else -math.inf


def merge(k, v, kept, kind):
    """LOOK-M, eq. 9 to 12, one evicted token after the other. Returns rows of keys, rows of values."""
    evicted = [i for i in range(len(k)) if i not in set(kept)]
    groups = {j: [] for j in kept}
    for i in evicted:
        similarity = [_cosine(k[i], k[j]) for j in kept]
        best = max(similarity)
        if best > -math.inf:
            j = kept[similarity.index(best)]
            groups[j].append((i, best))
    out_k, out_v = [], []
    for j in kept:
        for rows, out in ((k, out_k), (v, out_v)):
            total = list(rows[j])
            for i, w in groups[j]:
                for c in range(len(total)):
                    x, pivot = rows[i][c], rows[j][c]
                    total[c] += {"averaged": x, "pivotal": (x + pivot) / 2, "weighted": w * x}[kind]
            out.append([x / (len(groups[j]) + 1) for x in total])
    return out_k, out_v
