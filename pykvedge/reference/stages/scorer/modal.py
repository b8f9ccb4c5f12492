"""Modal: image tokens and text tokens are scored by different terms; the end of the text stays.

This project's own method. It uses the mixture of MixKV (Liu et al. 2025, arXiv:2510.20707), with these differences:

Votes. A vote is attention from one of the last `window` queries, without the attention of a token to itself: no later
token uses that query. A token inside the window receives votes from later queries only, and its sum of votes is divided
by their number. Otherwise the last tokens would count too little (few queries see them) or too much (each attends to
itself). A query weighs e^-fade times the next query, because the first queries of the answer resemble the last queries
of the prompt. The divisor, the sum of the weights, is at least 1.

Kinds. A softmax gives each token of a large image little attention, and each token of a short question much. Value
norms and diversity are therefore scaled among all image tokens alone, also inside the window. Text tokens are scored by
votes. Without images, all tokens are scored as image tokens are.

Outliers. Votes come from the last queries: those of an image's last rows or of an answer, not of a later question.
FlashCache's score (Yang et al. 2025, arXiv:2511.16786, eq. 10) needs no query: the distance of keys and values from a
smooth curve through their neighbours, here among image tokens alone. The score is added to the mixture of the image
tokens, scaled to a mean of `outlier` times the mean of the mixture.

The end. The words of a question can matter to the answer although no query of the prompt looks at them. One in `parts`
kept tokens therefore comes from the end of the text: tokens after the last image, the last token first, at most
`window` tokens. Their scores are raised far enough, so one ranking serves every budget.

Between images. A line end or a word between two images tells later questions which image is which, and no query of the
prompt needs it. One in `text` kept tokens is therefore text, wherever it stands, the last text token first.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.scorer.mixkv import minmax01, mixed, scaled_to
from pykvedge.reference.stages.spectrum import deviation, outliers
from pykvedge.reference.stages.window import pool, window_weights

MIXTURE = {"value": "vnorm", "scale": "imp", "mode": "headwise"}  # MixKV's defaults


def faded_votes(q: np.ndarray, k: np.ndarray, window: int, fade: float, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns the mean attention that each token receives from later queries in the last `window` queries: [T] float64.

    q: [n, d] the last n queries of one query head; k: [T, d] of its KV head; bias: [T] added to its logits.
    """
    weights = window_weights(q, k, window, bias)
    rows, n_tokens = weights.shape
    later = np.arange(n_tokens - rows, n_tokens)[:, None] > np.arange(n_tokens)[None, :]  # the query is after the token
    say = np.exp(-fade * np.arange(rows)[::-1])[:, None] * later
    return (say * weights).sum(axis=0) / np.maximum(say.sum(axis=0), 1.0)


def votes(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: faded votes, averaged over the query heads of a KV head."""
    n_heads_kv, n_tokens, _ = layer.k.shape
    group = layer.q.shape[0] // n_heads_kv
    bias = np.zeros(layer.k.shape[:2]) if layer.bias is None else layer.bias
    each = [
        faded_votes(q, layer.k[h // group], settings["window"], settings["fade"], bias[h // group])
        for h, q in enumerate(layer.q)
    ]
    return np.stack(each).reshape(n_heads_kv, group, n_tokens).mean(axis=1)


def raised(scores: np.ndarray, tokens: np.ndarray, parts: int) -> np.ndarray:
    """Raises scores [T]: for every a, at most a * (parts - 1) tokens outside tokens[:a] rank above tokens[a - 1].

    tokens: different token indices, the last token of the text first.
    """
    out = scores.copy()
    if not np.isfinite(out).all():
        return out  # NaN and infinity cannot be ranked
    for a in range(1, len(tokens) + 1):
        above = a * (parts - 1)
        others = np.sort(np.delete(scores, tokens[:a]))[::-1]
        if above < len(others):
            out[tokens[a - 1]] = max(out[tokens[a - 1]], (others[above - 1] + others[above]) / 2)
    return out


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64."""
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
    """Returns [Hkv] float64: distance of image tokens' values from a smooth curve, RMS over channels, mean over tokens.
    Returns None without images, or if `outlier` is 0."""
    image = layer.image_mask
    if not image.any() or settings["outlier"] == 0:
        return None
    return np.sqrt((deviation(layer.v[:, image], settings["gamma"]) ** 2).mean(axis=-1)).mean(axis=-1)


SUMMARY = (
    "attention of the last queries; for image tokens also value norms, diversity and outliers; keeps the end "
    "of the text"
)
SOURCE = "this project, with MixKV's mixture and FlashCache's outliers"
attention = votes
