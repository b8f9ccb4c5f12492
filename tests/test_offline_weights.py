"""MixKV with redundancies from a profile, and plans with several stages that need a profile."""

import itertools

import numpy as np
import oracles
import pytest
from arrays import prompt
from attached import held, llama
from conftest import DEMO

import pykvedge
from kvedge_lab.calibrate.heads import key_redundancy
from kvedge_lab.calibrate.samples import scenes
from pykvedge import Profile, ProfileError, UsageError
from pykvedge.library.libkvedge import rows
from pykvedge.library.native_plan import compress_arrays
from pykvedge.models import profiles
from pykvedge.reference.checks import suite
from pykvedge.reference.engine import Arrays
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable

OFFLINE = {"scorer.source": "profile"}
SMALL = {**OFFLINE, "scorer.window": 8}
BOTH = pykvedge.plan("mixkv-sparsemm", 0.5, **OFFLINE)


def redundancies(values):
    return Profile("key-redundancy", np.asarray(values, dtype=np.float64))


def heads(values):
    return Profile("visual-heads", np.asarray(values, dtype=np.float64))


def same(a, b):
    return all(np.array_equal(x, y) for r, s in zip(a.kept, b.kept, strict=True) for x, y in zip(r, s, strict=True))


# Scores


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize(("r", "mode"), [(0.0, "importance"), (0.5, "even"), (1.0, "diversity")])
def test_one_redundancy_for_all_heads_is_a_mode_of_its_own(native, engine, r, mode):
    p = prompt(90, layers=3)
    given = {"profile": redundancies(np.full((3, 2), r)), "engine": engine}
    offline = pykvedge.compress(pykvedge.plan("mixkv", 0.4, **SMALL), *p.arguments, **given)
    plan = pykvedge.plan("mixkv", 0.4, **{"scorer.window": 8, "scorer.mode": mode})
    plain = pykvedge.compress(plan, *p.arguments, engine=engine)
    np.testing.assert_array_equal(offline.scores, plain.scores)
    assert same(offline, plain)


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_a_profile_of_one_prompt_is_what_that_prompt_has_online(native, engine):
    """The redundancies come from all pairs of keys, one by one."""
    p = prompt(40, layers=2, size=16)
    p.k[0, 1] += 1.5  # makes the heads different
    kept = p.k.astype(np.float16).astype(np.float64)
    own = redundancies([[oracles.redundancy(head.tolist()) for head in layer] for layer in kept])
    assert np.ptp(own.values) > 0.3
    online = pykvedge.compress(pykvedge.plan("mixkv", 0.5, **{"scorer.window": 8}), *p.arguments, engine=engine)
    plan = pykvedge.plan("mixkv", 0.5, **SMALL)
    offline = pykvedge.compress(plan, *p.arguments, engine=engine, profile=own)
    np.testing.assert_allclose(offline.scores, online.scores, rtol=1e-5)
    assert same(offline, online)
    swapped = redundancies(own.values[:, ::-1])  # each head gets the other's
    assert not same(pykvedge.compress(plan, *p.arguments, engine=engine, profile=swapped), online)


def test_the_order_of_heads_matters_by_design():
    row = suite._commutes(lambda: pykvedge.plan("mixkv", 0.3, **OFFLINE))
    assert (row.status, row.cases) == ("by design", 0) and "scorer 'mixkv'" in row.note


# Two profiles


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_each_stage_takes_the_profile_that_fits_it(native, engine):
    p = prompt(120, layers=2)
    rng = np.random.default_rng(0)
    a, b = heads(rng.gamma(0.3, 1.0, (2, 4))), redundancies(rng.random((2, 2)))
    plan = pykvedge.plan("mixkv-sparsemm", 0.4, **SMALL)
    results = [pykvedge.compress(plan, *p.arguments, engine=engine, profile=given) for given in ([a, b], (b, a))]
    assert same(*results)
    lengths = {len(head) for layer in results[0].kept for head in layer}
    assert len(lengths) > 1  # one profile gives the heads' budgets
    other = pykvedge.compress(plan, *p.arguments, engine=engine, profile=[a, redundancies(1 - b.values)])
    assert {len(head) for layer in other.kept for head in layer} == lengths and not same(other, results[0])


MIXKV, SPARSEMM = pykvedge.plan("mixkv", 0.5, **OFFLINE), pykvedge.plan("sparsemm", 40)
CALIBRATED = pykvedge.plan("snapkv", 20, allocator="calibrated")
PREFIX = pykvedge.plan("sparsemm", 40, allocator="prefix", **{"allocator.source": "profile"})


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_what_does_not_fit_is_refused(native, engine):
    p = prompt(60, (4, 2), layers=2)
    a, b, c = heads(np.ones((2, 4))), redundancies(np.ones((2, 2))), Profile("prefix", np.ones((2, 1)), (0.2,))
    shares = Profile("head-budgets", np.full((2, 2), 0.25))
    for given, plan, says in (
        (None, MIXKV, r"key-redundancy profile \(scorer 'mixkv'\).*`kvedge calibrate heads --kind redundancy`"),
        (None, SPARSEMM, "kvedge calibrate heads"),
        (None, CALIBRATED, r"needs a head-budgets profile \(allocator 'calibrated'\).*`kvedge calibrate budgets`"),
        (a, BOTH, r"needs a key-redundancy profile \(scorer 'mixkv'\)"),
        (b, BOTH, r"needs a visual-heads profile \(allocator 'heads'\)"),
        ([a, b, b], BOTH, "two profiles were given for scorer 'mixkv'"),
        (a, MIXKV, "kind 'visual-heads' does not fit scorer 'mixkv'; make a profile with `kvedge calibrate heads"),
        (c, BOTH, "kind 'prefix' does not fit scorer 'mixkv' or allocator"),
        (c, SPARSEMM, "kind 'prefix' does not fit"),
        (b, SPARSEMM, "kind 'key-redundancy' does not fit allocator 'heads'"),
        (b, CALIBRATED, "kind 'key-redundancy' does not fit allocator 'calibrated'"),
        (a, CALIBRATED, "kind 'visual-heads' does not fit"),
        *((shares, plan, "kind 'head-budgets' does not fit") for plan in (SPARSEMM, MIXKV)),
        *((redundancies(np.ones(s)), MIXKV, "belongs to another model") for s in ((2, 4), (3, 2), (1, 2), (2, 1))),
        *((heads(np.ones(s)), SPARSEMM, "belongs to another model") for s in ((3, 4), (2, 2), (2, 8), (1, 4))),
        *((Profile("head-budgets", np.full(s, 1 / np.prod(s))), CALIBRATED, "another model") for s in ((3, 2), (2, 4))),
        ([redundancies(np.ones((2, 4))), a], BOTH, "belongs to another model"),
    ):
        with pytest.raises(ProfileError, match=says):
            pykvedge.compress(plan, *p.arguments, engine=engine, profile=given)
    assert pykvedge.compress(BOTH, *p.arguments, engine=engine, profile=[a, b]).kept


ONES, OF_QUERIES, OF_LAYERS = np.ones((2, 2)), np.ones((2, 4)), np.ones((2, 1))


@pytest.mark.parametrize(("plan", "values", "budgets", "says"), [
    (MIXKV, ONES, (), ""), (SPARSEMM, OF_QUERIES, (), ""), (CALIBRATED, np.full((2, 2), 7.0), (), ""),  # in any unit
    *((plan, OF_QUERIES, (), "4 KV heads per layer, the model has 2") for plan in (MIXKV, CALIBRATED)),
    *((plan, np.ones((3, 2)), (), "3 layers, the model has 2") for plan in (MIXKV, CALIBRATED)),
    *((plan, ONES, (0.2, 0.5), "KV heads, without budgets") for plan in (MIXKV, CALIBRATED)),
    (MIXKV, np.full((2, 2), 1.1), (), "above 1"), (MIXKV, np.full((2, 2), -0.1), (), "not negative"),
    *((plan, np.full((2, 2), np.nan), (), "finite") for plan in (MIXKV, CALIBRATED)),
    (CALIBRATED, np.zeros((2, 2)), (), "no share above 0"), (CALIBRATED, None, (), "kvedge calibrate budgets"),
    (SPARSEMM, None, (), "kvedge calibrate heads"), (SPARSEMM, ONES, (), "2 query heads per layer, the model has 4"),
    (SPARSEMM, np.ones((3, 4)), (), "3 layers, the model has 2"), (SPARSEMM, np.full((2, 4), -1.0), (), "not negative"),
    *((SPARSEMM, np.full((2, 4), wrong), (), "finite") for wrong in (np.nan, np.inf)),
    (SPARSEMM, OF_LAYERS, (0.5,), "of query heads"), (PREFIX, OF_QUERIES, (), "kept shares by budget"),
    *((PREFIX, ONES, wrong, "ascending") for wrong in ((0.5, 0.2), (0.0, 0.5), (0.2, 1.5), (np.nan, 0.5))),
    (PREFIX, np.full((2, 1), 1.5), (0.5,), r"\[0, 1\]"),
    (pykvedge.plan("snapkv", 40, allocator="uniform"), OF_QUERIES, (), "allocator 'uniform' takes no profile"),
    (pykvedge.plan("snapkv", 40), {"scorer": ONES}, (), "scorer 'window' takes no profile"),
    (BOTH, {"scorer": ONES}, (), "allocator 'heads' needs a profile"),
    (BOTH, {"allocator": OF_QUERIES}, (), "scorer 'mixkv' needs"),
])  # fmt: skip
def test_the_library_refuses_by_itself_what_python_would_never_send(native, plan, values, budgets, says):
    p = prompt(60, (4, 2), layers=2)
    given = values if isinstance(values, dict) else {"scorer" if plan is MIXKV else "allocator": values}
    tables = {stage: ProfileTable(np.array(of, np.float32), np.array(budgets, np.float32))
              for stage, of in given.items() if of is not None}  # fmt: skip
    arrays = Arrays(p.q, p.k, p.v, p.image_mask.astype(np.uint8))
    if not says:
        assert compress_arrays(plan, arrays, KvType.parse("f16"), 1, tables).kept
        return
    with pytest.raises(UsageError, match=says):
        compress_arrays(plan, arrays, KvType.parse("f16"), 1, tables or None)


# With models


def kept_by(session, sample):
    session.ask(sample.question, sample.pictures)
    return held(session.engine.cache)


def test_calibrating_on_one_prompt_gives_that_prompts_redundancies(native, own_folder):
    [sample] = itertools.islice(scenes("key-redundancy"), 1)
    with DEMO.session(pykvedge.plan("full")) as session:
        values, used = key_redundancy(session, [sample], 5)
        session.ask(sample.question, sample.pictures)
        keys = [[rows(session.engine.cache, i, h)[0].astype(np.float64) for h in range(2)] for i in range(5)]
    assert used == 1 and values.shape == (5, 2)
    for layer, head in itertools.product(range(5), range(2)):
        units = keys[layer][head] / np.linalg.norm(keys[layer][head], axis=1, keepdims=True)
        similar = units @ units.T
        n = len(units)
        assert values[layer, head] == pytest.approx((similar.sum() - np.trace(similar)) / (n * (n - 1)), abs=1e-9)
    kept = []
    for settings, given in (({}, None), (OFFLINE, redundancies(values)), (OFFLINE, redundancies(0 * values))):
        with DEMO.session(pykvedge.plan("mixkv", 0.5, **settings), profile=given) as session:
            kept.append(kept_by(session, sample))
    assert kept[0] == kept[1] != kept[2]


def test_the_mean_is_over_samples(native):
    samples = list(itertools.islice(scenes("key-redundancy"), 2))
    with DEMO.session(pykvedge.plan("full")) as session:
        each = [key_redundancy(session, [sample], 1)[0] for sample in samples]
        both, used = key_redundancy(session, iter(samples), 10)
    assert used == 2 and not np.allclose(*each)
    np.testing.assert_allclose(both, np.mean(each, axis=0), rtol=1e-12)


def test_both_profiles_of_the_demo_model_are_found(native, own_folder):
    found = profiles.find(BOTH, DEMO.model)
    assert {stage: made.kind for stage, made in found.items()} == BOTH.profile_kinds()
    assert found["scorer"].values.shape == (5, 2) and found["scorer"].samples == 50
    [sample] = itertools.islice(scenes("key-redundancy"), 1)
    kept = []
    for given in (None, profiles.SHIPPED / profiles.file_name("key-redundancy", profiles.hash_of(DEMO.model)),
                  [redundancies(np.zeros((5, 2))), heads(np.eye(5, 4))]):  # fmt: skip
        with DEMO.session(BOTH, profile=given) as session:
            kept.append(kept_by(session, sample))
    assert kept[0] == kept[1] != kept[2]


def test_rows_belong_to_the_layers_of_the_model(native, tiny):
    """llama.cpp keeps gemma3's sliding-window layers, so only the profile's other rows count."""
    model, text = tiny("gemma3"), "The quick brown fox jumps over the lazy dog. " * 6
    kept = []
    with model.session() as session:
        session.ask("Good morning").read()
        cache, n_layers = session.engine.cache, session.model.n_layer
        stored, n_heads_kv = cache.layer_ids(), native.shape(cache, 0)[1]
    assert 0 < len(stored) < n_layers
    for own, others in ((0.0, 1.0), (0.0, 0.0), (1.0, 0.0)):
        values = np.full((n_layers, n_heads_kv), others)
        values[stored] = own
        plan = pykvedge.plan("mixkv", 20, **{**OFFLINE, "scorer.window": 4})
        with model.session(plan, profile=redundancies(values)) as session:
            session.ask(text)
            cache = session.engine.cache
            kept.append([[cache.tokens(i, h) for h in range(n_heads_kv)] for i in range(len(stored))])
    assert kept[0] == kept[1] != kept[2]


def test_a_conversation_keeps_profiles_for_the_plans_to_come(own_folder, tiny, profile_file, native):
    model = tiny("llama")
    both = [profile_file(model.model, kind) for kind in ("visual-heads", "key-redundancy")]
    chosen = (("sparsemm", {}), ("mixkv", SMALL), ("h2o", {}), ("mixkv-sparsemm", SMALL))
    plans = [pykvedge.plan(name, 0.6, **settings) for name, settings in chosen]
    with model.session(plans[3], profile=both) as session:
        for plan in plans:
            session.set_plan(plan)
            session.ask("And now something else, please. " * 8).read()
        with pytest.raises(ProfileError, match="prefix profile"):
            session.set_plan(pykvedge.plan("prefixkv", **{"allocator.source": "profile"}))
    for plan in plans[:2]:  # the first plan must need every given profile
        with pytest.raises(ProfileError, match="does not fit"):
            model.session(plan, profile=both)


def test_a_cache_refuses_a_plan_without_its_profile(native, tiny):
    from contexts import TinyContext

    context = TinyContext(tiny("llama").model, pykvedge.plan("h2o"))
    for plan in (pykvedge.plan("mixkv", **OFFLINE), BOTH):
        with pytest.raises(UsageError, match="needs a profile"):
            context.cache.set_plan(plan)
    context.llama.llama_free(context.context)  # also without the context
    with pytest.raises(UsageError, match="needs a profile"):
        context.cache.set_plan(BOTH)
    context.cache.detach()


def test_attach_takes_several(native, tiny, profile_file):
    files, plan = tiny("llama"), pykvedge.plan("mixkv-sparsemm", 0.5, **SMALL)
    both = [profile_file(files.model, kind) for kind in ("visual-heads", "key-redundancy")]
    with pytest.raises(ProfileError, match="does not fit"), llama(files, "sparsemm", 0.5, profile=both):
        pass
    with llama(files, plan, profile=both) as (llm, attached):
        attached.set_plan("sparsemm", 0.5)
        attached.set_plan(plan)
        assert llm("The quick brown fox jumps over the lazy dog. " * 4, max_tokens=2)["choices"]
        assert len({n for layer in attached.kept() for n in layer}) > 1 and attached.stats().n_compressions == 1


# The program


def test_chat_takes_several_profiles(kvedge, tiny, profile_file, tmp_path):
    model = tiny("llama")
    given = [["--profile", profile_file(model.model, kind)] for kind in ("visual-heads", "key-redundancy", "prefix")]
    arguments = ["chat", *model.arguments(), "--max-tokens", 2, "--budget", 0.6, "--set", "scorer.window=4"]
    arguments += ["--set", "scorer.source=profile", "--method", "mixkv-sparsemm", "The quick brown fox " * 8]
    empty = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = kvedge(*arguments, *given[0], *given[1], "--json", env=empty)
    assert done.code == 0 and len(set(done.json["kv"]["kept_per_layer"])) == 2
    kvedge(*arguments, *given[0], env=empty).failed(2, "key-redundancy", "`kvedge calibrate heads --kind redundancy`")
    kvedge(*arguments, *given[0], *given[1], *given[2], env=empty).failed(2, "kind 'prefix' does not fit")
    kvedge(*arguments, *given[0], *given[0], env=empty).failed(2, "two profiles", "allocator 'heads'")


def test_methods_tell_what_a_plan_needs(kvedge):
    assert "scorer.source = online: " in kvedge("methods", "mixkv").out
    listed = {row["name"]: row["profiles"] for row in kvedge("methods", "--json").json}
    assert listed["mixkv-headkv"] == {"allocator": "retrieval-heads"} and listed["mixkv"] == {}
    shown = kvedge("methods", "sparsemm").out
    assert "visual-heads of the model for the allocator, made by `kvedge calibrate heads`" in " ".join(shown.split())
