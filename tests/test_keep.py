"""Whole rows: a later message is answered as if the conversation were one prompt."""

import functools

import keeping
import numpy as np
import pytest
from attached import METHODS
from choosing import distinct, whole
from contexts import TinyContext, random_tokens
from keeping import ANSWER, Talk, answers, give_plan, messages, methods_plan

import pykvedge
from pykvedge.library import libkvedge
from pykvedge.models.packaged import BLIND
from pykvedge.native.abi import DEVICES_ALL

KINDS = ["llama", "qwen3", "gemma3", "qwen2vl"]
FEW = ["snapkv", "lookm", "kvedge"]  # a window; column sums with merges; votes and budgets of heads


@pytest.fixture(scope="module")
def context(native, tiny, profile_file):
    """context(kind, plan or method, keep, place) -> an empty context. The same kind and place give the same one."""
    made = {}

    def make(kind, plan, keep="ram", place=0, kv_type="f16", **options):
        key = (kind, place, kv_type)
        if key not in made:
            made[key] = TinyContext(tiny(kind).model, pykvedge.plan("full"), kv_type, **options)
        found = keeping.emptied(made[key])
        found.cache.keep(keep)
        plan = plan if isinstance(plan, pykvedge.Plan) else methods_plan(plan)
        give_plan(found, tiny(kind), plan, profile_file)
        found.cache.set_auto_compress(True)
        return found

    yield make
    for one in made.values():
        one.close()


CASES = [
    pytest.param(method, kind, marks=() if usual else pytest.mark.whole)
    for kind in KINDS
    for method in METHODS
    for usual in [method in (distinct() if kind == "llama" else FEW if kind == "qwen2vl" else FEW[:1])]
]


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_pairs_are_those_of_one_prompt(context, method, kind):
    talk, other = Talk(context(kind, method)), context(kind, method, "", 1)
    for message, answer in zip(messages(), answers(), strict=True):
        talk.say(message)
        assert keeping.equal_pairs(talk.context, talk.anew(other)), len(talk.log)
        assert talk.context.cache.stats().whole_bytes > 0 and not talk.context.cache.keep_problem()
        talk.answer(answer)


@pytest.mark.parametrize("kind", KINDS)
def test_read_at_once_pairs_differ_where_scores_are_nearly_equal(context, kind):
    talk, other = Talk(context(kind, "snapkv")), context(kind, "snapkv", "", 1)
    for message, answer in zip(messages(), answers(), strict=True):
        talk.say(message)
        talk.answer(answer)
    tokens = [token for batch in talk.log for token in batch]
    talk.cut(talk.n - len(talk.answered))
    other.decode(tokens)
    scores = [libkvedge.pending_scores(other.cache, i) for i in range(len(other.cache.lengths()))]
    other.cache.compress()
    differing = 0
    for i, heads in enumerate(talk.context.held()):
        for h, held in enumerate(heads):
            only = sorted({*held} ^ {*other.cache.tokens(i, h)})
            differing += len(only)
            assert np.ptp(scores[i][h][only]) <= 1e-3 * scores[i][h].max() if only else True, (i, h, only)
    assert differing < len(tokens)


# ------------------------------------------------------------------------------------------------------------
# Where the answer is not removed: attach() and C


def say_on(talk: Talk, message: list[int], compress: bool = True) -> None:
    """Reads a message after the answer. The answer's rows stay as computed."""
    talk.decode(message)
    if compress:
        talk.compress()


def begun(talk: Talk, answer: int = ANSWER) -> Talk:
    """Reads one message and answers it."""
    talk.say(messages()[0])
    talk.answer(random_tokens(answer, seed=100))
    return talk


TYPES = ["f16", "q8_0", "kivi4", "tq3", *whole("bf16", "f32", "q4_0", "q8_0:q4_0")]


@pytest.mark.parametrize("kv_type", TYPES)
def test_rows_of_an_answer_count_as_they_were_computed(context, kv_type):
    first, more = len(messages()[0]), 70  # beyond two groups of quantised rows
    plain = kv_type if kv_type in ("bf16", "f32") else "f16"
    talk, alone = begun(Talk(context("llama", "snapkv", kv_type=kv_type)), more), context("llama", "full", "", 1, plain)
    alone.decode(messages()[0])
    answered = [(k[-more:], v[-more:]) for k, v, _ in keeping.rows(talk.context)]
    say_on(talk, messages()[1], compress=False)
    assert not talk.context.cache.keep_problem()
    everything = list(range(first + more + len(messages()[1])))
    assert all(held == everything for heads in talk.context.held() for held in heads)
    rows = zip(keeping.rows(talk.context), keeping.rows(alone), answered, strict=True)
    for (k, v, _), (k_alone, v_alone, _), (k_answer, v_answer) in rows:
        np.testing.assert_array_equal(k[:first], k_alone)
        np.testing.assert_array_equal(v[:first], v_alone)
        exact = {"rtol": 1e-3, "atol": 1e-3} if plain != kv_type else {"rtol": 0}  # rounded to f16
        np.testing.assert_allclose(k[first : first + more], k_answer, **exact)
        np.testing.assert_allclose(v[first : first + more], v_answer, **exact)
    talk.compress()
    n = 0.3 * len(everything)
    assert all(n - 1 <= len(held) <= n + 1 for heads in talk.context.held() for held in heads)
    talk.answer(answers()[1])
    say_on(talk, messages()[2])
    assert talk.context.cache.stats().whole_bytes > 0 and not talk.context.cache.keep_problem()


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in FEW else pytest.mark.whole) for m in METHODS])
def test_every_method_goes_on_over_an_answer_that_stays(context, method):
    talk = Talk(context("llama", method))
    for message, answer in zip(messages(), answers(), strict=True):
        say_on(talk, message)
        stats = talk.context.cache.stats()
        assert stats.whole_bytes > 0 and not talk.context.cache.keep_problem() and stats.n_pending == 0
        talk.answer(answer)


@pytest.mark.parametrize("policy", ["sliding", "heavy-hitter", *whole("fixed-point", "ratio")])
def test_an_answer_that_lost_rows_is_said_and_goes_on_as_without(context, policy):
    plan = pykvedge.plan("h2o", 0.3, decode=policy)
    talks = [Talk(context("llama", plan, keep, i)) for i, keep in enumerate(("ram", ""))]
    for talk in talks:
        begun(talk, 70)  # more than the pairs of the prompt
        assert (talk.context.cache.stats().whole_bytes > 0) == (talk is talks[0])
        say_on(talk, messages()[1])
        talk.answer(answers()[1])
    kept, without = (talk.context for talk in talks)
    assert "a decode policy dropped rows" in kept.cache.keep_problem() and kept.cache.stats().whole_bytes == 0
    assert keeping.equal_pairs(kept, without)
    np.testing.assert_array_equal(kept.logits(), without.logits())


def test_a_plan_that_saw_nothing_of_the_rows_is_said(context, tiny, profile_file):
    talks = [Talk(context("llama", "streaming-llm", keep, i)) for i, keep in enumerate(("ram", ""))]
    for talk in talks:
        begun(talk)
        give_plan(talk.context, tiny("llama"), pykvedge.plan("h2o", 0.3), profile_file)
        say_on(talk, messages()[1])
    assert "the plan has changed" in talks[0].context.cache.keep_problem()
    assert keeping.equal_pairs(talks[0].context, talks[1].context)


@pytest.mark.parametrize(("before", "after"), [
    ("snapkv", "adakv"), ("h2o", "knorm"), ("h2o", "lookm"), ("snapkv", "snapkv"), ("kvzip", "kvzip-uniform"),
])  # fmt: skip
def test_a_plan_that_saw_all_of_the_rows_goes_on(context, tiny, profile_file, before, after):
    """The new plan keeps the pairs of a sequence that had this plan from the start."""
    talk, other = Talk(context("llama", before)), context("llama", after, "", 1)
    for i, (message, answer) in enumerate(zip(messages()[:2], answers(), strict=False)):
        if i == 1:
            give_plan(talk.context, tiny("llama"), methods_plan(after), profile_file)
        talk.say(message)
        talk.answer(answer)
    talk.cut(talk.n - len(answers()[1]))
    assert not talk.context.cache.keep_problem() and keeping.equal_pairs(talk.context, talk.anew(other))


@pytest.mark.parametrize(("method", "kv_type"), [("h2o", "f16"), ("kvedge", "q8_0")])
def test_rows_of_devices_are_whole_on_the_host(native, closing, tiny, monkeypatch, method, kv_type):
    """The rows are in the graph's tensors, as on a device."""
    monkeypatch.setattr(libkvedge, "Cache", functools.partial(libkvedge.Cache, devices=DEVICES_ALL))
    made = [closing(TinyContext(tiny("qwen3").model, methods_plan(method), kv_type)) for _ in range(2)]
    made[0].cache.keep("ram")
    talk = Talk(made[0])
    for message, answer in zip(messages()[:3], answers(), strict=False):
        talk.say(message)
        assert talk.context.cache.device_problem() == "whole rows are kept on the host"
        talk.anew(made[1])  # this context compresses in the place of its rows, and rounds them there
        assert talk.context.held() == made[1].held()
        talk.answer(answer)
        assert talk.context.cache.stats().device_bytes > 0


def test_a_budget_of_all_keeps_whole_rows(native, closing):
    session = closing(pykvedge.Session(plan=pykvedge.plan("kvedge", 1.0), threads=1, keep="ram"))
    for notes in ([BLIND], [], []):
        answer = session.ask("How many shapes are there?", (), pykvedge.Sampling(max_tokens=4))
        answer.read()
        assert answer.report.notes == notes and answer.report.kv.whole_bytes > 0
    session.drop_turn(2)
