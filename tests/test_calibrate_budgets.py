"""kvedge calibrate budgets: the exchange against plain loops, the curves of a model, runs that were stopped."""

import itertools
import shutil
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import oracles_budgets as oracles
import pytest
from choosing import whole
from conftest import DEMO

import pykvedge
from kvedge_lab.calibrate.budgets import CurveFile, Curves, measure_curves, setup_for
from kvedge_lab.calibrate.exchange import FLOOR, STEPS, costs, exchange
from kvedge_lab.calibrate.samples import SEED, Labelled, read_jsonl, scenes
from kvedge_lab.eval import metrics
from kvedge_lab.eval.measure import CONTEXT, CONVERSATION
from kvedge_lab.eval.reader import Reader
from pykvedge import CancelledError, KvedgeError, ProfileError, SaveError, Settings, UsageError
from pykvedge.models.profiles import hash_of
from pykvedge.models.vision import Vision
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime.loaded import borrow

POINTS = (0.01, 0.03, 0.1, 0.3, 1.0)
PLACES = [(layer, head) for layer in range(5) for head in range(2)]  # of the packaged model
NONE = np.zeros(0, dtype=np.float32)


def falling(seed, n_heads, points=POINTS):
    """Returns losses [heads, points] that mostly fall, as measured losses do, but not always."""
    rng = np.random.default_rng(seed)
    losses = rng.gamma(0.5, 1.0, (n_heads, 1)) * np.exp(-rng.uniform(2, 60, (n_heads, 1)) * np.array(points))
    return losses + rng.normal(0, 1e-3, losses.shape)


# The exchange


@pytest.mark.parametrize("targets", [(0.1,), (0.02, 0.1), (0.05, 0.1, 0.2), (0.9,)])
@pytest.mark.parametrize(("n_heads", "floor"), [(1, 0.1), (2, 0.0), (4, 0.1), (7, 0.33)])
def test_shares_are_those_of_single_steps(targets, n_heads, floor):
    for seed in range(2):
        losses = falling(seed, n_heads)
        found = exchange(np.array(POINTS), losses, targets, floor)
        np.testing.assert_allclose(found, oracles.exchanged(POINTS, losses.tolist(), targets, floor), atol=1e-12)
        assert found.sum() == pytest.approx(1, abs=1e-12) and found.min() >= floor / n_heads - 1e-12


def test_no_single_step_is_left_that_gains():
    losses, targets = falling(5, 12), (0.05, 0.2)
    steps = np.rint(exchange(np.array(POINTS), losses, targets) * 12 * STEPS).astype(int)
    at = costs(np.array(POINTS), losses, targets, steps.max() + 1)
    total = sum(at[i, n] for i, n in enumerate(steps))
    assert total < at[:, STEPS].sum()  # less than with even shares
    for to, giver in itertools.permutations(range(12), 2):
        if steps[giver] > FLOOR * STEPS:
            moved = steps + np.eye(12, dtype=int)[to] - np.eye(12, dtype=int)[giver]
            assert sum(at[i, n] for i, n in enumerate(moved)) >= total - 1e-9


def test_heads_alike_keep_even_shares_and_of_equal_ones_the_first_gains():
    even = np.tile([4.0, 3.0, 2.0, 1.0, 0.0], (3, 1))
    assert exchange(np.array([0.0, 0.25, 0.5, 0.75, 1.0]), even, (0.1,)).tolist() == [1 / 3] * 3
    assert exchange(np.array(POINTS), np.zeros((3, 5)), (0.1,)).tolist() == [1 / 3] * 3
    flat = np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    found = np.rint(exchange(np.array([0.0, 1.0]), flat, (0.5,)) * 3 * STEPS)
    assert found.tolist() == [5, 95, 50]  # the first head gets everything that the head without a loss can give
    found = np.rint(exchange(np.array([0.0, 1.0]), flat, (0.9,)) * 3 * STEPS)
    assert found.tolist() == [38, 56, 56]  # a head that keeps the whole prompt gains nothing more


@pytest.mark.parametrize("targets", [(), (0.0,), (1e-9,), (1.0,), (0.1, 2.0), (float("nan"),)])
def test_targets_are_budgets(targets):
    with pytest.raises(UsageError, match="targets must be shares"):
        exchange(np.array(POINTS), falling(0, 2), targets)


# Curves of a model


@pytest.fixture(scope="module")
def demo(native):
    loan = borrow(DEMO.model, DEMO.mmproj, Settings(threads=1), lambda *_: None, None)
    reader = Reader(loan.model, Vision(loan.encoder), 1, KvType.parse("f16"), n_outputs=5)  # outputs of one pass
    yield reader
    reader.close()
    loan.give_back()


def measured(reader, setup, sample, way=CONVERSATION):
    """Returns the curves of one sample."""
    kept = CurveFile(None, {}, len(setup.points))
    return measure_curves(reader, replace(setup, ways=(way,)), [sample], 1, kept, lambda *_: lambda *_: None)


UNEVEN = np.array([[2, 1], [2, 3], [4, 2], [1, 1], [2, 2]]) / 20  # little for the heads that the demo model needs most


@pytest.mark.parametrize(("around", "way"), [(UNEVEN, CONVERSATION), (UNEVEN, CONTEXT), *whole((None, CONVERSATION))])
def test_a_curve_is_the_divergence_of_answers_that_are_fed_token_by_token(demo, around, way):
    """Compared with a separate session for every point, which reads the prompt again."""
    setup = replace(setup_for("window", 0.1, 3, (0.1,)), around=around)
    others = np.full(10, 0.1, np.float32) if around is None else around.ravel().astype(np.float32)
    [sample] = itertools.islice(scenes("head-budgets"), 3, 4)  # a code that a budget of a tenth does not answer
    curves = measured(demo, setup, sample, way)
    losses, even = curves.losses, curves.baseline
    assert losses.shape == (10, 3) and curves.places == list(itertools.product(range(5), range(2)))
    counted = pykvedge.plan("snapkv", 0.1, allocator="calibrated", **{"allocator.share_of": "prompt"})

    def followed(shares):
        """Returns log-probabilities after each token of the answer, and the numbers of held and of all pairs."""
        with DEMO.session(pykvedge.plan("snapkv", 0.1)) as session:
            pieces, engine = session.first_prompt(sample.question, sample.pictures), session.engine
            later = []
            if way == CONTEXT:  # system text, an image, the question
                *pieces, last = pieces
                later = last.tokens
            engine.make_room(pieces, session.plan)
            engine.encode(pieces, lambda *_: None, None)
            engine.prefill(pieces, lambda *_: None, None)
            engine.cache.set_plan(counted, {"allocator": ProfileTable(shares.reshape(5, 2), NONE)})
            engine.compress()
            held, out = np.array(engine.cache.lengths()).ravel(), []
            for token in [*later, *demo.model.tokenize(sample.answer)]:
                engine.extend(token)
                out.append(metrics.log_softmax(engine.context.logits()))
            session.release(pieces)
            return out[max(0, len(later) - 1) :], held, sum(p.n_tokens for p in pieces)

    full, held, n = followed(np.ones(10, np.float32))
    assert set(held.tolist()) == {n}
    for i, j in ((0, 0), (6, 1), (7, 2), (None, None)):
        shares = others.copy()
        if i is not None:
            shares[i] = setup.points[j]
        found, held, _ = followed(shares)
        assert held.tolist() == [max(1, int(float(share) * n + 0.5)) for share in shares]
        divergence = np.mean([(np.exp(p) * (p - q)).sum() for p, q in zip(full, found, strict=True)])
        loss = even if i is None else losses[i, j]
        assert divergence > 0.05 and loss == pytest.approx(divergence, rel=0.02)  # batches round differently


def test_a_sample_without_an_answer_is_measured_on_the_models_own(demo):
    [sample] = itertools.islice(scenes("head-budgets"), 1)
    setup = setup_for("window", 0.1, 2, (0.1,))
    own = measured(demo, setup, Labelled(sample.question, sample.pictures))
    same = measured(demo, setup, sample)  # the model answers this sample right
    np.testing.assert_allclose(own.losses, same.losses, rtol=0.02, atol=1e-3)


def test_samples_count_the_same_and_an_estimate_comes_early(demo):
    setup = setup_for("keydiff", 0.1, 2, (0.1,))
    first, second = itertools.islice(scenes("head-budgets", seed=5), 2)
    told = []

    def tell(runs, seconds):
        told.append((runs, seconds))
        return lambda what, n: told.append(n)

    both = measure_curves(demo, setup, [first, second], 2, CurveFile(None, {}, 2), tell)
    alone = [measured(demo, setup, sample).losses for sample in (first, second)]
    np.testing.assert_allclose(both.losses, np.mean(alone, axis=0), rtol=1e-6, atol=1e-9)
    assert both.samples == 2 and told[0][0] == 40 and told[0][1] > 0 and sum(told[1:]) == 40


def test_settings_of_stages_are_measured_with():
    setup = setup_for(None, 0.07, 2, (0.1,), "kvedge", settings={"scorer.outlier": 0.0})
    assert setup.plan == pykvedge.plan("kvedge", 0.07, allocator="uniform", **{"scorer.outlier": 0.0})
    usual = setup_for(None, 0.07, 2, (0.1,), "kvedge")
    assert "settings" not in usual.header(DEMO.model, "scenes")
    assert setup.header(DEMO.model, "scenes")["settings"] == dict(setup.plan.params)


def test_samples_are_drawn_when_they_are_measured(demo):
    """A million scenes do not fit in memory, and Ctrl-C stops their drawing."""
    cancel, drawn = threading.Event(), []

    def endless():
        for sample in scenes("head-budgets"):
            drawn.append(sample)
            yield sample

    def on_estimate(runs, seconds):
        assert runs == 10**6 * 10 * 2
        cancel.set()
        return lambda what, n: None

    with pytest.raises(CancelledError):
        measure_curves(
            demo, setup_for("window", 0.1, 2, (0.1,)), endless(), 10**6, CurveFile(None, {}, 2), on_estimate, cancel
        )
    assert len(drawn) == 1


def test_both_ways_of_a_sample_count_the_same(demo):
    setup = setup_for(None, 0.1, 2, (0.1,), "kvedge", (CONTEXT, CONVERSATION))
    assert (setup.plan.scorer, setup.plan.reducer, setup.plan.allocator) == ("modal", "nearest", "uniform")
    sample = next(s for s in scenes("head-budgets", questions=3) if len(s.earlier) == 2 and len(s.pictures) == 1)
    kept = CurveFile(None, {}, 2)
    found = measure_curves(demo, setup, [sample], 1, kept, lambda runs, s: lambda what, n: None)
    each = [measured(demo, setup, sample, way).losses for way in (CONTEXT, CONVERSATION)]
    np.testing.assert_allclose(found.losses, np.mean(each, axis=0), rtol=1e-6, atol=1e-9)
    assert found.samples == 1 and not np.allclose(*each, rtol=0.1)
    text = Labelled("What is it?", (), answer="A bird.")  # this question has no context
    assert list(setup.readings([text])) == [(text, CONVERSATION)]
    later = replace(text, earlier=(("Is it blue?", "Yes."),))
    assert [way for _, way in setup.readings([later])] == [CONTEXT, CONVERSATION]
    with pytest.raises(UsageError, match="needs samples with images or earlier questions"):
        measure_curves(demo, replace(setup, ways=(CONTEXT,)), [text], 1, kept, None)


def test_scenes_are_asked_about_once_twice_and_thrice():
    drawn = list(itertools.islice(scenes("head-budgets", questions=3), 12))
    assert [len(s.pictures) for s in drawn] == 6 * [1, 4] and [len(s.earlier) for s in drawn] == 2 * [0, 0, 1, 1, 2, 2]
    for sample in drawn:
        messages = sample.messages()
        assert [m.role for m in messages] == [*(["user", "assistant"] * len(sample.earlier)), "user"]
        assert [len(m.pictures) for m in messages] == [len(sample.pictures)] + [0] * (len(messages) - 1)
        asked = [m.text for m in messages[::2]]
        assert len(set(asked)) == len(asked) and asked[-1] == sample.question
    again = next(scenes("head-budgets", questions=3))
    assert again == drawn[0] != next(scenes("head-budgets", 7, 3))


def test_what_was_stopped_goes_on_where_it_was(demo, tmp_path):
    setup, cancel, seen = setup_for("window", 0.1, 2, (0.1,)), threading.Event(), []
    header, path = setup.header(DEMO.model, "scenes"), tmp_path / "losses.jsonl"

    def step(what, n):
        seen.append(what)
        if len(seen) == 22:  # the first head is reported once
            cancel.set()

    def run(kept, cancel=None):
        with closing(kept):
            return measure_curves(demo, setup, scenes("head-budgets"), 2, kept, lambda runs, s: step, cancel)

    with pytest.raises(CancelledError):
        run(CurveFile(path, header, 2), cancel)
    assert len(path.read_bytes().splitlines()) == 1 + 11 + 1  # ten heads, the end of a sample, one head of the next
    with path.open("ab") as file:
        file.write(b'{"sample": 1, "la')  # as after a power cut
    gone_on = run(CurveFile(path, header, 2, resume=True))
    assert seen[22] == "layer 0, head 1" and len(seen) == 22 + 17
    np.testing.assert_allclose(gone_on.losses, run(CurveFile(None, {}, 2)).losses, rtol=1e-6, atol=1e-9)
    again = run(CurveFile(path, header, 2, resume=True))  # nothing remains to do
    assert again.losses.tolist() == gone_on.losses.tolist() and again.places == gone_on.places


def test_files_of_losses_that_do_not_fit(tmp_path):
    header, path = setup_for("window", 0.1, 2, (0.1,)).header(DEMO.model, "scenes"), tmp_path / "losses.jsonl"
    kept = CurveFile(path, header, 2)
    kept.add(0, (0, 1), [0.5, 0.25])
    kept.end(0, 0.125)
    kept.close()
    with pytest.raises(UsageError, match="add --resume"):
        CurveFile(path, header, 2)
    read = CurveFile(path, header, 2, resume=True)
    assert read.heads == {0: {(0, 1): [0.5, 0.25]}} and read.baselines == {0: 0.125}
    read.close()
    other = setup_for("window", 0.1, 3, (0.1,)).header(DEMO.model, "scenes")
    narrow = setup_for("window", 0.1, 2, (0.1,), settings={"scorer.window": 8}).header(DEMO.model, "scenes")
    for changed, says in (
        (narrow, "with settings"),
        ({**header, "scorer": "mixkv"}, "scorer 'window', not 'mixkv'"), (other, "with points"),
        ({**header, "model": "another"}, "with model"), ({**header, "compress": ["context"]}, "with compress"),
        ({**header, "around": [[0.5, 0.5]]}, "with around"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            CurveFile(path, changed, 2, resume=True)
    whole = path.read_bytes()
    for damaged in (b"[1]\n", b"no JSON\n", b"{}\n", whole + b"[]\n", whole + b'{"sample": 1, "baseline": NaN}\n',
                    whole + b'{"sample": 1, "layer": 0, "head": 0, "losses": [1]}\n',
                    whole + b'{"sample": 1, "layer": 0, "head": 0, "losses": [-1, 1]}\n',
                    whole + b'{"sample": 1, "layer": 0, "head": 0, "losses": [1, 1e300]}\n',
                    whole + b'{"sample": 1, "layer": 0, "head": 1.5, "losses": [1, 1]}\n',
                    whole + b'{"sample": 1, "layer": -1, "head": 0, "losses": [1, 1]}\n'):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match="does not contain losses"):
            CurveFile(path, header, 2, resume=True)
        assert path.read_bytes() == damaged


def test_files_of_losses_with_other_heads_make_no_profile(demo, tmp_path):
    """Each head of the model is in each finished sample: a lost line, or a line of another model, is no loss of 0."""
    setup, path, drawn = setup_for("window", 0.1, 2, (0.1,)), tmp_path / "losses.jsonl", scenes("head-budgets")
    samples = list(itertools.islice(drawn, 2))
    for change in (lambda places: places[:-1], lambda places: [*places, (99, 0)], lambda places: places):
        path.unlink(missing_ok=True)
        with closing(CurveFile(path, {}, 2)) as kept:
            for number, places in enumerate((PLACES, change(PLACES))):
                for place in places:
                    kept.add(number, place, [0.5, 0.0])
                kept.end(number, 0.5)
        with closing(CurveFile(path, {}, 2, resume=True)) as kept:
            if change(PLACES) == PLACES:
                assert measure_curves(demo, setup, samples, 2, kept, lambda *_: None).places == PLACES
                continue
            with pytest.raises(UsageError, match="the file of losses has other heads than the model"):
                measure_curves(demo, setup, samples, 2, kept, lambda *_: None)


def test_two_programs_do_not_write_to_one_file(tmp_path):
    header, path = setup_for("window", 0.1, 2, (0.1,)).header(DEMO.model, "scenes"), tmp_path / "losses.jsonl"
    kept = CurveFile(path, header, 2)
    kept.add(0, (0, 1), [0.5, 0.25])
    (tmp_path / "link.jsonl").symlink_to(path)
    for name in (path, tmp_path / "link.jsonl"):
        with pytest.raises(SaveError, match="in use by another kvedge; wait until the other kvedge ends"):
            CurveFile(name, header, 2, resume=True)
    kept.add(0, (0, 2), [0.25, 0.5])
    kept.close()
    with closing(CurveFile(path, header, 2, resume=True)) as read:
        assert read.heads == {0: {(0, 1): [0.5, 0.25], (0, 2): [0.25, 0.5]}}


def test_losses_belong_to_the_pictures_and_the_encoder(tmp_path, picture_file):
    """Only the pixels of a picture count: a copy under the same name is the same picture."""
    setup, data, picture = setup_for("window", 0.1, 2, (0.1,)), tmp_path / "own.jsonl", tmp_path / "a.png"
    data.write_text('{"image": "a.png", "question": "What is it?", "answer": "A car."}')

    def header(size, mmproj=None):
        shutil.copy(picture_file("a.png", *size), picture)
        return setup.header(DEMO.model, data, read_jsonl(data), mmproj)

    first = header((40, 30))
    assert header((40, 30)) == first and header((40, 31))["data"] != first["data"]
    assert "mmproj" not in first and header((40, 30), DEMO.mmproj)["mmproj"] == hash_of(DEMO.mmproj)


def test_around_a_profile_the_others_keep_its_part_of_the_baseline():
    places = [(1, 0), (1, 1), (3, 0)]
    shares = np.array([[0, 0], [0.1, 0.5], [0, 0], [0.4, 0]])
    setup = replace(setup_for("window", 0.3, 5, (0.1,)), around=shares)
    assert setup.others(places, 4).tolist() == pytest.approx([0.09, 0.45, 0.36])
    assert replace(setup, plan=setup.plan.with_(budget=0.9)).others(places, 4).max() == 1
    assert setup_for("window", 0.3, 5, (0.1,)).others(places, 4).tolist() == [0.3] * 3
    for wrong, layers in ((places, 5), (places[:2], 4), ([*places, (3, 1)], 4)):
        with pytest.raises(ProfileError, match="does not fit the heads"):
            setup.others(wrong, layers)
    curves = Curves(falling(1, 3, setup.points), places, 1, 0.1)
    alone = curves.shares(replace(setup, around=None), 4)
    np.testing.assert_allclose(curves.shares(setup, 4), (alone + shares) / 2)


def test_answers_that_need_nothing_make_no_profile():
    with pytest.raises(KvedgeError, match="do not change the answers"):
        Curves(np.full((2, 3), 0.5), [(0, 0), (0, 1)], 1, 0.5).shares(setup_for("window", 0.1, 3, (0.1,)), 1)


def test_layers_that_are_not_stored_have_no_share():
    curves = Curves(falling(1, 3, setup_for("window", 0.1, 5, (0.1,)).points), [(1, 0), (1, 1), (3, 0)], 1, 0.1)
    found = curves.shares(setup_for("window", 0.1, 5, (0.1,)), 5)
    assert found.shape == (5, 2) and found.sum() == pytest.approx(1)
    assert not found[[0, 2, 4]].any() and found[3, 1] == 0 and (found[[1, 1, 3], [0, 1, 0]] > 0).all()


def test_scenes_of_another_seed_are_others():
    first, same, other = (next(scenes("head-budgets", seed)) for seed in (SEED, SEED, 7))
    assert first == same == next(scenes("head-budgets")) and first.pictures != other.pictures
