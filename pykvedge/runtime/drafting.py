"""Drafts the next tokens of an answer. One batch verifies the drafted tokens, and the answer takes the right tokens.

The answer equals the answer without drafts, also with a temperature: the sampler never sees a wrong guess
(docs/dev/design.md).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from pykvedge.errors import GrammarError, UnsupportedError, UsageError
from pykvedge.models.model import Model
from pykvedge.plans.plan import Plan
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.sequence import Sequence

MOST = 15  # most guesses in a batch
ANY = -1  # kind that counts all guesses from decoding
_DOUBTS = 100  # kinds from 100 on: guesses from decoding, by the margin of the likeliest token
_RETRY, _TRIED = 64, 4  # after 64 steps without a draft, the drafter tries a draft of at least 4 tokens
_OLD = 256  # steps until the seconds of a batch size are measured again
_GUESSED = 0.25  # share of a single token's time: the assumed time of one more token in a batch, while unmeasured
_NOT_EXACT = (
    "the answer may differ from that of --method full: no uncompressed KV rows are kept, so --exact cannot "
    "verify tokens"
)


def require_drafts(model: Model, asked: str) -> None:
    """Raises UnsupportedError for a model whose layers cannot take a draft back. asked: name of the drafting option."""
    if model.recurrent:
        raise UnsupportedError(
            f"{asked} does not work with {model.path.name}: its recurrent layers cannot remove refused draft tokens; "
            f"omit {asked}"
        )


def check_policy(plan: Plan, asked: str) -> None:
    """Raises UsageError for a plan that drops rows while it answers. asked: name of the drafting option."""
    if plan.drops:
        raise UsageError(
            f"{asked} does not work with decode policy '{plan.decode}', which drops KV pairs also for refused "
            f"drafts; use --decode keep-all, or omit {asked}"
        )


class Costs:
    """Estimates the seconds of a batch of n tokens from the batches measured so far."""

    def __init__(self) -> None:
        self._took: dict[int, deque[float]] = {}
        self._when: dict[int, int] = {}  # the last step with a batch of this size
        self._steps = 0
        self._table: list[float] = []  # estimates; index n - 1 holds a batch of n tokens. Empty: not computed

    def took(self, n: int, seconds: float) -> None:
        self._steps += 1
        self._took.setdefault(n, deque(maxlen=8)).append(seconds)
        self._when[n] = self._steps
        for size in [size for size, at in self._when.items() if size > 1 and self._steps - at > _OLD]:
            del self._took[size], self._when[size]
        self._table = []

    def of(self, n: int) -> float:
        """Returns the estimated seconds of a batch of n tokens, 1 <= n <= MOST + 1. 0: no single token was measured.

        The estimate for a batch larger than any measured batch is low, so that the drafter tries a larger batch.
        """
        if not self._table:
            self._table = self._estimates()
        return self._table[n - 1]

    def _estimates(self) -> list[float]:
        if 1 not in self._took:
            return [0.0] * (MOST + 1)
        known = {n: sorted(times)[len(times) // 3] for n, times in self._took.items()}  # ignores outliers
        for n in known:
            known[n] = min(seconds for size, seconds in known.items() if size >= n)  # more tokens never take less time
        last, alone = max(known), known[1]
        slope = min(_GUESSED * alone, (known[last] - alone) / (last - 1)) if last > 1 else _GUESSED * alone
        sizes = sorted(known)
        out = np.interp(range(1, MOST + 2), sizes, [known[n] for n in sizes])
        return [float(s) if n <= last else known[last] + slope * (n - last) for n, s in enumerate(out, start=1)]


class Hits:
    """Counts how often the guesses of each kind are right. Recent guesses count more; new kinds have some trust."""

    _FADE, _TRUST, _WEIGHT = 0.95, 0.7, 2.0

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # kind: faded number of right guesses, faded number of guesses

    def saw(self, kind: int, right: bool) -> None:
        hits, n = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = self._FADE * hits + right, self._FADE * n + 1

    def rate(self, kind: int) -> float:
        """Returns the estimated share of right guesses, from 0 to 1."""
        hits, n = self._seen.get(kind, (0.0, 0.0))
        return (hits + self._TRUST * self._WEIGHT) / (n + self._WEIGHT)


class Drafter:
    """Runs the decode steps of answers. A step reads the last token, alone or with guesses at the next tokens.

    Guesses come from a lookup, or (exact answers) from decoding over the compressed rows. The drafter chooses the
    number of guesses that promises the most tokens per second, by the hit rate of the guesses and the time of a batch.
    In exact answers every token is verified over whole rows, also a step without guesses.
    """

    def __init__(
        self,
        driver: Driver,
        sequence: Sequence,
        extend: Callable[[int], None],
        exact: bool = False,
        costs: Costs | None = None,
    ) -> None:
        """extend: appends a single token to the sequence. costs: of batches; several drafters may share them."""
        self._driver, self._sequence, self._extend, self._exact = driver, sequence, extend, exact
        self._costs, self._hits = Costs() if costs is None else costs, Hits()
        self._drafting = Costs()  # times of single tokens over the compressed rows, if whole rows exist
        self._undrafted = _RETRY  # steps in a row without a draft; the first step tries a draft
        self._over_whole = False  # whether the last step used whole rows
        self._kept_bytes = 0  # bytes of compressed rows that a token reads

    def step(self, generation: Generation, room: int, choose: Callable[[], str]) -> str:
        """Reads the last chosen token, and chooses the next tokens. Returns the text that became certain.

        room: tokens that fit, including the last chosen token. choose: chooses the next token after a step without
        guesses, and returns its text. Raises GrammarError if no token can follow, and the errors of decoding.
        """
        most = self._most(generation, room)
        guesses, kind = self._guess(generation, most) if most > 0 else ([], 0)
        n, speed = self._best(kind, len(guesses))
        whole = self._whole(generation)
        if not whole and not n:
            return self._alone(generation, choose, guesses[:1], kind)
        kinds = [kind] * n
        if whole and speed <= self._best(ANY, most, self._each())[1]:
            guesses, kinds = self._draft(generation, most)
        return self._verify(generation, room, [*zip(guesses, kinds, strict=False)], whole)

    def _whole(self, generation: Generation) -> bool:
        """Returns whether whole rows exist for verification, and records whether the answer is exact."""
        cache = self._driver.cache
        if cache is None or not self._exact:
            return False
        stats, drafts = cache.stats(self._sequence.number), generation.report.drafts
        whole = stats.whole_bytes > 0 and not stats.whole_rounded
        self._kept_bytes = stats.bytes
        given_up = self._over_whole and not whole  # whole rows existed in the last step
        if drafts is not None and (drafts.exact is None or given_up):
            drafts.exact = drafts.exact is None and (whole or self._sequence.holds_every_row)
            if not drafts.exact:
                generation.report.notes.append(_NOT_EXACT)
        self._over_whole = whole
        return whole

    def _guess(self, generation: Generation, most: int) -> tuple[list[int], int]:
        """Returns up to `most` guesses from the lookup, and their kind: the number of equal tokens before the guess."""
        lookup = self._sequence.lookup
        return lookup.guess(generation.token, most) if lookup is not None else ([], 0)

    def _most(self, generation: Generation, room: int) -> int:
        """Returns how many guesses fit the context (with one more token), the rest of the answer, and the cache."""
        cache = self._driver.cache
        room = min(room - 1, self._driver.context.n_ubatch, generation.left)
        if cache is not None:
            room = min(room, cache.verify_room(self._sequence.number))
        return min(room - 1, MOST)

    def _best(self, kind: int, most: int, each: float = 0.0) -> tuple[int, float]:
        """Returns the number of guesses, up to `most`, with the highest tokens per second, and that speed.

        each: seconds per guess. The speed is 0 until a single token was measured.
        """
        return self._ahead(0, 1.0, 1.0, most, self._hits.rate(kind), each)

    def _ahead(self, n: int, chance: float, tokens: float, most: int, rate: float, each: float) -> tuple[int, float]:
        """Does the work of `_best` after n guesses. chance: all n are right. tokens: expected from the step."""
        if self._costs.of(1) <= 0:
            return n, 0.0
        best, speed = n, tokens / (n * each + self._costs.of(n + 1))
        for more in range(n + 1, most + 1):
            chance *= rate
            tokens += chance
            if (now := tokens / (more * each + self._costs.of(more + 1))) > speed:
                best, speed = more, now
        return best, speed

    def _alone(self, generation: Generation, choose: Callable[[], str], guesses: list[int], kind: int) -> str:
        """Reads the last token alone. guesses: the guess at the next token, only to rate it; or empty."""
        began = time.perf_counter()
        self._extend(generation.token)
        self._driver.context.logits()  # waits for the device
        self._costs.took(1, time.perf_counter() - began)
        self._note_read(generation, self._kept_bytes)
        text = choose()
        if guesses:
            self._hits.saw(kind, guesses[0] == generation.token)
        return text

    def _note_read(self, generation: Generation, n_bytes: int) -> None:
        if generation.report.drafts is not None:
            generation.report.drafts.read(n_bytes)

    def _each(self) -> float:
        """Returns the estimated seconds of a drafted token."""
        return self._drafting.of(1) or self._costs.of(1) / 2

    def _draft(self, generation: Generation, most: int) -> tuple[list[int], list[int]]:
        """Decodes guesses over the compressed rows, as long as another guess promises more tokens per second.

        Returns the guesses, and the kind of each guess: the margin of the likeliest token over the second.
        """
        context, token = self._driver.context, generation.token
        guesses, kinds, chance, tokens = list[int](), list[int](), 1.0, 1.0
        retry = self._undrafted >= _RETRY
        with generation.sampler() as sampler, suppress(GrammarError):
            while len(guesses) < most:
                n = len(guesses)
                more, _ = self._ahead(n, chance, tokens, most, self._hits.rate(ANY), self._each())
                if more == n and not (retry and n < _TRIED):
                    break
                began = time.perf_counter()
                self._sequence.draft(token)
                logits = context.logits()
                self._drafting.took(1, time.perf_counter() - began)
                kinds.append(_doubt(logits))
                token = sampler.sample(context.handle)
                guesses.append(token)
                chance *= self._hits.rate(kinds[-1])
                tokens += chance
                if self._driver.model.is_end(token):
                    break
        self._undrafted = 0 if guesses else self._undrafted + 1
        self._note_read(generation, len(kinds) * self._kept_bytes)
        return guesses, kinds[: len(guesses)]

    def _verify(self, generation: Generation, room: int, guesses: list[tuple[int, int]], whole: bool) -> str:
        """Verifies guesses (token, kind) in one batch. whole: over whole rows."""
        context, sequence = self._driver.context, self._sequence
        batch = [generation.token, *(token for token, _ in guesses)]
        began = time.perf_counter()
        sequence.verify(batch, whole)
        context.logits()
        self._costs.took(len(batch), time.perf_counter() - began)
        # dropped turns have no cells
        self._note_read(generation, sequence.plain_bytes(sequence.n_cells) if whole else self._kept_bytes)
        stay = 1
        try:
            text, stay = generation.choose_each(context, batch, room - 1)
        finally:
            sequence.accept(stay)
        for i, (token, kind) in enumerate(guesses[:stay]):
            right = i + 1 < stay or generation.token == token
            self._hits.saw(kind, right)
            if kind >= _DOUBTS:
                self._hits.saw(ANY, right)
        return text


def _doubt(logits: np.ndarray) -> int:
    """Returns the kind of logits [n_vocab] float32: the margin of the best token over the second, in half units."""
    best = int(logits.argmax())
    second = max(logits[:best].max(initial=-np.inf), logits[best + 1 :].max(initial=-np.inf))
    return _DOUBTS + int(min(2 * (logits[best] - second), 12))
