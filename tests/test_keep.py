"""Whole rows behind compressed ones: a later message is answered as if the conversation were one prompt."""

from __future__ import annotations

import numpy as np
import pytest
from contexts import TinyContext, random_tokens

import pykvedge

KINDS = ["llama", "qwen3", "gemma3", "qwen2vl"]
TURNS = [300, 40, 25, 60]  # tokens of each message
ANSWER = 5


class Talk:
    """A conversation in a tiny context, whose answers are always the same tokens."""

    def __init__(self, context: TinyContext) -> None:
        self.context, self.answered = context, 0

    def read(self, tokens: list[int]) -> None:
        self.context.decode(tokens)
        self.context.cache.compress()

    def answer(self, tokens: list[int]) -> None:
        for token in tokens:
            self.context.decode([token])
        self.answered = len(tokens)

    def take_back(self) -> None:
        """Removes the last answer, to be read again."""
        context = self.context
        context.n[0] -= self.answered
        context.llama.llama_memory_seq_rm(context.memory, 0, context.n[0], -1)


@pytest.fixture
def talk(native, tiny):
    made = []

    def make(kind, plan, keep="ram", folder="", **options):
        made.append(TinyContext(tiny(kind).model, plan, **options))
        made[-1].cache.keep(keep, str(folder))
        return Talk(made[-1])

    yield make
    for context in made:
        context.close()


def messages():
    return [random_tokens(n, seed=i) for i, n in enumerate(TURNS)]


def answers():
    return [random_tokens(ANSWER, seed=100 + i) for i in range(len(TURNS))]


def test_pairs_are_those_of_one_prompt(talk, subtests=None):
    plan = pykvedge.plan("snapkv", 0.3)
    for kind in KINDS:
        kept = talk(kind, plan)
        so_far: list[int] = []
        for i, (message, answer) in enumerate(zip(messages(), answers(), strict=True)):
            if i:
                kept.take_back()
                kept.read([*answers()[i - 1], *message])
                so_far += answers()[i - 1]
            else:
                kept.read(message)
            so_far += message
            fresh = talk(kind, plan, keep="")
            fresh.read(so_far)
            assert kept.context.held() == fresh.context.held(), (kind, i)
            kept.answer(answer)


def greedy(talk: Talk) -> int:
    context = talk.context
    logits = np.ctypeslib.as_array(context.llama.llama_get_logits_ith(context.context, -1), (1000,))
    return int(logits.argmax())
