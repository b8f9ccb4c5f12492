"""kvedge eval and kvedge bench with a user's methods and stages."""

import json
import os
import re

import pytest
from conftest import QUICK_BENCH, ROOT, THREADS
from test_plugins import EXAMPLES

import pykvedge
from pykvedge.plans import plugin_files

# the tokens of streaming-llm without sinks, in Python
LAST = """\
import numpy as np
import pykvedge
@pykvedge.scorer("latest", recent=0)
def latest(layer, settings):
    print("a plugin may print")
    return np.tile(np.arange(layer.k.shape[1]), (layer.k.shape[0], 1))
pykvedge.preset("latest-merged", scorer="latest", reducer="pivotal")
pykvedge.preset("two", scorer="window", **{"scorer.window": 8})
"""
DEMO = ["eval", "--tasks", "code", "--samples", 3, "--budget", "0.2", "--threads", THREADS, "--quiet"]


@pytest.fixture
def sentences(tmp_path):
    """A data set for models without a language."""
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"question": "a b c d e f " * 8, "answer": "red", "max_tokens": 4}) + "\n")
    return path


def rows_of(done):
    return {(r["method"], r["budget"]): r for r in done.json["rows"] if r["task"] == "all"}


def test_eval_measures_what_a_plugin_says(kvedge, native, write, tmp_path):
    """A plugin's scorer with the order of a built-in scorer gets its figures. A preset equals its composition."""
    same = tmp_path / "window-8.json"
    same.write_text(pykvedge.plan("snapkv", 0.2, **{"scorer.window": 8}).to_json())
    last = tmp_path / "last.json"
    last.write_text(pykvedge.plan("streaming-llm", 0.2, sinks=0).to_json())
    plans = ["--plan", same, "--plan", last]
    done = kvedge(*DEMO, "--plugin", write(LAST), "--method", "latest,latest-merged,two", *plans, "--json")
    assert done.code == 0 and "a plugin may print" in done.err, done
    rows = rows_of(done)
    assert set(rows) == {("full", 1.0), *((m, 0.2) for m in ("latest", "latest-merged", "two", "window-8", "last"))}
    for own, built_in in (("latest", "last"), ("two", "window-8")):
        for figure in ("kld", "ppl", "score", "kept"):
            assert rows[own, 0.2][figure] == pytest.approx(rows[built_in, 0.2][figure], rel=1e-6), (own, figure)
    assert rows["latest", 0.2]["kld"] > 0.01
    assert rows["latest-merged", 0.2]["kld"] != pytest.approx(rows["latest", 0.2]["kld"], rel=1e-6)


def test_own_allocators_and_reducers_in_eval_and_bench(kvedge, tiny, native, sentences):
    """`all` includes the methods of plugins. Stages of a plan file are found."""
    own = ["--plugin", EXAMPLES / "pictures.py", "--method", "pictures,rising,blend"]
    llama = tiny("llama").arguments()
    done = kvedge("eval", *llama, sentences, *own, "--budget", "0.5", "--json")
    assert done.code == 0, done
    assert {m for m, _ in rows_of(done)} == {"full", "pictures", "rising", "blend"}
    assert len({round(rows_of(done)[m, 0.5]["kld"], 9) for m in ("pictures", "rising", "blend")}) == 3
    short = ["--tokens", 40, "--repeat", 1, "--generate", 2, "--budget", "0.5", "--json", "--quiet"]
    done = kvedge("bench", *llama, *own, *short, script=QUICK_BENCH)
    assert done.code == 0, done
    kept = {r["variant"]: r["kv_kept_bytes"] / r["kv_full_bytes"] for r in done.json["rows"] if r["variant"] != "stock"}
    assert kept == {"full": 1.0, "pictures 0.5": 0.5, "rising 0.5": 0.5, "blend 0.5": 0.5}


def test_all_includes_what_plugins_brought(kvedge, tiny, native, sentences, write):
    done = kvedge("eval", *tiny("llama").arguments(), sentences, "--plugin", write(LAST), "--method", "all",
                  "--metrics", "kld", "--json")  # fmt: skip
    assert {"latest", "latest-merged", "two", "snapkv", "full"} <= {m for m, _ in rows_of(done)}


def test_a_plugin_that_fails_is_left_out_and_said(kvedge, tiny, native, sentences, write):
    plugin = write(LAST.replace("    return", "    return 1 / 0 +"))
    options = ["--plugin", plugin, "--method", "h2o,latest", "--budget", "0.5", "--json", "--quiet"]
    done = kvedge("eval", *tiny("llama").arguments(), sentences, *options)
    assert done.code == 1 and {m for m, _ in rows_of(done)} == {"full", "h2o"}
    assert [line.partition(": ")[0] for line in done.json["left_out"]] == ["latest at 0.5 left out"]
    assert "ZeroDivisionError" in done.err and "my_method.py:6" in done.err and "Traceback" not in done.err
    short = ["--tokens", 40, "--repeat", 1, "--generate", 2]
    done = kvedge("bench", *tiny("llama").arguments(), *options, *short, script=QUICK_BENCH)
    assert done.code == 1 and [r["variant"] for r in done.json["rows"]] == ["stock", "full", "h2o 0.5"]
    assert "ZeroDivisionError" in done.err and "Traceback" not in done.err


def test_wrong_files_and_names(kvedge, write, tmp_path):
    for command in ("eval", "bench"):
        kvedge(command, "--plugin", tmp_path / "none.py").failed(1, "none.py does not exist")
        kvedge(command, "--plugin", write("x = 1", "empty.py")).failed(1, "registers no scorer")
        kvedge(command, "--plugin", write(LAST), "--method", "latets").failed(2, "did you mean 'latest'")


def test_results_of_another_version_of_a_plugin_or_plan_are_not_gone_on_with(kvedge, native, write, tmp_path):
    """The name of a method alone does not identify what was measured."""
    save, plan = tmp_path / "r.jsonl", tmp_path / "mine.json"
    plan.write_text(pykvedge.plan("snapkv", 0.3).to_json())
    few = [*DEMO, "--plugin", write(LAST), "--method", "latest,two", "--plan", plan, "--save", save]
    assert kvedge(*few).code == 0
    before = save.read_bytes()
    assert kvedge(*few, "--resume").code == 0 and save.read_bytes() == before
    write(LAST.replace("recent=0", "recent=2"))
    kvedge(*few, "--resume").failed(2, "the plan or profile of latest at 0.2 differs")
    then = write(LAST.replace('"scorer.window": 8', '"scorer.window": 9')).stat()
    kvedge(*few, "--resume").failed(2, "differs from the file")
    # a text with the same length and time: Python's bytecode cache would take the old one
    os.utime(write(LAST), ns=(then.st_atime_ns, then.st_mtime_ns))
    plan.write_text(pykvedge.plan("snapkv", 0.3, allocator="ada").to_json())
    kvedge(*few, "--resume").failed(2, "the plan or profile of mine at 0.3 differs")
    assert save.read_bytes() == before


def test_the_methods_of_the_results_pages_exist():
    """Commands in docs/results name built-in methods, or those of the plugin there, and use all of its methods."""
    folder = ROOT / "docs" / "results"
    own = set(plugin_files.load_file(folder / "tables.py"))
    named = set()
    for page in folder.glob("*.md"):
        for listed in re.findall(r"(?:--method |^[A-Z]=)(\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            named |= {name for name in listed.split(",") if re.fullmatch(r"[a-z][a-z0-9-]*", name) and name != "all"}
    assert len(named) > 20 and own <= named
    for name in named:
        assert pykvedge.plan(name, None if name == "full" else 0.2).method == name
