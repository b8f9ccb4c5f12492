"""Conversations in tiny contexts with whole rows, and contexts that read the same tokens again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from attached import differing
from contexts import TinyContext, random_tokens, replaying

import pykvedge
from pykvedge.library import libkvedge
from pykvedge.models.profiles import tables_for
from pykvedge.native.abi import ReplayChunk

TURNS = (150, 40, 25, 60)  # tokens of each message
ANSWER = 5


def messages() -> list[list[int]]:
    return [random_tokens(n, seed=i) for i, n in enumerate(TURNS)]


def answers() -> list[list[int]]:
    return [random_tokens(ANSWER, seed=100 + i) for i in range(len(TURNS))]


def methods_plan(name: str) -> pykvedge.Plan:
    return pykvedge.plan(name, None if name == "full" else 0.3)


def give_plan(context: TinyContext, files, plan: pykvedge.Plan, profile_file) -> None:
    """Sets a plan of any method. A plan that needs a profile gets random numbers."""
    given = [profile_file(files.model, kind) for kind in plan.profile_kinds().values()] or None
    context.cache.set_plan(plan, tables_for(plan, files.model, given, spare=False))


def rows(context: TinyContext, sequence: int = 0) -> list[tuple[np.ndarray, ...]]:
    """Returns (keys, values, biases) of each layer and KV head."""
    cache, heads = context.cache, context.cache.lengths(sequence)
    return [
        (*libkvedge.rows(cache, i, h, sequence), libkvedge.biases(cache, i, h, sequence))
        for i, layer in enumerate(heads)
        for h in range(len(layer))
    ]


def equal_pairs(a: TinyContext, b: TinyContext, sequence: int = 0, other: int = 0) -> bool:
    """Returns whether both hold the same KV pairs, bit for bit."""
    if a.held(sequence) != b.held(other):
        return False
    pairs = zip(rows(a, sequence), rows(b, other), strict=True)
    return all(np.array_equal(x, y) for one, two in pairs for x, y in zip(one, two, strict=True))


def nearly_equal_pairs(a: TinyContext, b: TinyContext, sequence: int = 0, other: int = 0, rounded: float = 0.0) -> bool:
    """Returns whether both hold the same KV pairs, except for rounding that swaps nearly equal scores.

    Removed tokens shift the blocks of keys, so sums of attention round differently. rounded: a further share of KV
    pairs, and relative size of numbers, that may differ.
    """
    held, expected, apart = a.held(sequence), b.held(other), 0.01 + rounded
    if differing(held, expected) > apart or differing(expected, held) > apart:
        return False
    tokens = zip([h for layer in held for h in layer], [h for layer in expected for h in layer], strict=True)
    pairs = zip(tokens, rows(a, sequence), rows(b, other), strict=True)
    return all(
        np.allclose(x[np.isin(own, others)], y[np.isin(others, own)], rtol=apart, atol=apart)
        for (own, others), one, two in pairs
        for x, y in zip(one, two, strict=True)
    )


def emptied(context: TinyContext) -> TinyContext:
    context.llama.llama_memory_clear(context.memory, True)
    context.n = dict.fromkeys(context.n, 0)
    return context


@dataclass
class Talk:
    """A conversation in one sequence of a context. log: the batches that were read, and the removed ranges.

    answered: tokens since the last compression. They are not in the log.
    """

    context: TinyContext
    sequence: int = 0
    log: list[list[int] | tuple[int, int]] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Position of the next token."""
        return self.context.n[self.sequence]

    def decode(self, tokens: list[int]) -> None:
        self.context.decode(*([] for _ in range(self.sequence)), tokens)

    def say(self, message: list[int]) -> None:
        """Reads a message and compresses. The last answer is removed first, and read again before the message."""
        answered = self.answered
        if answered:
            self.cut(self.n - len(answered))
        self.log.append([*answered, *message])
        self.decode(self.log[-1])
        self.compress()

    def compress(self) -> None:
        """Compresses, after a second pass if the plan needs one."""
        cache = self.context.cache
        if cache.replays:
            n, at = cache.stats(self.sequence).n_pending, self.n
            request = random_tokens(9, seed=n)
            with replaying(cache, ReplayChunk(0, n, len(request)), self.sequence):
                self.decode(request)
            self.context.n[self.sequence] = at
        cache.compress(self.sequence)

    def answer(self, tokens: list[int]) -> None:
        for token in tokens:
            self.decode([token])
        self.answered = [*self.answered, *tokens]

    def cut(self, first: int, end: int = -1) -> None:
        """Removes the tokens at positions in [first, end); -1: to the end."""
        context, n, read = self.context, self.n, self.n - len(self.answered)
        assert context.llama.llama_memory_seq_rm(context.memory, self.sequence, first, end)
        if first < read:
            self.log.append((first, min(end, read) if end >= 0 else -1))
        if end < 0 or end >= n:
            self.answered = self.answered[: max(0, first - read)]
            context.n[self.sequence] = first

    def copy(self, to: int) -> Talk:
        """Copies the conversation to another, empty sequence."""
        context = self.context
        context.llama.llama_memory_seq_cp(context.memory, self.sequence, to, -1, -1)
        context.n[to] = self.n
        return Talk(context, to, list(self.log), list(self.answered))

    def anew(self, other: TinyContext) -> TinyContext:
        """Repeats the log in a context without whole rows, without answers, and compresses once. Returns it."""
        talk = Talk(emptied(other))
        for entry in self.log:
            talk.cut(*entry) if isinstance(entry, tuple) else talk.decode(entry)
        talk.compress()
        return other
