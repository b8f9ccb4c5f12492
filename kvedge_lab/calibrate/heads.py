"""Scores query heads by how often a head looks at the source of the next token, and KV heads by their keys.

Visual heads (SparseMM, Wang et al. 2025, section 3.1): for a generated token that belongs to exactly one labelled box,
a query head gets 1 / (tokens of the box) if its most attended token lies in the box. Scores are summed over a sample's
tokens and averaged over samples. Retrieval heads (HeadKV, Fu et al. 2024, section 3.1): a head gets its attention to
those source tokens that are among its k most attended tokens; k is the number of source tokens. Scores are averaged
over a sample's generated tokens, and over samples. The source is a box, or a needle in the text.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvedge_lab.calibrate.places import boxes_of_tokens, tokens_of_boxes, tokens_of_needle
from kvedge_lab.calibrate.samples import Labelled
from kvedge_lab.inspect.measures import head_redundancy
from pykvedge.chat.session import Session
from pykvedge.errors import KvedgeError, NothingToCompressError, UsageError
from pykvedge.library import libkvedge
from pykvedge.models.model import Progress, silent
from pykvedge.models.vision import Piece, TextPiece
from pykvedge.runtime.interrupt import stop_if_set
from pykvedge.runtime.sampler import Sampler
from pykvedge.runtime.sampling import Sampling

LONGEST_ANSWER = 160  # tokens


@dataclass
class Scores:
    """The scores of heads. values: [layers of the model, H]."""

    values: np.ndarray
    samples: int  # samples with a labelled token
    tokens: int  # labelled tokens


def visual_credit(attention: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Returns scores [L, H] from attention [L, H, n] of one generated token, and the tokens of its box."""
    return np.isin(attention.argmax(axis=-1), source) / len(source)


def retrieval_credit(attention: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Returns scores [L, H] from attention [L, H, n] of one generated token, and the tokens of its source."""
    k = min(len(source), attention.shape[-1])
    top = np.argpartition(-attention, k - 1, axis=-1)[..., :k]
    weights = np.take_along_axis(attention, top, axis=-1)
    return np.where(np.isin(top, source), weights, 0).sum(axis=-1)


CREDIT = {"visual-heads": visual_credit, "retrieval-heads": retrieval_credit}


def _alone(pieces: list[Piece]) -> tuple[list[Piece], int]:
    """Splits the prompt before its last token, so the attention of this token can be watched."""
    last = pieces[-1]
    if not isinstance(last, TextPiece) or not last.tokens:
        raise UsageError(
            "the prompt must end in text, but the model's chat template ends in an image; use another model"
        )
    rest: list[Piece] = [*pieces[:-1]]
    if last.tokens[:-1]:
        rest.append(TextPiece(last.tokens[:-1]))
    return rest, last.tokens[-1]


class HeadScorer:
    """Runs samples in a session and adds up the scores of each head."""

    def __init__(self, session: Session, kind: str) -> None:
        """session: has the full plan, so nothing is dropped. kind: visual-heads or retrieval-heads."""
        self._session, self._credit, self._summed = session, CREDIT[kind], kind == "visual-heads"
        self._total: np.ndarray | None = None  # [stored layers, H]
        self._layers: list[int] = []  # numbers of the layers in the model
        self.samples = self.tokens = 0

    def add(self, sample: Labelled, cancel: threading.Event | None = None) -> int:
        """Runs one sample. Returns the number of labelled tokens in its answer."""
        session = self._session
        pieces = session.first_prompt(sample.question, sample.pictures)
        try:
            needle = sample.needle
            sources = [tokens_of_needle(needle, pieces, session.model)] if needle else tokens_of_boxes(sample, pieces)
            if not sources:
                raise UsageError('a sample needs "boxes" or a "needle"')
            rest, last = _alone(pieces)
            engine = session.engine
            engine.close()
            engine.make_room(pieces, session.plan)
            engine.encode(pieces, silent, cancel)
            engine.prefill(rest, silent, cancel)
            texts, deserved = self._generate(last, sources, cancel)
        finally:
            session.release(pieces)
        owners = boxes_of_tokens(texts, sample)
        found = [credit[owner] for credit, owner in zip(deserved, owners, strict=True) if owner is not None]
        if found:
            score = np.sum(found, axis=0) / (1 if self._summed else len(found))
            self._total = score if self._total is None else self._total + score
            self.samples, self.tokens = self.samples + 1, self.tokens + len(found)
        return len(found)

    def _generate(
        self, token: int, sources: list[np.ndarray], cancel: threading.Event | None
    ) -> tuple[list[bytes], list[np.ndarray]]:
        """Generates the greedy answer. Returns its texts, and per token the heads' scores [sources, L, H]."""
        session, engine = self._session, self._session.engine
        cache = engine.cache
        if cache is None:
            raise NothingToCompressError(
                f"{session.model.path.name} has no attention layer that kvedge can observe; use another model"
            )
        self._layers = cache.layer_ids()
        cache.watch(True)
        texts: list[bytes] = []
        deserved: list[np.ndarray] = []
        with Sampler(Sampling(temp=0.0), session.model) as sampler:
            while True:
                stop_if_set(cancel)
                engine.extend(token)
                token = sampler.sample(engine.context.handle)
                if session.model.is_end(token) or len(texts) == LONGEST_ANSWER or engine.context.room < 1:
                    return texts, deserved
                attention = cache.attention_of_all()
                deserved.append(np.stack([self._credit(attention, source) for source in sources]))
                texts.append(session.model.piece(token))

    def scores(self) -> Scores:
        """Returns the mean scores so far. Raises KvedgeError if no token was labelled."""
        if self._total is None or not self._total.any():
            what = "no answer contains the text of its boxes" if self._total is None else "no head looks at the boxes"
            raise KvedgeError(
                f"{what}: these samples do not distinguish the heads of {self._session.model.path.name}; give other "
                f"samples with --data"
            )
        values = np.zeros((self._session.model.n_layer, self._total.shape[1]))
        values[self._layers] = self._total / self.samples
        return Scores(values, self.samples, self.tokens)


def score_heads(
    session: Session,
    kind: str,
    samples: Iterable[Labelled],
    count: int,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
) -> Scores:
    """Returns scores from `count` samples. Raises KvedgeError, UsageError, UnsupportedError, CancelledError."""
    scorer = HeadScorer(session, kind)
    for number, sample in enumerate(itertools.islice(samples, count)):
        progress("measuring the heads", number / count)
        scorer.add(sample, cancel=cancel)
    return scorer.scores()


def key_redundancy(
    session: Session,
    samples: Iterable[Labelled],
    count: int,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
) -> tuple[np.ndarray, int]:
    """Returns the mean redundancy of KV heads, [layers of the model, Hkv] in [0, 1], and the number of samples.

    A head's redundancy is the similarity of a prompt's keys in the head (MixKV, eq. 4), averaged over prompts. MixKV
    (Liu et al. 2025, arXiv:2510.20707) weighs a head's importance and diversity by it. The paper computes it for each
    prompt; the released code, and the rows marked offline in table 4, use a mean over prompts.
    session: has the full plan, so nothing is dropped. Layers that kvedge does not store have 0, and so have missing
    KV heads of layers with fewer heads. Raises NothingToCompressError, CancelledError, UsageError.
    """
    total, used = np.zeros((session.model.n_layer, 0)), 0
    for number, sample in enumerate(itertools.islice(samples, count)):
        progress("reading the keys", number / count)
        found = _redundancy_of(session, sample, cancel)
        total = found if used == 0 else total + found
        used += 1
    return total / max(used, 1), used


def _redundancy_of(session: Session, sample: Labelled, cancel: threading.Event | None) -> np.ndarray:
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
