"""Drafts are guesses at the next tokens of an answer. One batch verifies them, and the right ones are the answer's.

The tokens of an answer are those that come one by one. Each place of a batch chooses its token by its own logits, with
the sampler that chose all tokens before it. A guess only decides whether the next place of the batch can be used: it
can where the guess is the token that was chosen. So the sampler never learns of a wrong guess, and with a temperature
each token has the probability that it has without guesses, and a seed gives the same answer.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from pykvedge.runtime.driver import Driver
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.lookup import Lookup
from pykvedge.runtime.sequence import Sequence

MOST = 15  # guesses in a batch
_OLD = 256  # steps, until what a batch took is measured again
_GUESSED = 0.25  # of a token's time: what another token in a batch is thought to take before that was measured


class Costs:
    """Knows how long a batch of n tokens takes, from those that were decoded."""

    def __init__(self) -> None:
        self._took: dict[int, tuple[deque[float], list[int]]] = {}
        self._steps = 0

    def took(self, n: int, seconds: float) -> None:
        """Notes a batch of n tokens."""
        self._steps += 1
        times, when = self._took.setdefault(n, (deque(maxlen=8), [0]))
        times.append(seconds)
        when[0] = self._steps
        for size in [size for size, (_, at) in self._took.items() if size > 1 and self._steps - at[0] > _OLD]:
            del self._took[size]

    def of(self, n: int) -> float:
        """Estimates the seconds of a batch: the median of its size, else what sizes beside it suggest.

        A larger batch than any so far is thought to be cheap, so that it is tried. 0: no single token was measured yet.
        """
        if n in self._took:
            return statistics.median(self._took[n][0])
        if 1 not in self._took:
            return 0.0
        alone = self.of(1)
        below = max(size for size in self._took if size < n)
        above = min((size for size in self._took if size > n), default=0)
        slope = _GUESSED * alone
        if above:
            slope = (self.of(above) - self.of(below)) / (above - below)
        elif below > 1:
            slope = min(slope, (self.of(below) - alone) / (below - 1))
        return self.of(below) + slope * (n - below)


class Hits:
    """Knows how often guesses of a kind were right. Later ones count more, and each kind begins with some trust."""

    _FADE, _TRUST, _WEIGHT = 0.95, 0.7, 2.0

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # right ones, all

    def saw(self, kind: int, right: bool) -> None:
        """Notes a guess."""
        hits, n = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = self._FADE * hits + right, self._FADE * n + 1

    def rate(self, kind: int) -> float:
        """Estimates how many of the guesses are right, from 0 to 1."""
        hits, n = self._seen.get(kind, (0.0, 0.0))
        return (hits + self._TRUST * self._WEIGHT) / (n + self._WEIGHT)


class Drafter:
    """Takes the steps of answers: a token, or a batch of the last token and guesses at the next ones.

    The number of guesses is the one that promises the most tokens a second: by how often such guesses were right, and
    by what batches take here. Where none promises more than single tokens, there are none; whether guesses would have
    been right is noted all the same.
    """

    def __init__(self, driver: Driver, sequence: Sequence, lookup: Lookup, extend: Callable[[int], None]) -> None:
        """extend: appends a single token to the sequence."""
        self._driver, self._sequence, self._lookup, self._extend = driver, sequence, lookup, extend
        self._costs, self._hits = Costs(), Hits()

    def step(self, generation: Generation) -> str:
        """Reads the token that was chosen last, and chooses what follows. Returns the text that is certain with it.

        Raises GrammarError where no token can come, and what decoding raises.
        """
        most = self._most(generation)
        guesses, kind = self._guess(generation, most) if most > 0 else ([], 0)
        n = self._worth(kind, len(guesses))
        return self._verify(generation, guesses[:n], kind) if n else self._alone(generation, guesses[:1], kind)

    def _guess(self, generation: Generation, most: int) -> tuple[list[int], int]:
        """Guesses up to `most` tokens, and of which kind the guess is: as many tokens are alike before it."""
        return self._lookup.guess(generation.token, most)

    def _most(self, generation: Generation) -> int:
        """Counts the guesses that fit: the context, the answer, and what the cache can take back."""
        context, cache = self._driver.context, self._driver.cache
        room = min(context.room, context.n_ubatch, generation.left)
        if cache is not None:
            room = min(room, cache.verify_room(self._sequence.number))
        return min(room - 1, MOST)

    def _worth(self, kind: int, most: int) -> int:
        """Finds the number of guesses, up to `most`, that promises the most tokens a second."""
        rate, chance, tokens = self._hits.rate(kind), 1.0, 1.0
        best, speed = 0, 1.0
        alone = self._costs.of(1)
        if alone <= 0:
            return 0
        for n in range(1, most + 1):
            chance *= rate
            tokens += chance
            if (now := tokens * alone / self._costs.of(n + 1)) > speed:
                best, speed = n, now
        return best

    def _alone(self, generation: Generation, guesses: list[int], kind: int) -> str:
        """Reads a single token. guesses: at the one behind it, or none."""
        context = self._driver.context
        began = time.perf_counter()
        self._extend(generation.token)
        context.logits()  # waits for the device
        self._costs.took(1, time.perf_counter() - began)
        text = generation.choose(context, context.room)
        if guesses:
            self._hits.saw(kind, guesses[0] == generation.token)
        return text

    def _verify(self, generation: Generation, guesses: list[int], kind: int) -> str:
        context, batch = self._driver.context, [generation.token, *guesses]
        room = context.room - 1
        began = time.perf_counter()
        self._sequence.verify(batch)
        context.logits()
        self._costs.took(len(batch), time.perf_counter() - began)
        stay = 1
        try:
            text, stay = generation.choose_each(context, batch, room)
        finally:
            self._sequence.accept(stay)
        for _ in range(stay - 1):
            self._hits.saw(kind, True)
        if stay < len(batch):
            self._hits.saw(kind, generation.token == batch[stay])
        return text
