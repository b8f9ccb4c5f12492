"""A method of three own stages: what a question asks of the pictures, more of it in later layers, neighbours averaged.

kvedge chat --plugin examples/plugins/pictures.py --method pictures --set scorer.window=8 ...
kvedge chat --plugin examples/plugins/pictures.py --method snapkv --allocator rising ...
"""

import numpy as np

import pykvedge


@pykvedge.scorer(
    "asked",
    params=[pykvedge.Param("window", 16, "last queries that vote", low=1, high=256)],
    queries=lambda settings: settings["window"],
    column_sums=True,
)
def asked(layer, settings):
    """what the last queries look at, and attention overall to break ties"""
    n_heads_kv, n_tokens, d = layer.k.shape
    q = layer.q.reshape(n_heads_kv, -1, d)  # the query heads of a KV head lie side by side
    logits = q @ layer.k.swapaxes(1, 2) / np.sqrt(d)
    seen = np.exp(logits - logits.max(axis=-1, keepdims=True))
    seen /= seen.sum(axis=-1, keepdims=True)
    return seen.mean(axis=1) + 1e-3 * layer.column_sums / n_tokens


@pykvedge.allocator("rising")
def rising(prompt, settings):
    """from two thirds of the even share in the first layer to four thirds in the last"""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    step = min(prompt.budget - 1, n_tokens - prompt.budget) // 3
    counts = prompt.budget + np.linspace(-step, step, n_layers).round().astype(int)
    counts[-1] += n_layers * prompt.budget - counts.sum()  # rounding
    return np.repeat(counts[:, None], n_heads_kv, axis=1)


@pykvedge.reducer("blend")
def blend(head, settings):
    """a kept value takes on a tenth of the mean of what was dropped"""
    dropped = np.delete(np.arange(len(head.v)), head.kept)
    return head.k[head.kept], 0.9 * head.v[head.kept] + 0.1 * head.v[dropped].mean(axis=0)


pykvedge.preset("pictures", scorer="asked", allocator="rising", reducer="blend", summary="stages of an example")
