"""Pruners in plugins: their input, their allowed results, and the rows that a model then reads."""

import numpy as np
import pytest

import pykvedge
from pykvedge.errors import PluginError, UsageError
from pykvedge.reference.checks import suite
from pykvedge.runtime.pruning import PlannedPruning

CORNER = """
import numpy as np
import pykvedge

@pykvedge.pruner("corner", params=[pykvedge.Param("step", 1, "every how manieth", low=1, high=9)])
def corner(image, n, settings):
    '''The first rows.'''
    return np.arange(len(image.rows))[:: settings["step"]][:n]
"""
ROWS = np.random.default_rng(3).normal(size=(12, 5)).astype(np.float32)


def chosen(plan):
    return PlannedPruning(plan, 1).choose(ROWS, None)


def test_it_is_given_the_image_and_chooses(native):
    seen = []

    @pykvedge.pruner("odd")
    def odd(image, n, settings):
        """Chooses every other row."""
        seen.append((image.rows.copy(), image.place, n, settings))
        image.rows[:] = 0  # changes only a copy: the model's rows must stay
        return np.arange(1, 12, 2)[:n]

    kept, rows = chosen(pykvedge.plan("full", pruner="odd", image_tokens=0.5))
    assert kept.tolist() == [1, 3, 5, 7, 9, 11]
    np.testing.assert_array_equal(rows, ROWS[kept])
    np.testing.assert_array_equal(seen[0][0], ROWS)
    assert seen[0][1:] == (None, 6, {})


def test_it_may_change_the_rows(native):
    @pykvedge.pruner("mean")
    def mean(image, n, settings):
        return [0, 7], [image.rows[:7].mean(axis=0), image.rows[7:].mean(axis=0)]

    kept, rows = chosen(pykvedge.plan("full", pruner="mean", image_tokens=3))
    assert kept.tolist() == [0, 7]
    np.testing.assert_allclose(rows, [ROWS[:7].mean(axis=0), ROWS[7:].mean(axis=0)], rtol=1e-6)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "not None"), ([], "1 to 4"), ([0, 1, 2, 3, 4], "1 to 4"), ([1, 0], "ascending"), ([1, 1], "ascending"),
        ([-1], "from 0 to 11"), ([12], "from 0 to 11"), ([0.5], "float64"), ([[1]], r"\[1, 1\]"), ("many", "<U4"),
        (([0], [[1, 2]]), "width"), (([0], [[1, 2, 3, 4, float("nan")]]), "NaN"), (([0], [[1e300] * 5]), "infinite"),
    ],
)  # fmt: skip
def test_what_it_must_not_return(native, returned, says):
    pykvedge.pruner("wrong")(lambda image, n, settings: returned)
    with pytest.raises(PluginError, match=f"pruner 'wrong'.*(?:{says})"):
        chosen(pykvedge.plan("full", pruner="wrong", image_tokens=4))


def test_names_and_what_it_is_not(native):
    with pytest.raises(PluginError, match="the name 'grid' belongs to a built-in pruner"):
        pykvedge.pruner("grid")(lambda image, n, settings: [0])
    pykvedge.pruner("own")(lambda image, n, settings: [0])
    assert "own" not in pykvedge.methods()  # a pruner alone compresses nothing
    with pytest.raises(UsageError, match="does not support pruners such as 'own'"):
        suite.check("own")
    plan = pykvedge.plan("lookm", 0.3, pruner="own", image_tokens=5)
    assert pykvedge.Plan.from_json(plan.to_json()) == plan


def test_in_a_conversation(kvedge, tiny, picture_file, tmp_path):
    file = tmp_path / "corner.py"
    file.write_text(CORNER)
    arguments = [*tiny("llava").arguments(), "--image", picture_file(), "--method", "knorm", "--max-tokens", 3]
    own = [*arguments, "--plugin", file, "--pruner", "corner", "--image-tokens", "0.5", "--json"]
    done = kvedge("chat", *own, "What?")
    assert done.code == 0 and (done.json["tokens"]["image"], done.json["tokens"]["pruned"]) == (8, 8), done
    fewer = kvedge("chat", *own, "--set", "pruner.step=4", "What?")
    assert (fewer.json["tokens"]["image"], fewer.json["tokens"]["pruned"]) == (4, 12)
    kvedge("chat", *own, "--set", "pruner.step=10", "What?").failed(2, "pruner.step")
    kvedge("chat", *arguments, "--pruner", "corner", "--image-tokens", "0.5", "What?").failed(2, "corner")
    file.write_text(CORNER.replace("[:n]", "[:n] / 0"))
    kvedge("chat", *own, "What?").failed(1, "corner")


def test_a_conversation_goes_on_after_a_failure(native, tiny, picture_file):
    @pykvedge.pruner("moody")
    def moody(image, n, settings):
        moody.calls += 1
        if moody.calls == 2:
            raise ValueError("not today")
        return np.arange(n)

    moody.calls = 0
    with tiny("llava").session(pykvedge.plan("full", pruner="moody", image_tokens=4)) as session:
        sampling = pykvedge.Sampling(max_tokens=3)
        session.ask("What?", [picture_file()], sampling).read()
        with pytest.raises(PluginError, match="pruner 'moody' failed: ValueError: not today"):
            session.ask("And?", [picture_file("b.png", 70, 60)], sampling)
        answer = session.ask("And?", [picture_file("b.png", 70, 60)], sampling)
        answer.read()
        assert answer.report.tokens.pruned >= 12
