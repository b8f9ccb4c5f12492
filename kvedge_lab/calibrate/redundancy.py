"""KV heads are redundant as a prompt's keys in a head are alike (MixKV, eq. 4), averaged over prompts.

MixKV (Liu et al. 2025, arXiv:2510.20707) weighs importance and diversity of a head by it. The paper computes it for
each prompt; the released code, and the rows marked offline in table 4, take such a mean.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import numpy as np

from kvedge_lab.calibrate.samples import Labelled
from kvedge_lab.inspect.measures import head_redundancy
from pykvedge.chat.session import Session
from pykvedge.library import libkvedge
from pykvedge.models.model import Progress, silent
from pykvedge.runtime.interrupt import stop_if_set


def key_redundancy(
    session: Session,
    samples: Iterable[Labelled],
    count: int,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
) -> tuple[np.ndarray, int]:
    """Returns [layers of the model, Hkv] in [0, 1], the mean redundancy of KV heads, and the number of samples.

    session: of the full plan, in which nothing is dropped. Layers that kvedge does not store have 0, and so has the end
    of rows of layers with fewer KV heads. Raises NothingToCompressError, CancelledError, UsageError.
    """
    total, used = np.zeros((session.model.n_layer, 0)), 0
    for number, sample in enumerate(itertools.islice(samples, count)):
        progress("reading the keys", number / count)
        found = _of_sample(session, sample, cancel)
        total = found if used == 0 else total + found
        used += 1
    return total / max(used, 1), used


def _of_sample(session: Session, sample: Labelled, cancel: threading.Event | None) -> np.ndarray:
    found: list[np.ndarray] = []

    def look(cache: libkvedge.Cache, _: object) -> None:
        stop_if_set(cancel)
        heads = [libkvedge.shape(cache, layer)[1] for layer in range(cache.stats().n_layers)]
        found.append(np.zeros((session.model.n_layer, max(heads))))
        for layer, n_heads_kv in enumerate(heads):
            keys = np.stack([libkvedge.rows(cache, layer, head)[0] for head in range(n_heads_kv)])
            found[0][cache.layer_id(layer), :n_heads_kv] = head_redundancy(keys)

    session.examine(sample.question, sample.pictures, session.plan, look)
    return found[0]
