"""Scorer replay with `projected` (KVzip+): the definition against loops, both engines, and the model's own weights."""

import itertools

import numpy as np
import oracles
import pytest
from arrays import check_engines_agree, projection_of, prompt
from contexts import TinyContext, random_tokens
from conversations import WORDS, say
from test_critical import weights_of
from test_replay import CUTS, ReplayContext, second_pass

import pykvedge
from pykvedge import ArrayError, Layer, ReplayChunk, Sampling, StateError, UsageError
from pykvedge.library import libkvedge, native_plan
from pykvedge.plans.registry import member
from pykvedge.reference.checks import rules

FIRST = 1e18
HEADS = {"mha": (3, 3), "gqa": (4, 2), "mqa": (4, 1)}


def plan_of(source="repeat", budget=0.3, **settings):
    given = {"scorer.source": source, "scorer.projected": True, **settings}
    return pykvedge.plan("h2o", budget, scorer="replay", **given)


@pytest.mark.parametrize("scope", ["chunk", "context"])
@pytest.mark.parametrize("cut", CUTS)
def test_scores_are_attention_times_what_values_add(cut, scope):
    p = prompt(12, (4, 2), size=8, layers=1)
    plan, replay = plan_of(**{"scorer.scope": scope}), second_pass(p, CUTS[cut](12))
    w = projection_of(plan, p)[0]
    layer = Layer(p.q[0], p.k[0], p.v[0], p.image_mask, replay=replay, projection=w)
    found = member("scorer", "replay").score(layer, plan.settings("scorer"))
    for h in range(2):
        group, at, expected = slice(2 * h, 2 * h + 2), 0, [0.0] * 12
        for c in replay.chunks:
            own = slice(at, at + c.n_tokens)
            q, k = replay.q[0, group, own].tolist(), replay.k[0, h, own].tolist()
            chunk = c.first, c.last, c.sinks
            rows = p.k[0, h].tolist(), p.v[0, h].tolist()
            paid = oracles.replayed_plus(q, *rows, k, chunk, scope == "chunk", w[group].tolist())
            expected, at = [max(a, b) for a, b in zip(expected, paid, strict=True)], at + c.n_tokens
        sinks = max(c.sinks for c in replay.chunks)
        np.testing.assert_allclose(found[h, sinks:], expected[sinks:], rtol=1e-6)
        assert (found[h, :sinks] == FIRST).all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("scope", ["chunk", "context"])
@pytest.mark.parametrize("cut", CUTS)
def test_both_engines_go_by_the_same(native, cut, scope, heads):
    for n_tokens, allocator, kv_type in ((6, "uniform", "f16"), (90, "global", "q8_0"), (200, "ada", "bf16")):
        p = prompt(n_tokens, HEADS[heads], size=32, layers=3)
        plan = plan_of(allocator=allocator, **{"scorer.scope": scope})
        given = {"replay": second_pass(p, CUTS[cut](n_tokens)), "projection": projection_of(plan, p)}
        check_engines_agree(1e-5, plan, p, kv_type=kv_type, **given)


@pytest.mark.parametrize("heads", HEADS)
def test_the_prompts_own_queries(native, heads):
    for reducer, n_tokens in itertools.product(("evict", "pivotal"), (1, 5, 150)):
        rules.engines_agree(plan_of("prompt", reducer=reducer), prompt(n_tokens, HEADS[heads]), "f16")


def test_a_value_that_a_head_does_not_add_counts_nothing_there(native):
    """Query head 0 adds nothing from any value: its attention does not count, that of head 1 does."""
    p, plan = prompt(40, (2, 1), size=16, layers=1), plan_of("prompt", 10, recent=0)
    w = np.zeros((1, 2, 16, 16), np.float32)
    w[:, 1] = np.eye(16)
    alone = np.concatenate([p.q[:, 1:], p.q[:, 1:]], axis=1)
    with_both, one = (
        pykvedge.compress(plan, q, p.k, p.v, p.image_mask, projection=w).scores for q in (p.q, alone)
    )  # fmt: skip
    np.testing.assert_array_equal(with_both, one)
    lengths = np.linalg.norm(p.v[0, 0].astype(np.float16).astype(float), axis=1)
    plain = pykvedge.compress(plan.with_(params={"scorer.source": "prompt"}), alone, p.k, p.v, p.image_mask)
    np.testing.assert_allclose(one[0, 0], plain.scores[0, 0] * lengths, rtol=1e-3)


def test_what_is_refused_in_one_line(native):
    p, plan = prompt(20, size=16), plan_of()
    for wrong, engine in itertools.product((None, projection_of(plan, p)[:1]), ("native", "numpy")):
        with pytest.raises(ArrayError, match="projection"):
            pykvedge.compress(plan, *p.arguments, engine=engine, projection=wrong)
    with pytest.raises(UsageError, match="scorer 'replay'"):
        plan_of(critical="l1")
    assert native_plan.why_not_bounded(plan_of("prompt")) == ""
    made = pykvedge.plan("kvzip-plus")
    assert (made.allocator, made.projects, pykvedge.plan("kvzip").projects) == ("global", True, False)


# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "weight"), [("llama", "f32"), ("llama", "q4_0"), ("gemma3", "f32")])
def test_the_model_s_own_weights(native, tiny, kind, weight):
    """Scores of a pass are between its attention times the smallest and the largest addition of a query head."""
    file, tokens = tiny(kind, weight=weight).model, random_tokens(50)
    found = []
    for projected in (False, True):
        plan = pykvedge.plan("kvzip-plus", 0.3, **{"scorer.projected": projected})
        with ReplayContext(file, plan, "f32") as context:
            context.decode(tokens)
            context.read_chunk_again(ReplayChunk(0, 30, 12, 3), random_tokens(12, 7))
            context.read_chunk_again(ReplayChunk(30, 50, 7, 3), random_tokens(7, 8))
            found.append(context.scores())
            counts = enumerate(map(len, found[0]))
            values = [[libkvedge.rows(context.cache, i, h)[1] for h in range(n)] for i, n in counts]
            numbers, n_heads = context.cache.layer_ids(), context.llama.llama_model_n_head(context.model)
            context.cache.compress()
    for i, number in enumerate(numbers):
        w = weights_of(file, number, n_heads).astype(float)
        group = n_heads // len(values[i])
        for h, v in enumerate(values[i]):
            lengths = np.stack([np.linalg.norm(v @ w[h * group + g], axis=1) for g in range(group)])[:, 3:]
            plain, ours = found[0][i][h, 3:], found[1][i][h, 3:]
            assert (ours <= plain * lengths.max(axis=0) * 1.01 + 1e-7).all()
            assert (ours >= plain * lengths.min(axis=0) * 0.99 - 1e-7).all()
            assert (found[1][i][h, :3] == np.float32(FIRST)).all()
            if group == 1:
                np.testing.assert_allclose(ours, plain * lengths[0], rtol=1e-2, atol=1e-7)


def test_attention_of_all_heads_together_cannot_be_told_apart_later(native, tiny):
    with TinyContext(tiny("llama").model, plan_of("prompt", **{"scorer.projected": False})) as context:
        context.cache.set_auto_compress(False)
        context.decode(random_tokens(40))
        context.cache.set_plan(plan_of("prompt"))
        context.decode(random_tokens(20, 3))
        with pytest.raises(StateError, match="set the plan before the prompt"):
            context.cache.compress()
        context.cache.set_plan(plan_of("prompt", **{"scorer.projected": False}))
        context.cache.compress()
        context.cache.set_plan(plan_of("prompt"))
        context.decode(random_tokens(60, 4))
        context.cache.compress()  # query heads of a later prompt are recorded separately, which serves both plans


def test_a_conversation_and_a_bounded_prompt(native, tiny):
    few = Sampling(max_tokens=4, temp=0.0)
    with tiny("llama").session(pykvedge.plan("kvzip-plus", 0.4)) as session:
        assert say(session, WORDS, (), few).time.replay_s > 0
        assert say(session, WORDS * 2, (), few).kv.kept_bytes > 0
    made = []
    for bounded in (False, True):
        with tiny("llama").session(plan_of("prompt", 0.3), bounded=bounded) as session:
            report = say(session, WORDS * 3, (), few)
            made.append((report.text, session.engine.cache.lengths()))
            assert bool(report.bounded) is bounded
    assert made[0] == made[1]
