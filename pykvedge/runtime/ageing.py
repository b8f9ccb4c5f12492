"""Images of a conversation age: without a question they keep fewer and fewer KV pairs, until one needs them."""

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

_BEST = 8  # tokens of an image that its interest goes by: most tokens of a picture say nothing
_NEAR = 0.75  # of the highest interest: a message asks about images above it
_FREE = -1  # no limit
_MOST_SAID = 32  # tokens of a message, its last ones, that say which images it asks about


def check_age(plan: Plan) -> None:
    """Raises UsageError for a plan that does not gather the last queries, as it cannot tell what a message is about, or
    whose answers drop rows, as no image comes back then.
    """
    if plan.drops:
        raise UsageError(
            f"decode policy '{plan.decode}' drops rows of answers, so that no image could come back; use --decode "
            "keep-all, or no --age"
        )
    own, settings = table.get("scorer", plan.scorer), plan.settings("scorer")
    window = "window" in settings and scorer(plan.scorer).whole_up_to(settings) > 0
    if not (own.queries(settings) if own is not None else window):
        raise UsageError(
            f"images age where the last tokens of a message do not look at them, which scorer '{plan.scorer}' does not "
            "see; use a method whose last queries vote, such as kvedge or snapkv"
        )


class Ages:
    """Says what each image of a sequence may keep."""

    def __init__(self, sequence: Sequence, cache: Cache, factor: float) -> None:
        """factor: the share of its pairs that an image keeps with each message without a question; 0: all of them."""
        self._sequence, self._cache, self._factor = sequence, cache, factor
        self._known = 0  # images before the message that was read last
        self._interest: list[float] = []  # of the images, for the message that was read last

    def __len__(self) -> int:
        return len(self._sequence.images)

    def limit(self, image: int, budget: float | int | None) -> None:
        """Lets an image keep so many pairs of each head, or such a share of its tokens; None: as the plan says.

        The choice is made again at once; nothing is read. image: from 1 on. Raises UsageError, StateError.
        """
        images = self._sequence.images
        if isinstance(image, bool) or not isinstance(image, numbers.Integral) or not 1 <= image <= len(images):
            raise UsageError(f"there is no image {image!r:.20} in the conversation, which has {len(images)}")
        before = images[image - 1]
        self._sequence.limit_image(image - 1, _pairs(budget, before.last - before.first), budget is not None)
        with undoing(lambda: self._sequence.limit_image(image - 1, before.limit, before.fixed)):
            self._cache.choose_again(self._sequence.number)

    def free(self) -> None:
        """Lifts the limits of images that age, before a message whose question may need them."""
        self._known = len(self)
        for i, image in enumerate(self._sequence.images):
            if self._factor and not image.fixed and image.limit != _FREE:
                self._sequence.limit_image(i, _FREE, fixed=False)

    def listen(self) -> None:
        """Finds how much a message looks at each image, before its rows are chosen.

        It goes by what the last tokens attend to (scorer window). In each layer the mean of the highest scores of an
        image counts, as a share of that of the first among images.
        """
        images, known = self._sequence.images, min(self._known, len(self))
        self._interest = []
        stats = self._cache.stats(self._sequence.number)
        if not self._factor or not known or stats.n_pending < stats.n_tokens:  # whole rows were given up
            return
        shares = []
        for scores in self._scores():
            best = [np.sort(scores[:, image.first : image.last], axis=1)[:, -_BEST:].mean() for image in images]
            shares.append(np.array(best) / max(*best, np.finfo(np.float32).tiny))
        self._interest = np.mean(shares, axis=0).tolist()
        self._interest[known:] = [max(self._interest)] * (len(images) - known)  # the message shows them

    def _scores(self) -> list[np.ndarray]:
        """[layer][Hkv, T] float32 scores of all tokens."""
        cache, number = self._cache, self._sequence.number
        layers = range(cache.stats(number).n_layers)
        said = min(max(self._sequence.said, 1), _MOST_SAID)
        cache.set_sequence_plan(number, make_plan("snapkv", 0.5, **{"scorer.window": said}))
        try:
            return [libkvedge.pending_scores(cache, layer, number) for layer in layers]
        finally:
            cache.set_sequence_plan(number, None)

    def pass_by(self) -> None:
        """Ages all images but those that the last message asked about. Without whole rows none can come back."""
        if not self._factor or not self._cache.stats(self._sequence.number).whole_bytes:
            return  # counting the pairs of images takes a look at every head
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
        """Averages the pairs of a head that are of an image."""
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
        raise BudgetError(f"the budget of an image is a share up to 1.0 or a number of pairs, not {amount}")
    return amount.pairs if amount.pairs is not None else math.ceil((amount.ratio or 0.0) * n_tokens)
