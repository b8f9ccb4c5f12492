"""Stages in C: shared libraries in the program, and the example scorer of kvedge.h in the library."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from arrays import prompt
from choosing import whole
from conftest import ROOT
from test_decode_policies import running  # noqa: F401 - a fixture
from test_plugins import check_nothing_changed

import pykvedge
from pykvedge.errors import PluginError
from pykvedge.native import cpackage
from pykvedge.plans import plugin_files
from pykvedge.reference.checks import suite
from pykvedge.reference.checks.rules import engines_agree

HEADER = ROOT / "native" / "include" / "kvedge.h"
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
STRICT = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1", "-I", str(HEADER.parent)]

pytestmark = pytest.mark.skipif(COMPILER is None or os.name != "posix", reason="no C compiler")


def compiled(source: Path, out: Path, *options) -> Path:
    command = [COMPILER, *STRICT, "-o", out, source, *options, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """library(source) -> a shared library built from it."""
    folder = tmp_path_factory.mktemp("plugins")

    def make(source: Path) -> Path:
        out = folder / f"{source.stem}.so"
        return out if out.exists() else compiled(source, out, "-shared", "-fPIC")

    return make


@pytest.fixture
def own(native, library, forgotten):
    """Registers the stages of own_stages.c."""
    plugin_files.load_file(library(ROOT / "tests" / "own_stages.c"))


@pytest.mark.parametrize("kind", ["qwen2vl", *whole("llava")])
def test_the_example_answers_about_a_picture(kvedge, library, tiny, picture_file, kind):
    plugin = ["--plugin", library(ROOT / "examples" / "plugins" / "outlying.c")]
    chat = ["chat", *tiny(kind).arguments(), "--image", picture_file(), "--max-tokens", 8, "--json", "What is this?"]
    done = kvedge(*chat, *plugin, "--method", "outlying-c")
    assert done.code == 0 and done.err == "", done
    report = done.json
    n = pykvedge.plan("lookm").count(report["tokens"]["prompt"])
    assert report["method"] == "outlying-c" and report["kv"]["kept_per_layer"] == [n, n] and report["text"]
    with_others = kvedge(*chat, *plugin, "--method", "lookm", "--scorer", "outlying-c", "--allocator", "pyramid").json
    assert sum(with_others["kv"]["kept_per_layer"]) == 2 * n
    in_python = ["--plugin", ROOT / "examples" / "plugins" / "outlying.py", "--method", "outlying"]
    assert kvedge(*chat, *in_python).json["text"] == report["text"]


def test_c_and_python_keep_the_same_tokens(own, library):
    plugin_files.load_file(library(ROOT / "examples" / "plugins" / "outlying.c"))
    plugin_files.load_file(ROOT / "examples" / "plugins" / "outlying.py")
    p = prompt(300, (4, 2), layers=3)
    c, python = (pykvedge.compress(pykvedge.plan(name), *p.arguments) for name in ("outlying-c", "outlying"))
    np.testing.assert_allclose(c.scores, python.scores, rtol=1e-5)
    for i in range(3):
        for h in range(2):
            np.testing.assert_array_equal(c.kept[i][h], python.kept[i][h])


checked = functools.cache(suite.check)


@pytest.mark.parametrize("name", ["attended", *whole("shifted", "doubled")])
def test_stages_in_c_pass_the_checks(own, name):
    rows = checked(name)
    assert [row for row in rows if row.failed] == []
    assert sum(row.cases for row in rows) > 400


@pytest.mark.parametrize("name", ["shifted", "doubled"])
def test_stages_in_c_are_the_same_on_both_engines(own, name):
    for n_tokens in (1, 17, 90, 257):
        engines_agree(pykvedge.plan(name), prompt(n_tokens, (4, 2), layers=3), "f16", 2)


def test_the_checks_reach_the_settings_of_a_stage_in_c(own):
    settings = next(row for row in checked("attended") if row.check.endswith("settings"))
    assert settings.cases == 4 and settings.status == "passed"
    p = prompt(100)
    assert pykvedge.plan("attended").settings("scorer") == {"window": 8, "kind": "sum"}
    plans = (pykvedge.plan("attended", **{"scorer.kind": kind}) for kind in ("sum", "max"))
    sums, largest = (pykvedge.compress(plan, *p.arguments) for plan in plans)
    assert (sums.scores > largest.scores).all()
    with pytest.raises(pykvedge.UsageError, match=r"scorer\.window"):
        pykvedge.plan("attended", **{"scorer.window": 65})


FAILURES = [
    ({"scorer": "refuses"}, "scorer 'refuses'.*layer 1 of 2 is not to my taste"),
    ({"scorer": "silent"}, "scorer 'silent'.*status 77"),
    ({"scorer": "not-a-number"}, "scorer 'not-a-number' gave NaN for layer 0, KV head 1, token 2"),
    ({"allocator": "greedy"}, "allocator 'greedy' gives .* KV pairs in total, but the total must be"),
    ({"allocator": "nothing"}, "allocator 'nothing' gives .* a budget of 0 KV pairs"),
]


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize(("stages", "says"), FAILURES)
def test_failures_in_c_are_explained(own, engine, stages, says):
    with pytest.raises(PluginError, match=says):
        pykvedge.compress(pykvedge.plan("h2o", **stages), *prompt(60).arguments, engine=engine)


@pytest.mark.parametrize(("stages", "says"), [
    *FAILURES, ({"reducer": "late"}, r"1e\+06 in the key of token .* of layer 1, KV head 0"),
])  # fmt: skip
def test_a_failure_leaves_the_sequence_as_it_was(own, running, stages, says):  # noqa: F811
    check_nothing_changed(running, stages, says, 2)


def test_a_stage_in_c_is_one_line_on_the_command_line(kvedge, library, tiny):
    chat = ["chat", *tiny("llama").arguments(), "--plugin", library(ROOT / "tests" / "own_stages.c"), "word " * 60]
    kvedge(*chat, "--method", "refuses").failed(1, "scorer 'refuses': layer 1 of 2 is not to my taste")
    kvedge(*chat, "--reducer", "late").failed(1, "reducer 'late'", "finite numbers up to 65504")


# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "says"), [
    ("int kvedge_plugin(void);\nint kvedge_plugin(void) { return 0; }\n",
     "does not export the function kvedge_plugin_v1"),
    ("void * kvedge_plugin_v1(void);\nvoid * kvedge_plugin_v1(void) { return 0; }\n", "another kvedge.h"),
    ('#include "kvedge.h"\nstatic kvedge_plugin p = { .struct_size = 8 };\nkvedge_plugin * kvedge_plugin_v1(void);\n'
     "kvedge_plugin * kvedge_plugin_v1(void) { return &p; }\n", "another kvedge.h"),
    ('#include "kvedge.h"\nstatic kvedge_plugin p = { .struct_size = sizeof p };\n'
     "kvedge_plugin * kvedge_plugin_v1(void);\n"
     "kvedge_plugin * kvedge_plugin_v1(void) { return &p; }\n", "registers no"),
    ('#include "kvedge.h"\nstatic kvedge_custom_scorer s = { .struct_size = sizeof s, .name = "x" };\n'
     "static kvedge_plugin p = { .struct_size = sizeof p, .scorers = &s, .n_scorers = 1 };\n"
     "kvedge_plugin * kvedge_plugin_v1(void);\nkvedge_plugin * kvedge_plugin_v1(void) { return &p; }\n", "no function"),
])  # fmt: skip
def test_libraries_that_are_no_plugins(tmp_path, code, says):
    source = tmp_path / "odd.c"
    source.write_text(code)
    with pytest.raises(PluginError, match=says):
        plugin_files.load_file(compiled(source, tmp_path / "odd.so", "-shared", "-fPIC"))


def test_a_file_that_is_no_library(tmp_path):
    (tmp_path / "odd.so").write_text("not a library")
    with pytest.raises(PluginError, match="cannot be loaded"):
        plugin_files.load_file(tmp_path / "odd.so")


# ---------------------------------------------------------------------------------------------------------

PROGRAM = """
#include "kvedge.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
{function}
int main(void) {{
    enum {{ L = 2, H = 4, HKV = 2, T = 50, D = 16 }};
    static float q[L * H * T * D], k[L * HKV * T * D], v[L * HKV * T * D];
    kvedge_error err = {{ 0 }};
    kvedge_plan * plan = NULL;
    kvedge_result * result = NULL;
    kvedge_arrays in = {{ L, H, HKV, T, D, q, k, v, NULL }};
    if (fread(k, sizeof k, 1, stdin) != 1 || kvedge_plan_create(&plan, &err)) return 1;
    {use}
    kvedge_plan_set(plan, "budget", "10", &err);
    if (kvedge_compress_arrays(plan, &in, KVEDGE_TYPE_F32, 2, &result, &err)) return 2;
    for (int i = 0; i < L * HKV * 10; i++) printf("%d ", (int) kvedge_result_kept(result, i / 20, i / 10 % 2)[i % 10]);
    // what is refused, and the word that the message must have
    kvedge_custom_scorer other = mine;
    const char * names[] = {{ "largest", "knorm", "", "Upper", "with space", "-x",
                             "a-name-that-goes-on-and-on-and-on-and-on-and-on", NULL }};
    for (int i = 0; i < 8; i++) {{
        other.name = names[i];
        if (kvedge_plan_add_scorer(plan, &other, &err) != KVEDGE_E_ARGUMENT || !err.message[0]) return 10 + i;
    }}
    other.name = "other";
    other.score = NULL;
    if (kvedge_plan_add_scorer(plan, &other, &err) != KVEDGE_E_ARGUMENT) return 20;
    other.score = mine.score;
    other.struct_size = 4;
    if (kvedge_plan_add_scorer(plan, &other, &err) != KVEDGE_E_ARGUMENT) return 21;
    other.struct_size = sizeof other;
    kvedge_setting bad = {{ "x", NULL, 5, 0, 4, 0, NULL }};
    other.settings = &bad;
    other.n_settings = 1;
    if (kvedge_plan_add_scorer(plan, &other, &err) != KVEDGE_E_ARGUMENT) return 22;
    bad.fallback = 2;
    if (kvedge_plan_add_scorer(plan, &other, &err) || kvedge_plan_set(plan, "scorer", "other", &err)) return 23;
    if (kvedge_plan_set(plan, "scorer.x", "3.5", &err) || !kvedge_plan_set(plan, "scorer.x", "4.5", &err)) return 24;
    if (kvedge_plan_set(plan, "scorer", "nobody", &err) != KVEDGE_E_UNKNOWN) return 25;
    fprintf(stderr, "%s", err.message);
    kvedge_result_free(result);
    kvedge_plan_free(plan);
    return 0;
}}
"""


def example_of_the_header() -> tuple[str, str]:
    """Returns the function, and the lines that use it, from the comment under "Stages of your own"."""
    block = HEADER.read_text().split("// Stages of your own:")[1].split("// A callback returns")[0]
    code = "\n".join(re.findall(r"^//     (.*)$", block, re.MULTILINE))
    function, use = code.split("\n...\n")
    assert len(function.splitlines()) + len(use.splitlines()) <= 10
    return function, use


@pytest.mark.skipif(sys.platform == "win32", reason="links by name")
def test_the_example_in_the_header_compiles_and_runs(native, tmp_path):
    function, use = example_of_the_header()
    source = tmp_path / "program.c"
    source.write_text(PROGRAM.format(function=function, use=use).replace("//", "// "))
    links = [*cpackage.flags("Libs"), "-Wno-sign-compare"]
    program = compiled(source, tmp_path / "program", *links)
    k = np.random.default_rng(0).standard_normal((2, 2, 50, 16)).astype(np.float32)
    done = subprocess.run([program], input=k.tobytes(), capture_output=True, check=False)
    assert done.returncode == 0, done
    kept = np.array(done.stdout.split(), dtype=int).reshape(2, 2, 10)
    expected = np.sort(np.argsort(-np.abs(k).sum(axis=-1), axis=-1)[..., :10], axis=-1)
    np.testing.assert_array_equal(kept, expected)
    assert b"largest" in done.stderr and b"knorm" in done.stderr  # an unknown name lists the known ones
