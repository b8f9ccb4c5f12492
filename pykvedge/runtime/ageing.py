"""Ages the images of a conversation: an unused image keeps fewer KV pairs after each message, a used image returns."""

from __future__ import annotations

import math
import numbers

import numpy as np

from pykvedge.errors import BudgetError, UsageError
from pykvedge.library import libkvedge
from pykvedge.library.libkvedge import Cache
from pykvedge.plans.amounts import LARGEST_COUNT, Amount
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugins import table
from pykvedge.plans.registry import scorer
from pykvedge.runtime.sequence import Sequence
from pykvedge.runtime.snapshot import ImageSpan
from pykvedge.system.guard import undoing

_BEST = 8  # the interest in an image is the mean of its 8 highest scores: most tokens of an image say nothing
_NEAR = 0.75  # a message asks about an image whose interest reaches this share of the highest one
_FREE = -1  # no limit
_MAX_WINDOW = 32  # at most so many last tokens of a message tell which images the message asks about


def check_age(plan: Plan) -> None:
    """Raises UsageError for a plan under which images cannot age: the plan drops rows of answers, so no image can
    return, or its scorer ignores the last queries, which tell what a message asks about.
    """
    if plan.drops:
        raise UsageError(
            f"--age does not work with decode policy '{plan.decode}', which drops KV pairs of the answer; use "
            f"--decode keep-all, or omit --age"
        )
    own, settings = table.get("scorer", plan.scorer), plan.settings("scorer")
    window = "window" in settings and scorer(plan.scorer).whole_up_to(settings) > 0
    if not (own.queries(settings) if own is not None else window):
        raise UsageError(
            f"--age does not work with scorer '{plan.scorer}', which does not use the last queries of a message; use "
            f"a method with a window scorer, such as kvedge or snapkv, or omit --age"
        )


class Ages:
    """Limits the KV pairs that each image of a sequence keeps."""

    def __init__(self, sequence: Sequence, cache: Cache, factor: float) -> None:
        """factor: an image keeps this share of its KV pairs after a message that does not ask about it; 0: all."""
        self._sequence, self._cache, self._factor = sequence, cache, factor
        self._known = 0  # number of images before the last message
        self._interest: list[float] = []  # interest of the last message in each image

    def __len__(self) -> int:
        return len(self._sequence.images)

    def limit(self, image: int, budget: float | int | None) -> None:
        """Limits the KV pairs per KV head of an image, and chooses rows again. Reads no token.

        image: from 1 on. budget: a number of KV pairs, or a share of the image's tokens; None: no limit beside the
        plan's. Raises UsageError, BudgetError, StateError."""
        images = self._sequence.images
        if isinstance(image, bool) or not isinstance(image, numbers.Integral) or not 1 <= image <= len(images):
            raise UsageError(
                f"image {image!r:.20} does not exist: the conversation has {len(images)} images, counted from 1"
            )
        before = images[image - 1]
        self._sequence.limit_image(image - 1, _pairs(budget, before.last - before.first), budget is not None)
        with undoing(lambda: self._sequence.limit_image(image - 1, before.limit, before.fixed)):
            self._cache.choose_again(self._sequence.number)

    def free(self) -> None:
        """Lifts the limits of ageing images before a message is read: the message may ask about any image."""
        self._known = len(self)
        for i, image in enumerate(self._sequence.images):
            if self._factor and not image.fixed and image.limit != _FREE:
                self._sequence.limit_image(i, _FREE, fixed=False)

    def listen(self) -> None:
        """Measures the interest of the last message in each image, before rows are chosen.

        Scores all tokens by the attention of the message's last tokens (scorer window). Per layer, the interest is the
        mean of the image's highest scores, relative to the best image.
        """
        images, known = self._sequence.images, min(self._known, len(self))
        self._interest = []
        stats = self._cache.stats(self._sequence.number)
        if not self._factor or not known or stats.n_pending < stats.n_tokens:  # some whole rows are gone
            return
        shares = []
        for scores in self._scores():
            best = [np.sort(scores[:, image.first : image.last], axis=1)[:, -_BEST:].mean() for image in images]
            shares.append(np.array(best) / max(*best, np.finfo(np.float32).tiny))
        self._interest = np.mean(shares, axis=0).tolist()
        self._interest[known:] = [max(self._interest)] * (len(images) - known)  # the message itself shows these images

    def _scores(self) -> list[np.ndarray]:
        """Returns [layer][Hkv, T] float32: the score of every token."""
        cache, number = self._cache, self._sequence.number
        layers = range(cache.stats(number).n_layers)
        window = min(max(self._sequence.n_question, 1), _MAX_WINDOW)
        cache.set_sequence_plan(number, make_plan("snapkv", 0.5, **{"scorer.window": window}))
        try:
            return [libkvedge.pending_scores(cache, layer, number) for layer in layers]
        finally:
            cache.set_sequence_plan(number, None)

    def pass_by(self) -> None:
        """Ages all images that the last message did not ask about. Does nothing without whole rows."""
        if not self._factor or not self._cache.stats(self._sequence.number).whole_bytes:
            return  # saves the slow count of KV pairs below
        images = self._sequence.images
        images[:] = [image if image.pairs else image._replace(pairs=self._held(image)) for image in images]
        if not self._interest:
            return
        most = max(self._interest)
        for i, (image, interest) in enumerate(zip(images, self._interest, strict=True)):
            if image.fixed:
                continue
            asked = interest >= _NEAR * most
            pairs = self._held(image) if asked else image.pairs * self._factor
            self._sequence.limit_image(i, _FREE if asked else math.floor(pairs), fixed=False)
            images[i] = images[i]._replace(pairs=pairs)
        self._cache.choose_again(self._sequence.number)

    def _held(self, image: ImageSpan) -> float:
        """Returns the KV pairs that a KV head holds of an image, averaged over layers and heads."""
        cache, number = self._cache, self._sequence.number
        counts = [
            np.count_nonzero((tokens >= image.first) & (tokens < image.last))
            for layer, heads in enumerate(cache.lengths(number))
            for tokens in (np.asarray(cache.tokens(layer, h, number)) for h in range(len(heads)))
        ]
        return float(np.mean(counts)) if counts else 0.0


def _pairs(budget: float | int | None, n_tokens: int) -> int:
    if budget is None:
        return _FREE
    amount = Amount.parse(budget, "the budget of an image")
    if not 0 <= amount.value <= (1.0 if amount.pairs is None else LARGEST_COUNT):
        raise BudgetError(
            f"the budget of an image must be a share from 0.0 to 1.0 or a number of KV pairs, not {amount}"
        )
    return amount.pairs if amount.pairs is not None else math.ceil((amount.ratio or 0.0) * n_tokens)
