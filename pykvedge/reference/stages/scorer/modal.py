"""Modal: image tokens and text tokens each by what tells among their kind; the end of the text stays.

This project's own. Three things are unlike MixKV (Liu et al. 2025, arXiv:2510.20707), whose mixture it uses:

Votes. Attention of the last `window` queries, without what a token pays to itself: no token that comes will see
through that query. A token inside the window is judged by the queries behind it alone, and the sum is divided by how
many they are; else the last tokens count for little, as few saw them, or for much, as all look at themselves. A query
counts e^-fade of the one behind it, since the answer's first queries are most like the last ones. What counts together
for less than one query counts as one.

Kinds. A softmax gives an image of hundreds of tokens little for each of them, and a question of ten much. So value
norms and diversity are scaled among image tokens alone, all of them, also those within the window; text is judged by
its votes. Without images all tokens are one kind, and mixed.

Outliers. Votes say what the last queries look at: those of an image's last rows, or of an answer, not of a question
that is yet to come. FlashCache's score (Yang et al. 2025, arXiv:2511.16786, eq. 10) asks no query: how far keys and
values are from a smooth curve through their neighbours, here of image tokens alone. It is added to their mixture, with
a mean that is `outlier` times the mixture's own.

The end. A question's words may matter to the answer alone, and no query of the prompt's looks at them. So of however
many tokens that stay, one in `parts` is the end of the text: what is behind the last image, the last token first, at
most `window` of them. They are raised to the scores where that is so, which makes one ranking of it for any budget.

Between images. What stands between two images, a line end or a word, tells later questions which image is which, and
no query of the prompt's needs it. So one in `text` of those that stay is text wherever it stands, the last of it first.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.scorer.mixkv import minmax01, mixed, scaled_to
from pykvedge.reference.stages.spectrum import deviation, outliers
from pykvedge.reference.stages.window import pool, window_weights

MIXTURE = {"value": "vnorm", "scale": "imp", "mode": "headwise"}  # MixKV's defaults


def faded_votes(q: np.ndarray, k: np.ndarray, window: int, fade: float, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Attention that each token receives from the later ones of the last `window` queries, a query. [T] float64.

    q: [n, d] the last n queries of one query head; k: [T, d] of its KV head; bias: [T] of its logits.
    """
    weights = window_weights(q, k, window, bias)
    rows, n_tokens = weights.shape
    later = np.arange(n_tokens - rows, n_tokens)[:, None] > np.arange(n_tokens)[None, :]  # the query than the token
    say = np.exp(-fade * np.arange(rows)[::-1])[:, None] * later
    return (say * weights).sum(axis=0) / np.maximum(say.sum(axis=0), 1.0)


def votes(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: mean over the query heads of a KV head."""
    n_heads_kv, n_tokens, _ = layer.k.shape
    group = layer.q.shape[0] // n_heads_kv
    bias = np.zeros(layer.k.shape[:2]) if layer.bias is None else layer.bias
    each = [
        faded_votes(q, layer.k[h // group], settings["window"], settings["fade"], bias[h // group])
        for h, q in enumerate(layer.q)
    ]
    return np.stack(each).reshape(n_heads_kv, group, n_tokens).mean(axis=1)


def raised(scores: np.ndarray, tokens: np.ndarray, parts: int) -> np.ndarray:
    """scores [T] in which tokens[a - 1] has at most a * (parts - 1) above it of those that are not among the first a.

    tokens: different ones, the last of the text first.
    """
    out = scores.copy()
    if not np.isfinite(out).all():
        return out  # rows that are no numbers have no ranks
    for a in range(1, len(tokens) + 1):
        above = a * (parts - 1)
        others = np.sort(np.delete(scores, tokens[:a]))[::-1]
        if above < len(others):
            out[tokens[a - 1]] = max(out[tokens[a - 1]], (others[above - 1] + others[above]) / 2)
    return out


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64."""
    out, image = votes(layer, settings), layer.image_mask
    kind = np.flatnonzero(image) if image.any() else np.arange(len(image))
    behind = len(image) - 1 - int(kind[-1]) if image.any() else len(image)
    text = np.flatnonzero(~image)[::-1]
    weight = settings["outlier"] if image.any() else 0.0
    for h, row in enumerate(out):
        k, v = layer.k[h][kind], layer.v[h][kind]
        mixture = mixed(pool(row[kind], settings["kernel"], "avg"), k, v, MIXTURE)
        if weight > 0:
            mixture += scaled_to(minmax01(outliers(k, v, settings["gamma"])), weight * mixture.mean())
        row[kind] = mixture
        end = raised(row, text[: min(behind, settings["window"])], settings["parts"])
        row[:] = np.maximum(end, raised(row, text, settings["text"])) if image.any() else end
    return out


def variation(layer: Layer, settings: Settings) -> np.ndarray | None:
    """[Hkv] float64: how far image tokens' values are from the curve through them, root mean square of the channels and
    mean of the tokens. None without images, or where outliers count for nothing."""
    image = layer.image_mask
    if not image.any() or settings["outlier"] == 0:
        return None
    return np.sqrt((deviation(layer.v[:, image], settings["gamma"]) ** 2).mean(axis=-1)).mean(axis=-1)


SUMMARY = "votes of the last queries; of image tokens value norms, diversity and outliers too; the text's end stays"
SOURCE = "this project, with MixKV's mixture and FlashCache's outliers"
attention = votes
