"""Runs the program: stdout, stderr, and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from choosing import whole
from forking import Warm

import pykvedge
from pykvedge.cli.program import cli

KEYS = {
    "model": {"name", "file", "quantisation"},
    "tokens": {"prompt", "image", "generated", "pruned", "reused", "images_reused"},
    "kv": {"full_bytes", "kept_bytes", "peak_bytes", "kept_per_layer"},
    "rss": {"before_prefill_bytes", "peak_bytes", "after_compress_bytes"},
    "time": {"load_s", "encode_s", "prefill_s", "replay_s", "compress_s", "decode_s", "decode_tok_s"},
}
LINE = re.compile(
    r"prompt (\d+) tokens(?: \((\d+) image\))?(?: -> (\d+) kept|, all kept) \| "
    r"KV ([\d.]+)(?: -> ([\d.]+))? (MiB|KiB) \| [\d.]+ tok/s\n"
)


@pytest.fixture(params=["llava", "qwen2vl"])
def vision_model(request, tiny):
    return tiny(request.param)


def test_an_answer_goes_to_stdout_and_one_line_to_stderr(kvedge, vision_model, picture_file):
    done = kvedge("chat", *vision_model.arguments(), "--image", picture_file(), "--max-tokens", 12, "What is this?")
    assert done.code == 0 and done.out.endswith("\n") and len(done.out) > 12
    found = LINE.fullmatch(done.err)
    assert found, done.err
    prompt, image, kept = (int(found[i]) for i in (1, 2, 3))
    assert kept == pykvedge.default_plan().count(prompt) and 0 < image < prompt


@pytest.mark.parametrize("budget", ["0.2", "0.02", "1.0"])
def test_the_line_shows_the_bytes_of_the_report_and_never_zero(kvedge, budget):
    """The packaged model at 0.02 keeps a few KiB of 0.4 MiB, which rounded to tenths of a MiB would be nothing."""
    scene = Path(__file__).parent.parent / "examples" / "scene-1.png"
    asked = ["chat", "--threads", 1, "--image", scene, "--budget", budget, "--max-tokens", 4, "What is the code?"]
    found, kv = LINE.fullmatch(kvedge(*asked).err), kvedge(*asked, "--json").json["kv"]
    size = {"MiB": 2**20, "KiB": 2**10}[found[6]]
    for shown, number in ((found[4], kv["full_bytes"]), (found[5] or found[4], kv["kept_bytes"])):
        assert float(shown) > 0 and abs(float(shown) - number / size) <= 0.051
    assert found[6] == ("KiB" if budget == "0.02" else "MiB")


FEW = ("full", "kvedge", "kvzip", "lookm", "mixkv-sparsemm", "prefixkv")


@pytest.mark.parametrize("method", [*FEW, *whole(*(name for name in pykvedge.methods() if name not in FEW))])
def test_every_method_answers_about_a_picture(kvedge, tiny, picture_file, profile_file, method):
    vision_model = tiny("qwen2vl" if method == "kvedge" else "llava")
    arguments = [*vision_model.arguments(), "--image", picture_file(), "--method", method, "--max-tokens", 8, "--json"]
    for kind in pykvedge.plan(method).profile_kinds().values():
        arguments += ["--profile", profile_file(vision_model.model, kind)]
    done = kvedge("chat", *arguments, "What is this?")
    assert done.code == 0 and done.err == ""
    report = done.json
    assert report["method"] == method and report["text"]
    budget = pykvedge.plan(method).budget
    assert report["budget"] == budget.value
    kept = report["kv"]["kept_per_layer"]
    assert sum(kept) == pytest.approx(2 * budget.count(report["tokens"]["prompt"]))
    if pykvedge.plan(method).allocator in ("uniform", "ada"):  # the other allocators divide budgets between layers
        assert kept[0] == kept[1]
    if method == "full":
        assert report["kv"]["kept_bytes"] == report["kv"]["full_bytes"]
    else:
        assert report["kv"]["kept_bytes"] < report["kv"]["full_bytes"] <= report["kv"]["peak_bytes"]


def test_json_has_exactly_the_fields_that_are_promised(kvedge, tiny, picture_file):
    done = kvedge("chat", *tiny("llava").arguments(), "--image", picture_file(), "--json", "--max-tokens", 4, "Hello?")
    report = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert set(report) == {"method", "budget", "text", "stop", *KEYS}
    for group, keys in KEYS.items():
        assert set(report[group]) == keys
    assert report["tokens"]["image"] == 16 and report["tokens"]["generated"] == 4
    assert report["rss"]["before_prefill_bytes"] > 0 and report["rss"]["peak_bytes"] > 0
    assert report["time"]["prefill_s"] > 0 and report["time"]["decode_tok_s"] > 0


def test_the_prompt_may_come_from_a_pipe(kvedge, tiny):
    arguments = ["chat", *tiny("llama").arguments(), "--quiet", "--max-tokens", 6]
    by_argument = kvedge(*arguments, "Good morning")
    assert by_argument.code == 0 and by_argument.err == ""
    assert kvedge(*arguments, stdin="Good morning\n").out == by_argument.out
    assert kvedge(*arguments, "-", stdin="Good morning").out == by_argument.out
    assert kvedge(*arguments, "Good morning", stdin="not read").out == by_argument.out
    assert kvedge(*arguments, stdin=b"caf\xe9 \xff").code == 0
    for data in (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "Good morning".encode("utf-16")):
        kvedge(*arguments, stdin=data).failed(2, "the input from the pipe is not UTF-8 text")


def test_options_change_what_is_kept(kvedge, tiny):
    base = ["chat", *tiny("llama").arguments(), "--json", "--max-tokens", 2]
    words = "one two three four five six seven eight nine ten " * 4

    def kept(*options):
        done = kvedge(*base, *options, words)
        assert done.code == 0, done
        return done.json["kv"]["kept_per_layer"]

    assert kept("--budget", "30") == [30, 30]
    assert kept("--budget", "30", "--recent", "12", "--sinks", "4", "--reducer", "averaged") == [30, 30]
    assert kept("--budget", "0.5", "--method", "h2o", "--text-prior") == kept("--budget", "0.5", "--no-text-prior")
    assert kept("--budget", "1.0") == kept("--method", "full")


def test_sampling_is_repeatable_with_a_seed(kvedge, tiny):
    base = ["chat", *tiny("llama").arguments(), "--quiet", "--max-tokens", 20, "--temp", "1.5", "--top-k", "0"]
    first = kvedge(*base, "--seed", 7, "Hello").out
    assert first == kvedge(*base, "--seed", 7, "Hello").out
    assert first != kvedge(*base, "--seed", 8, "Hello").out
    greedy = ["chat", *tiny("llama").arguments(), "--quiet", "--max-tokens", 20]
    assert kvedge(*greedy, "Hello").out == kvedge(*greedy, "Hello").out


def test_system_text_storage_type_and_threads_are_heeded(kvedge, tiny):
    base = ["chat", *tiny("llama").arguments(), "--json", "--max-tokens", 4, "--method", "full"]
    plain = kvedge(*base, "Hello").json
    system = "You answer in one word and are always very polite to everybody."
    with_system = kvedge(*base, "--system", system, "Hello").json
    assert with_system["tokens"]["prompt"] != plain["tokens"]["prompt"]
    wide = kvedge(*base, "--kv-type", "f32", "--threads", 2, "Hello").json
    assert wide["kv"]["full_bytes"] > 1.5 * plain["kv"]["full_bytes"]
    assert kvedge(*base, "--kv-type", "bf16", "Hello").json["kv"]["full_bytes"] == plain["kv"]["full_bytes"]


def test_verbose_shows_the_log_of_llama_cpp_and_nothing_else_does(kvedge, tiny):
    arguments = ["chat", *tiny("llama").arguments(), "--max-tokens", 2, "Hello"]
    assert kvedge(*arguments).err.count("\n") == 1
    assert "llama_model_loader" in kvedge(*arguments, "--verbose").err


def test_methods_lists_and_explains(kvedge):
    listed = kvedge("methods")
    assert listed.code == 0 and all(name in listed.out for name in pykvedge.methods())
    assert [m["name"] for m in kvedge("methods", "--json").json] == pykvedge.methods()
    explained = kvedge("methods", "lookm")
    for word in ("LOOK-M", "arXiv", "cumulative", "pivotal", "--budget", "--reducer"):
        assert word in explained.out
    assert pykvedge.Plan.from_json(kvedge("methods", "lookm", "--json").out) == pykvedge.plan("lookm")
    own = kvedge("methods", "headkv").out  # the settings of the method, not of its members
    assert "scorer.window = 8:" in own and "scorer.pool = max:" in own and "allocator.rule = headkv:" in own
    by_budget = " ".join(kvedge("methods", "kvedge").out.split())
    assert "below 0.2 scorer.text = 16, reducer.reach = 0.8; from 0.2 on scorer.text = 8" in by_budget
    kvedge("methods", "lokm").failed(2, "did you mean 'lookm'")


def test_version_names_the_libraries(kvedge, native):
    done = kvedge("--version")
    assert done.code == 0 and done.out.startswith(f"kvedge {pykvedge.__version__}")
    assert f"libkvedge {native.version()} ({native.simd()})" in done.out and "llama.cpp" in done.out


def test_an_option_means_the_same_in_every_command():
    found = {}
    for command in (*cli.commands.values(), *cli.commands["calibrate"].commands.values()):
        for option in (p for p in command.params if isinstance(p, click.Option)):
            for name in option.opts:
                found.setdefault(name, {})[command.name] = (option.help, option.multiple, option.metavar)
    for option in ("ctx", "threads", "gpu-layers", "json", "quiet", "verbose", "image", "scorer", "set"):
        name = f"--{option}"
        assert len(found[name]) > 1 and len(set(found[name].values())) == 1, name
    loads = {"chat", "eval", "bench", "inspect", "fit", "heads", "prefix", "budgets", "serve", "tune"}
    assert loads == set(found["--model"]) == set(found["--mmproj"]) - {"run"} <= {*found["--json"], "serve"}
    assert set(found["--method"]) - {"run"} == loads - {"heads", "prefix"}
    assert set(found["--budget"]) - {"run"} == loads - {"heads", "budgets"}


def test_terminals_with_few_characters_get_an_answer(kvedge, tiny):
    arguments = ["chat", *tiny("llama").arguments(), "--max-tokens", 60, "--temp", "3", "--seed", 1, "Hello"]
    done = kvedge(*arguments, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.code == 0, done


def test_importing_loads_nothing_heavy(environment):
    heavy = ("numpy", "llama_cpp", "rich", "PIL", "jinja2")
    code = f"import sys, pykvedge.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_reader_that_leaves_early_is_no_error(environment, tiny):
    command = [sys.executable, "-m", "pykvedge", "chat", *tiny("llama").arguments(), "--max-tokens", "200", "Hello"]
    with Warm(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read().decode()
        process.wait(timeout=60)
    assert "Traceback" not in err and "error" not in err.lower(), err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_stops_the_answer(environment, tiny):
    command = [sys.executable, "-m", "pykvedge", "chat", *tiny("llama").arguments(), "--ctx", "100000",
               "--max-tokens", "90000", "Hello"]  # fmt: skip
    with Warm(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith(b"\n") and b"Traceback" not in err and b"tok/s" in err


def wait_until_idle(process):
    """Returns when the process handles SIGINT and has used no CPU time for a second. An earlier Ctrl-C would end Python
    before the program can react."""
    import psutil

    watched, used, since = psutil.Process(process.pid), -1.0, time.monotonic()
    while time.monotonic() - since < 1.0:
        time.sleep(0.1)
        now = sum(watched.cpu_times()[:2])
        if now != used or now == 0.0:
            used, since = now, time.monotonic()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_before_the_answer_ends_the_program_quietly(environment, tiny):
    command = [sys.executable, "-m", "pykvedge", "chat", *tiny("llama").arguments()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def heed():  # a shell starts tests in the background with SIGINT ignored, and the program would inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, env=environment, preexec_fn=heed, **pipes) as process:
        wait_until_idle(process)  # it waits for a prompt on the pipe
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.strip() == b""


def test_a_plan_travels_as_a_file(kvedge, tiny, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(kvedge("methods", "adakv", "--json").out)
    arguments = ["chat", *tiny("llama").arguments(), "--max-tokens", 2, "--json", "--plan", file, "word " * 60]
    assert kvedge(*arguments).json["method"] == "adakv"
    kvedge(*arguments, "--budget", "0.5").failed(2, "--plan")
    file.write_text('{"kvedge_plan": 1, "scorer": "nonsense"}')
    kvedge(*arguments).failed(2, "unknown scorer")
    file.write_bytes(b"\xff\xfe\x00")
    kvedge(*arguments).failed(2, "plan")
    file.unlink()
    kvedge(*arguments).failed(2, "plan.json", "cannot be read")
