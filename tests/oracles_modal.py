"""A second implementation of the scorer modal, in plain loops."""

import math

import oracles


def votes(q, k, window, fade):
    """Returns the mean attention of the window's queries to earlier tokens; later queries count more."""
    n_tokens, size = len(k), len(k[0])
    paid, say = [0.0] * n_tokens, [0.0] * n_tokens
    for m in range(max(0, n_tokens - window), n_tokens):
        logits = [sum(a * b for a, b in zip(q[m], k[n], strict=True)) / math.sqrt(size) for n in range(m + 1)]
        weights = [math.exp(x) for x in logits]
        for n in range(m):
            paid[n] += math.exp(-fade * (n_tokens - 1 - m)) * weights[n] / sum(weights)
            say[n] += math.exp(-fade * (n_tokens - 1 - m))
    return [p / max(s, 1) for p, s in zip(paid, say, strict=True)]


def modal(q, k, v, image, settings):
    """Returns the scores of scorer modal for one KV head. q: its query heads; image: whether tokens are an image's."""
    of_heads = [votes(head, k, settings["window"], settings["fade"]) for head in q]
    out = [oracles.mean(x) for x in zip(*of_heads, strict=True)]
    kind = [t for t in range(len(k)) if image[t]] or list(range(len(k)))
    seen = oracles.pooled([out[t] for t in kind], settings["kernel"], "avg")
    lengths = oracles.scaled(oracles.minmax01([math.sqrt(sum(c * c for c in v[t])) for t in kind]), seen)
    s_imp = [a + b for a, b in zip(seen, lengths, strict=True)]
    away = [-oracles.mean([oracles._cosine(k[i], k[j]) for j in kind]) for i in kind]
    r = oracles.redundancy([k[t] for t in kind])
    s_div = oracles.scaled(oracles.minmax01(away), s_imp)
    mixture = [(1 - r) * a + r * b for a, b in zip(s_imp, s_div, strict=True)]
    low = max(1, math.floor(settings["gamma"] * len(kind)))
    far = oracles.deviation([k[t] for t in kind], [v[t] for t in kind], low)
    far = oracles.scaled(oracles.minmax01(far), mixture)
    weight = settings["outlier"] if any(image) else 0
    for t, a, b in zip(kind, mixture, far, strict=True):
        out[t] = a + weight * b
    own = list(out)
    end = [t for t in range(max(0, len(k) - settings["window"]), len(k)) if not any(image[t:])]
    raise_each(out, own, end, settings["parts"])
    if any(image):
        raise_each(out, own, [t for t in range(len(k)) if not image[t]], settings["text"])
    return out


def raise_each(out, own, chosen, parts):
    """Raises the score of chosen[-a], for each a from 1 on, to a rank among the first a * parts scores."""
    for a in range(1, len(chosen) + 1):
        last = chosen[-a:]
        others = sorted((x for t, x in enumerate(own) if t not in last), reverse=True)
        n = a * (parts - 1)
        if n < len(others):
            out[last[0]] = max(out[last[0]], (others[n - 1] + others[n]) / 2)
