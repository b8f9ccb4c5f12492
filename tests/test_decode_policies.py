"""Decode policies in the running model: what a cache holds, token by token, against the definitions."""

from __future__ import annotations

import pytest
from contexts import TinyContext, random_tokens

import pykvedge
from pykvedge.plan import Plan
from pykvedge.stages.base import DecodeState
from pykvedge.stages.registry import member, members

POLICIES = list(members("decode"))
PROMPT = 200


@pytest.fixture
def running(native, tiny):
    opened = []

    def start(plan: Plan) -> TinyContext:
        opened.append(TinyContext(tiny("llama").model, plan))
        return opened[-1]

    yield start
    for context in opened:
        context.close()


def simulate(plan: Plan, rows: list[int], n_prompt: int, generated: range) -> list[int]:
    """Token indices that a head holds when the last of `generated` has been read; rows: after the compression."""
    policy, settings = member("decode", plan.decode), plan.settings("decode")
    held, kept = list(rows), len(rows)
    for count, token in enumerate(generated):
        state = DecodeState(n_prompt, kept, plan.count(n_prompt), count, len(held), plan.sinks)
        row = policy.evict(state, settings) if count else None
        if row is not None:
            held.pop(row)
        held.append(token)
    return held


@pytest.mark.parametrize("allocator", ["uniform", "prefix", "ada"])
@pytest.mark.parametrize("budget", [0.1, 0.4, 90])
@pytest.mark.parametrize("decode", POLICIES)
def test_rows_go_as_the_definition_says(running, decode, budget, allocator):
    plan = pykvedge.plan("h2o", budget, decode=decode, allocator=allocator, sinks=2)
    context = running(plan)
    context.decode(random_tokens(PROMPT))
    context.cache.compress()
    before = context.held()
    for step in range(1, 121):
        context.decode(random_tokens(1, step))
        if step in (1, 2, 7, 60, 120):
            for heads, old in zip(context.held(), before, strict=True):
                for now, rows in zip(heads, old, strict=True):
                    assert now == simulate(plan, rows, PROMPT, range(PROMPT, PROMPT + step))


@pytest.mark.parametrize("distance", [1, 5, 60])
def test_the_place_is_a_setting(running, distance):
    plan = pykvedge.plan("h2o", 0.2, decode="fixed-point", **{"decode.distance": distance})
    context = running(plan)
    context.decode(random_tokens(PROMPT))
    context.cache.compress()
    before = context.held()[0][0]
    for step in range(60):
        context.decode(random_tokens(1, step))
    assert context.held()[0][0] == simulate(plan, before, PROMPT, range(PROMPT, PROMPT + 60))


@pytest.mark.parametrize("decode", ["sliding", "fixed-point", "ratio"])
def test_a_bound_is_a_bound(running, decode):
    context = running(pykvedge.plan("h2o", 0.2, decode=decode))
    context.decode(random_tokens(PROMPT))
    sizes = []
    for step in range(1500):
        context.decode(random_tokens(1, step))
        sizes.append(context.cache.stats().bytes)
    longest = max(n for heads in context.cache.lengths() for n in heads)
    share = 40 if decode == "sliding" else 0.2 * (PROMPT + 1500)
    assert longest <= share + 2
    if decode == "sliding":
        assert max(sizes[1000:]) <= max(sizes[200:1000])  # flat


def test_the_next_prompt_is_compressed_alone(running):
    plan = pykvedge.plan("elastic", 0.2)
    context = running(plan)
    context.decode(random_tokens(PROMPT))
    for step in range(80):
        context.decode(random_tokens(1, step))
    answer = context.cache.lengths()
    context.decode(random_tokens(100, 5))
    context.cache.compress()
    for heads, old in zip(context.cache.lengths(), answer, strict=True):
        assert heads == [n + 20 for n in old]
    for step in range(80):
        context.decode(random_tokens(1, step))
    n_tokens = PROMPT + 80 + 100 + 80
    assert max(n for heads in context.cache.lengths() for n in heads) <= 0.2 * n_tokens + 3


def test_an_answer_that_is_bounded_already_is_left_alone(running):
    context = running(pykvedge.plan("h2o", 0.2, decode="sliding", reducer="pivotal"))
    context.decode(random_tokens(PROMPT))
    for step in range(90):
        context.decode(random_tokens(1, step))
    held, bytes_ = context.held(), context.cache.stats().bytes
    context.cache.compress()
    assert context.held() == held and context.cache.stats().bytes == bytes_
    context.decode(random_tokens(1, 91))
    assert {n for heads in context.cache.lengths() for n in heads} == {len(held[0][0])}


def test_a_copy_goes_on_like_the_original(running):
    context = running(pykvedge.plan("h2o", 0.2, decode="sliding"))
    context.decode(random_tokens(PROMPT))
    for step in range(90):
        context.decode(random_tokens(1, step))
    memory, held = context.memory, context.held()
    context.llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    context.llama.llama_memory_seq_keep(memory, 1)
    context.llama.llama_memory_seq_cp(memory, 1, 0, -1, -1)
    assert context.held() == held
    context.decode(random_tokens(60, 3))  # the next prompt leaves the bounded answer as it is
    context.cache.compress()
    assert {n for heads in context.cache.lengths() for n in heads} == {len(held[0][0]) + 12}


def test_the_presets_of_the_papers():
    elastic, prefixkv = pykvedge.plan("elastic"), pykvedge.plan("prefixkv")
    assert (elastic.reducer, elastic.decode, elastic.allocator) == ("bucket", "fixed-point", "uniform")
    assert (prefixkv.reducer, prefixkv.decode, prefixkv.allocator) == ("evict", "ratio", "prefix")
    for plan in (elastic, prefixkv):
        assert plan.params["scorer.share"] == "layer" and plan.protected(100, 20) == (1, 1)
    assert dict(pykvedge.plan("elastic", scorer="window").params) == {}
    assert pykvedge.plan("elastic", **{"scorer.share": "head"}).params["scorer.share"] == "head"
