"""Images of a conversation age: without a question they keep fewer and fewer KV pairs, until one needs them.

Whole rows stay behind the kept ones (keeping.py), so nothing is read again when an image comes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pykvedge.errors import StateError, UsageError
from pykvedge.library import libkvedge
from pykvedge.library.libkvedge import Cache
from pykvedge.plans.making import plan as make_plan
from pykvedge.runtime.sequence import Sequence

_BEST = 8  # tokens of an image that its interest goes by: most tokens of a picture say nothing
_NEAR = 0.75  # of the highest interest: a message asks about images above it
_FREE = -1  # no limit
_MOST_SAID = 32  # tokens of a message, its last ones, that say which images it asks about


@dataclass
class _Image:
    """An image of a sequence: tokens [first, last). base: pairs that it has by its age. limit: pairs of a head."""

    first: int
    last: int
    base: float = 0.0
    limit: int = _FREE
    fixed: bool = False  # by the caller


class Ages:
    """Images of a sequence, in the order in which they were read, and what each may keep."""

    def __init__(self, sequence: Sequence, cache: Cache, factor: float) -> None:
        """factor: the share of its pairs that an image keeps with each message without a question; 0: all of them."""
        self._sequence, self._cache, self._factor = sequence, cache, factor
        self._images: list[_Image] = []
        self._interest: list[float] = []  # of the images, for the message that was read last

    def __len__(self) -> int:
        self._look()
        return len(self._images)

    def limit(self, image: int, budget: float | int | None) -> None:
        """Lets an image keep so many pairs of each head, or such a share of its tokens; None: as the plan says.

        The choice is made again at once; nothing is read. image: from 1 on. Raises UsageError, StateError.
        """
        self._look()
        if isinstance(image, bool) or not isinstance(image, int) or not 1 <= image <= len(self._images):
            raise UsageError(f"there is no image {image!r:.20} in the conversation, which has {len(self._images)}")
        one = self._images[image - 1]
        before = one.limit
        one.limit, one.fixed = _pairs(budget, one.last - one.first), budget is not None
        self._set(one)
        try:
            self._cache.choose_again(self._sequence.number)
        except BaseException:
            one.limit = before
            self._set(one)
            raise

    def free(self) -> None:
        """Lifts the limits of images that age, before a message whose question may need them."""
        self._look()
        for image in self._images:
            if self._factor and not image.fixed and image.limit != _FREE:
                image.limit = _FREE
                self._set(image)

    def listen(self) -> None:
        """Finds how much a message looks at each image, before its rows are chosen.

        It goes by what the last tokens attend to (scorer window), or, where the plan gathers no such queries, by the
        plan's own scores. In each layer the mean of the highest scores of an image counts, as a share of that of the
        first among images.
        """
        known = len(self._images)
        self._look()
        self._interest = []
        if not self._factor or not known:
            return
        shares = []
        for scores in self._scores():
            best = [np.sort(scores[:, image.first : image.last], axis=1)[:, -_BEST:].mean() for image in self._images]
            shares.append(np.array(best) / max(*best, np.finfo(np.float32).tiny))
        self._interest = np.mean(shares, axis=0).tolist()
        self._interest[known:] = [max(self._interest)] * (len(self._images) - known)  # the message shows them

    def _scores(self) -> list[np.ndarray]:
        """[layer][Hkv, T] float32 scores of all tokens."""
        cache, number = self._cache, self._sequence.number
        layers = range(cache.stats(number).n_layers)
        said = min(max(self._sequence.said, 1), _MOST_SAID)
        cache.set_sequence_plan(number, make_plan("snapkv", 0.5, **{"scorer.window": said}))
        try:
            return [libkvedge.pending_scores(cache, layer, number) for layer in layers]
        except StateError:  # no such queries are there
            cache.set_sequence_plan(number, None)
            return [libkvedge.pending_scores(cache, layer, number) for layer in layers]
        finally:
            cache.set_sequence_plan(number, None)

    def pass_by(self) -> None:
        """Ages all images but those that the last message asked about."""
        if not self._factor:
            return  # counting the pairs of images takes a look at every head
        for image in self._images:
            image.base = image.base or self._held(image)
        if not self._interest:
            return
        most = max(self._interest)
        for image, interest in zip(self._images, self._interest, strict=True):
            if image.fixed:
                continue
            asked = interest >= _NEAR * most
            image.base = self._held(image) if asked else image.base * self._factor
            image.limit = _FREE if asked else math.floor(image.base)
            self._set(image)
        self._cache.choose_again(self._sequence.number)

    def _look(self) -> None:
        """Adds images that were read since the last time; drops those that are gone."""
        spans = self._sequence.images
        self._images = [image for image in self._images if (image.first, image.last) in spans]
        self._images += [_Image(*span) for span in spans[len(self._images) :]]

    def _held(self, image: _Image) -> float:
        """Averages the pairs of a head that are of an image."""
        cache, number = self._cache, self._sequence.number
        counts = [
            np.count_nonzero((tokens >= image.first) & (tokens < image.last))
            for layer, heads in enumerate(cache.lengths(number))
            for tokens in (np.asarray(cache.tokens(layer, h, number)) for h in range(len(heads)))
        ]
        return float(np.mean(counts)) if counts else 0.0

    def _set(self, image: _Image) -> None:
        self._cache.limit_tokens(image.first, image.last, image.limit, self._sequence.number)


def _pairs(budget: float | int | None, n_tokens: int) -> int:
    if budget is None:
        return _FREE
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget < 2**31:
        raise UsageError(f"the budget of an image is a share of its tokens or a number of pairs, not {budget!r:.40}")
    return budget if isinstance(budget, int) else math.ceil(min(budget, 1.0) * n_tokens)
