"""Plugins: names, compositions, the display and checks of `kvedge methods`, and entry points."""

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from choosing import whole
from test_plugins import EXAMPLES, FIVE_LINES, HEAD, both_engines

import pykvedge
from pykvedge.errors import PluginError
from pykvedge.plans import plugin_files
from pykvedge.reference.checks import suite

# ------------------------------------------------------------------------------------------ names and compositions


def test_names_are_taken_once(write):
    plugin_files.load_file(write(FIVE_LINES))
    plugin_files.load_file(write(FIVE_LINES))  # the same file again: its newest version
    with pytest.raises(PluginError, match=r"other.py: my_method.py has already registered a scorer 'mine'"):
        plugin_files.load_file(write(FIVE_LINES, "other.py"))
    plugin_files.load_file(write(FIVE_LINES.replace("mine", "yours"), "other.py"))
    assert {"mine", "yours"} <= set(pykvedge.methods())


def test_a_scorer_alone_is_a_method(write):
    plugin_files.load_file(write(FIVE_LINES.replace(", recent=0", "")))
    made, snapkv = pykvedge.plan("mine"), pykvedge.plan("snapkv")
    for name in ("allocator", "reducer", "decode", "budget", "sinks", "text_prior"):
        assert getattr(made, name) == getattr(snapkv, name)
    assert (made.scorer, made.method) == ("mine", "mine")
    assert made.protected(1000, 200) == snapkv.protected(1000, 200) == (32, 0)
    assert made.protected(1000, 20) == (10, 0)  # half of the budget goes by scores


def test_an_allocator_alone_is_one_too():
    plugin_files.load_file(EXAMPLES / "pictures.py")
    assert pykvedge.plan("rising").scorer == "window" and pykvedge.plan("rising").allocator == "rising"
    assert pykvedge.plan("pictures").params == {} and pykvedge.plan("pictures").reducer == "blend"


def test_plans_of_plugins_travel_as_json(kvedge, write, tmp_path, tiny):
    plugin, file = write(FIVE_LINES), tmp_path / "plan.json"
    file.write_text(kvedge("methods", "mine", "--plugin", plugin, "--json").out)
    assert json.loads(file.read_text())["scorer"] == "mine"
    chat = ["chat", *tiny("llama").arguments(), "--max-tokens", 2, "--json", "--plan", file, "word " * 50]
    assert kvedge(*chat, "--plugin", plugin).json["method"] == "mine"
    kvedge(*chat).failed(2, "unknown scorer 'mine'")


def test_settings_reach_the_function(native):
    @pykvedge.scorer(
        "set",
        params=[pykvedge.Param("step", 2, "one token in so many", low=1), pykvedge.Param("on", True, "whether")],
        queries=lambda settings: settings["step"],
        recent=0,
    )
    def steps(layer, settings):
        assert layer.q.shape[1] == settings["step"] and settings["on"] is True
        return np.tile(np.arange(layer.k.shape[1]) % settings["step"] == 0, (layer.k.shape[0], 1))

    for result in both_engines(pykvedge.plan("set", 10, **{"scorer.step": 5})):
        assert result.kept[0][0].tolist() == list(range(0, 50, 5))
    with pytest.raises(pykvedge.UsageError, match=r"scorer\.step"):
        pykvedge.plan("set", **{"scorer.step": 0})


def test_infinite_scores_keep_and_drop(native):
    @pykvedge.scorer("certain", recent=0)
    def certain(layer, settings):
        out = np.zeros(layer.k.shape[:2])
        out[:, 40], out[:, 0] = np.inf, -np.inf
        return out

    for result in both_engines(pykvedge.plan("certain", 5)):
        assert result.kept[1][1].tolist() == [1, 2, 3, 4, 40]


def test_methods_lists_and_explains_plugins(kvedge):
    plugin = ["--plugin", EXAMPLES / "pictures.py", "--plugin", EXAMPLES / "outlying.py"]
    listed = kvedge("methods", *plugin)
    assert "pictures" in listed.out and "stages of an example" in listed.out and listed.err == ""
    names = [m["name"] for m in kvedge("methods", *plugin, "--json").json]
    assert names[: len(pykvedge.methods())] == pykvedge.methods() and {"pictures", "outlying"} <= set(names)
    explained = kvedge("methods", "pictures", *plugin).out
    assert "scorer.window = 16" in explained and "rising" in explained and "pictures.py" in explained


# ------------------------------------------------------------------------------------------ checks


@pytest.mark.parametrize("name", ["outlying", *whole("pictures")])
def test_the_examples_pass_the_checks(kvedge, name):
    done = kvedge("methods", "--check", name, "--plugin", EXAMPLES / f"{name}.py", "--json")
    assert done.code == 0 and done.json["passed"] and done.json["name"] == name, done
    checks = {row["check"]: row for row in done.json["checks"]}
    assert sum(row["cases"] for row in checks.values()) > 400
    assert all(row["failed"] == 0 for row in checks.values())
    assert checks["the order of heads does not matter"]["cases"] == 48


@pytest.mark.parametrize(("body", "check"), [
    ("return layer.k[..., 0] + 100 * np.arange(layer.k.shape[1])[None, ::-1] * np.arange(len(layer.k))[:, None]",
     "the order of heads"),
    *whole(
        ("COUNT.append(1); return np.abs(layer.k).sum(-1) * len(COUNT)", "engines agree: prompt lengths"),
        ("return layer.k[..., 0] if layer.k.shape[1] != 256 else layer.k", "engines agree: prompt lengths"),
    ),
    ("return layer.v.sum(-1) / layer.v.sum(-1) if layer.image_mask.all() else layer.v.sum(-1) * np.nan",
     "engines agree: image layouts"),
])  # fmt: skip
def test_checks_find_what_is_wrong(native, write, body, check):
    code = f"{HEAD}COUNT = []\n@pykvedge.scorer('mine', recent=0)\ndef mine(layer, settings):\n    {body}\n"
    plugin_files.load_file(write(code))
    rows = suite.check("mine")
    assert [row for row in rows if row.check.startswith(check) and row.failed], rows


def test_a_failed_check_is_exit_code_1(kvedge, write):
    code = f"{HEAD}@pykvedge.scorer('mine')\ndef mine(x, settings):\n    return np.random.rand(*x.k.shape[:2])\n"
    done = kvedge("methods", "--check", "mine", "--plugin", write(code))
    assert done.code == 1 and done.err == ""
    line = next(line for line in done.out.splitlines() if line.startswith("runs repeat"))
    assert "0 of  48  failed: " in line and "two runs differ" in line


def test_checks_of_built_in_names(kvedge):
    done = kvedge("methods", "--check", "random")
    assert done.code == 0 and "by design: scorer 'random' depends on the number of the head" in done.out
    kvedge("methods", "--check", "sliding").failed(2, "does not support decode policies")
    kvedge("methods", "--check", "lokm").failed(2, "did you mean 'lookm'")
    kvedge("methods", "--check").failed(2, "--check needs the name")


# ------------------------------------------------------------------------------------------ entry points


@pytest.fixture
def installed(tmp_path):
    """The environment with a package of valid entry points, and with a broken package."""

    def package(name, entries, code):
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[kvedge.plugins]\n" + entries)

    package("good_plugin", "good = good_plugin\n", FIVE_LINES)
    package("bad_plugin", "bad = bad_plugin\n", "x = 1\nraise ValueError('broken')\n")
    return {"PYTHONPATH": f"{Path(pykvedge.__file__).parent.parent}:{tmp_path}"}


def test_an_installed_plugin_is_found_by_name(kvedge, tiny, installed):
    chat = ["chat", *tiny("llama").arguments(), "--max-tokens", 2, "--json", "word " * 50]
    assert kvedge(*chat, "--method", "mine", env=installed).json["method"] == "mine"
    assert kvedge(*chat, "--scorer", "mine", "--method", "lookm", env=installed).json["method"] == "lookm"
    done = kvedge(*chat, "--method", "nobody", env=installed)
    done.failed(2, "unknown method 'nobody'", "ValueError: broken (bad_plugin.py:2)")


def test_listing_shows_installed_plugins_and_what_is_wrong_with_them(kvedge, installed):
    done = kvedge("methods", "--json", env=installed)
    assert done.code == 0 and "mine" in [m["name"] for m in done.json]
    warnings = [line for line in done.err.splitlines() if line.startswith("kvedge: warning: ")]
    assert len(warnings) == 1 and "plugin 'bad' (bad_plugin) failed: ValueError: broken" in warnings[0]


def test_importing_and_built_in_names_look_nothing_up(started, installed):
    code = """
        import sys, pykvedge
        for name in ("lookm", "full", "adakv"):
            pykvedge.plan(name, **({} if name == "full" else {"reducer": "pivotal"}))
        print([m for m in sys.modules if "plugin" in m and not m.startswith("pykvedge.")])
    """
    done = started(program=("-c", textwrap.dedent(code)), env=installed)
    assert (done.out.strip(), done.err) == ("[]", "")
