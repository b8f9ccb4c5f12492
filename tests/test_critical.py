"""The critical rule: the definition against loops, both engines, and the runtime against weights read from the file."""

import itertools
import json

import gguf
import numpy as np
import oracles
import pytest
from arrays import HEADS, LAYOUTS, projection_of, prompt
from attached import held
from contexts import TinyContext, random_tokens

import pykvedge
from pykvedge import ArrayError, Session, UsageError
from pykvedge.library import libkvedge
from pykvedge.library.native_plan import check_stream, why_not_bounded
from pykvedge.plans.plan import CRITICAL_HALF, Plan
from pykvedge.plans.registry import members, scorer
from pykvedge.reference.checks import rules
from pykvedge.reference.engine import select
from pykvedge.reference.stages.critical import value_weights

NORMS = ("l1", "l2")
SETTINGS = {"expected": {"scorer.vnorm": False}}


def plan_of(name, norm="l1", budget=0.3, **settings):
    return pykvedge.plan("h2o", budget, scorer=name, critical=norm, **{**SETTINGS.get(name, {}), **settings})


def attends(name):
    try:
        plan_of(name)
    except UsageError:
        return False
    return True


SCORERS = [name for name in members("scorer") if attends(name)]


def test_which_scorers_it_weighs(native):
    assert {"window", "cumulative", "mean", "expected"} <= set(SCORERS)
    assert not {"knorm", "keydiff", "dct", "position", "mixkv", "vnorm", "random"} & set(SCORERS)
    for name in set(members("scorer")) - set(SCORERS):
        with pytest.raises(UsageError, match=rf"scorer '{name}'.*critical none"):
            plan_of(name)
    with pytest.raises(UsageError, match=r"scorer\.vnorm=false"):
        pykvedge.plan("expected", critical="l2")
    assert scorer("window").attends({}) and not scorer("knorm").attends({})


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_weights_are_those_of_the_paper(norm, heads):
    p = prompt(7, HEADS[heads], size=8, layers=1)
    w = projection_of(plan_of("window"), p)[0]
    found, group = value_weights(p.v[0], w, norm), len(w) // len(p.v[0])
    for h, t in itertools.product(range(len(p.v[0])), range(7)):
        of_heads = [oracles.projected(p.v[0, h, t].tolist(), w[h * group + g].tolist(), norm) for g in range(group)]
        assert found[h, t] == pytest.approx(oracles.mean(of_heads), rel=1e-9)


@pytest.mark.parametrize("half", CRITICAL_HALF)
@pytest.mark.parametrize("recent", [0, 3, 30])
def test_tokens_are_those_of_the_paper(half, recent):
    rng = np.random.default_rng(recent)
    scores, weights = rng.random(90) ** 8, rng.gamma(0.5, 1.0, 90)
    image = np.zeros(90, dtype=bool)
    for n in (1, 2, 7, 29, 40, 89):
        plan = plan_of("window", budget=n, recent=min(recent, n), sinks=2 if n > recent + 2 else 0, critical_half=half)
        protected = {*range(plan.sinks), *range(90 - min(recent, n), 90)}
        expected = oracles.critical(scores.tolist(), weights.tolist(), n, protected, half)
        assert select(plan, scores, image, n, weights=weights).tolist() == expected


def test_text_goes_first_in_both_steps():
    image = np.arange(12) >= 4
    scores, weights = np.where(image, 2.0, 1.0), np.where(image, 5.0, 1e-3)
    plan = plan_of("cumulative", budget=6, recent=0, text_prior=True)
    assert select(plan, scores, image, 6, weights=weights).tolist() == [0, 1, 2, 3, 4, 5]
    assert select(plan.with_(text_prior=False), scores, image, 6, weights=weights).tolist() == [4, 5, 6, 7, 8, 9]


def test_of_a_scorer_with_two_scores_the_second_comes_first_and_counts():
    scores, weights, reserve = np.arange(20.0)[::-1], np.arange(20.0), np.arange(20.0) == 10
    plan = plan_of("mean", budget=10, recent=0)  # 3 of 10 by deviation: 10, 0 and 1, as all others are equal
    by_score, by_both = {2, 3}, {9, 8, 7, 11, 12}  # largest of (19 - t) t
    kept = select(plan, scores, np.zeros(20, bool), 10, reserve.astype(float), weights)
    assert set(kept.tolist()) == {10, 0, 1} | by_score | by_both


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", SCORERS)
def test_both_engines_choose_alike(native, name, heads):
    for norm, half, n_tokens in itertools.product(NORMS, CRITICAL_HALF, (1, 5, 150)):
        rules.engines_agree(plan_of(name, norm, critical_half=half), prompt(n_tokens, HEADS[heads]), "f16")


@pytest.mark.parametrize("settings", [
    {"allocator": "ada"}, {"allocator": "pyramid"}, {"allocator": "global"}, {"reducer": "pivotal"}, {"recent": 30},
    {"recent": 0, "sinks": 4}, {"text_prior": True}, {"text_prior": True, "text_overflow": "keep_all"},
], ids=str)  # fmt: skip
def test_both_engines_compose_alike(native, settings):
    for name, layout in itertools.product(("window", "mean"), LAYOUTS[:4:3]):
        for budget in (0.1, 40):
            rules.engines_agree(plan_of(name, "l1", budget, **settings), prompt(120, layout=layout, layers=3))


@pytest.mark.parametrize("size", [8, 80])
def test_head_sizes_storage_types_and_values_of_zero(native, size):
    p = prompt(70, size=size)
    p.v[:, :, 20:40] = 0
    for norm, kv_type in itertools.product(NORMS, ("f16", "bf16", "f32")):
        rules.engines_agree(plan_of("cumulative", norm, 0.5), p, kv_type)


def test_the_weights_decide(native):
    """A token whose value the projection removes is chosen last in the second step."""
    p, plan = prompt(80, (2, 1), size=16, layers=1), plan_of("cumulative", "l2", 40, recent=0)
    w = np.zeros((1, 2, 16, 3), np.float32)
    w[:, :, 0] = 1
    p.v[..., 0] = 1
    p.v[:, :, 40:, 0] = 0
    kept = pykvedge.compress(plan, *p.arguments, projection=w).kept[0][0]
    best = np.argsort(-pykvedge.compress(plan, *p.arguments, projection=w).scores[0, 0], kind="stable")[:20]
    assert set(best) <= set(kept) and set(kept) - set(best) <= set(range(40)) | set(best)


@pytest.mark.parametrize("step", [1, 24])
@pytest.mark.parametrize("name", [name for name in SCORERS if name != "mean"])
def test_streams(native, name, step):
    p = prompt(130 if step > 1 else 60)
    for norm in NORMS:
        plan = plan_of(name, norm, 36, **{"scorer.window": 8} if name == "window" else {})
        given = {"stream": step, "threads": 2, "projection": projection_of(plan, p)}
        ours, definition = (pykvedge.compress(plan, *p.arguments, engine=e, **given) for e in ("native", "numpy"))
        for layer, other in zip(ours.kept, definition.kept, strict=True):
            for head, its in zip(layer, other, strict=True):
                np.testing.assert_array_equal(head, its)
    with pytest.raises(UsageError, match="scorer 'mean'"):
        check_stream(plan_of("mean", budget=36))


def test_what_is_refused_in_one_line(native):
    p, plan = prompt(20, size=16), plan_of("window")
    w = projection_of(plan, p)
    wrong = {"missing": None, "a layer": w[:1], "a head": w[:, :2], "narrow": w[:, :, :8], "flat": w[0],
             "nan": np.full_like(w, np.nan), "whole": w.astype(int)}  # fmt: skip
    for made, engine in itertools.product(wrong.values(), ("native", "numpy")):
        with pytest.raises(ArrayError, match="projection"):
            pykvedge.compress(plan, *p.arguments, engine=engine, projection=made)
    for settings in ({"critical": "l3"}, {"critical": True}, {"critical_half": "both"}):
        with pytest.raises(UsageError, match="critical"):
            pykvedge.plan("snapkv", **settings)
    assert "critical chooses by two scores" in why_not_bounded(plan_of("window", allocator="global"))
    assert why_not_bounded(plan_of("window")) == why_not_bounded(plan_of("window", allocator="ada")) == ""


def test_presets_and_plans_as_json():
    made = pykvedge.plan("criticalkv-ada", 0.3, critical="l2", critical_half="free")
    assert (made.scorer, made.allocator, made.critical, made.critical_half) == ("window", "ada", "l2", "free")
    assert Plan.from_json(made.to_json()) == made
    older = {k: v for k, v in json.loads(pykvedge.plan("snapkv").to_json()).items() if not k.startswith("critical")}
    assert Plan.from_json(json.dumps(older)) == pykvedge.plan("snapkv")


# ---------------------------------------------------------------------------------------------------------------------


def weights_of(file, layer, n_heads):
    """Returns W_O [H, d_v, D] of a layer, read by the gguf library."""
    name = f"blk.{layer}.attn_output.weight"
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == name)
    rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return rows.reshape(len(rows), n_heads, -1).transpose(1, 2, 0)


def by_definition(context, file, plan, n):
    """Returns the tokens that each head of every layer must keep, from scores, values and weights."""
    out, n_heads = [], context.llama.llama_model_n_head(context.model)
    for layer, number in enumerate(context.cache.layer_ids()):
        scores = libkvedge.pending_scores(context.cache, layer)
        v = np.stack([libkvedge.rows(context.cache, layer, h)[1] for h in range(len(scores))])
        weights = value_weights(v, weights_of(file, number, n_heads), plan.critical)
        image = np.zeros(scores.shape[1], bool)
        each = zip(scores.astype(float), weights, strict=True)
        out.append([select(plan, s, image, n, weights=w).tolist() for s, w in each])
    return out


@pytest.mark.parametrize(("kind", "weight"), [
    *(("llama", weight) for weight in ("f32", "q8_0", "q4_0")), ("phi3", "f16"), ("qwen2vl", "q4_0"),
])  # fmt: skip
def test_the_model_s_own_weights(native, tiny, kind, weight):
    """On some CPUs, q4_0 is repacked in memory for matrix products."""
    file = tiny(kind, weight=weight).model
    for norm in NORMS:
        plan = pykvedge.plan("criticalkv", 0.3, critical=norm, **{"scorer.window": 8})
        with TinyContext(file, plan, "f32", threads=2) as context:
            context.cache.set_auto_compress(False)
            context.decode(random_tokens(160))
            expected = by_definition(context, file, plan, 48)
            context.cache.compress()
            assert context.held() == expected
            context.decode(random_tokens(90, 1))
            context.cache.compress()  # uses the weights that the first compression stored
            assert {len(head) for layer in context.held() for head in layer} == {48 + 32}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weight", ["f16", "q4_0"])
def test_bounded_prompts_keep_the_same(native, tiny, weight, norm):
    made = []
    for bounded in (False, True):
        plan = pykvedge.plan("criticalkv-ada", 0.3, critical=norm)
        with Session(tiny("llama", weight=weight).model, None, plan, bounded=bounded, threads=2) as session:
            answer = session.ask("What do you know of the tides of the sea, and of the moon? " * 6)
            sets = held(session.engine.cache)
            made.append((sets, "".join(piece for _, piece in zip(range(4), answer, strict=False))))
            answer.close()
            assert not bounded or answer.report.bounded
    assert made[0] == made[1]


def test_the_command_line(kvedge, tiny):
    chat = ["chat", *tiny("llama").arguments(), "--max-tokens", 2, "--json"]
    done = kvedge(*chat, "--method", "snapkv", "--critical", "l2", "--critical-half", "free", "Hello? " * 40)
    assert done.code == 0 and done.json["tokens"]["prompt"] > 40
    assert "l1, after the first half (budget)" in kvedge("methods", "criticalkv").out
    kvedge(*chat, "--method", "keydiff", "--critical", "l1", "Hello?").failed(2, "scorer 'keydiff'", "critical none")
    kvedge(*chat, "--critical", "l7", "--method", "snapkv", "Hello?").failed(2, "critical 'l7'")
