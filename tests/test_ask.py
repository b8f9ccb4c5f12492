"""The C program examples/c/ask.c answers through the C ABI exactly as `kvedge chat` answers through Python."""

import os
import subprocess

import build_stock
import pytest
from choosing import whole
from conftest import ROOT

DATA = ROOT / "pykvedge" / "data"
MODEL, MMPROJ, SCENE = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf", ROOT / "examples" / "scene-1.png"
QUESTION = "Describe the image."


@pytest.fixture(scope="module")
def ask():
    """ask(*arguments) runs the program. Fails the tests if the build does not have the program."""
    program = build_stock.find_build() / "bin" / ("kvedge-ask.exe" if os.name == "nt" else "kvedge-ask")
    if not program.is_file():
        pytest.fail(f"{program} is missing: python3 scripts/dev.py test builds it")

    def run(*arguments):
        command = [program, "--threads", "1", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300, check=False)

    return run


def figures(done) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    return dict(word.split("=") for word in done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("kv_type", "method"), [("f16", "default"), ("q8_0", "snapkv"), *whole(("f16", "snapkv"), ("q8_0", "default"))]
)
def test_answers_about_a_picture_as_the_program_does(native, kvedge, ask, kv_type, method):
    options = ["--kv-type", kv_type, "--mmproj", MMPROJ, "--image", SCENE]
    fields = ["--set", "scorer=window", "--set", "budget=0.2"] if method == "snapkv" else []
    done = ask(*options, *fields, MODEL, QUESTION)
    found = figures(done)
    default = ["--method", "snapkv", "--scorer", "modal", "--allocator", "ada", "--reducer", "nearest"]
    plan = default if method == "default" else ["--method", method]
    chat = ["chat", "--model", MODEL, *options, *plan, "--budget", "0.2", "--threads", "1"]
    report = kvedge(*chat, "--max-tokens", 80, "--json", QUESTION).json
    assert done.stdout.strip() == report["text"].strip() and len(done.stdout) > 20
    assert int(found["kv_bytes_before"]) == report["kv"]["full_bytes"]
    assert int(found["kv_bytes_after"]) == report["kv"]["kept_bytes"] < report["kv"]["full_bytes"] / 2
    assert int(found["tokens"]) == report["tokens"]["prompt"]
    assert int(found["image_tokens"]) == report["tokens"]["image"]


def test_the_kept_set_tells_methods_apart(native, ask):
    def kept(scorer: str) -> str:
        done = ask("--raw", "--set", f"scorer={scorer}", "--set", "budget=4", MODEL, "one two three four five six")
        return figures(done)["kept"]

    assert kept("position") == kept("position") != kept("knorm")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--colour", "red", MODEL, "hi"], 2, "no option --colour"),
        ([MODEL], 2, "a question"),
        ([MODEL, "two", "words"], 2, "quotes"),
        (["--image", SCENE, MODEL, "hi"], 2, "--mmproj"),
        (["--max-tokens", "many", MODEL, "hi"], 2, "not many"),
        (["--kv-type", "q7", MODEL, "hi"], 2, "not q7"),
        (["--set", "budget", MODEL, "hi"], 2, "KEY=VALUE"),
        (["--set", "budget=0", MODEL, "hi"], 2, "budget"),
        (["--set", "flavour=sweet", MODEL, "hi"], 2, "flavour"),
        (["nowhere.gguf", "hi"], 1, "nowhere.gguf"),
        (["--mmproj", MODEL, MODEL, "hi"], 1, "image encoder"),
        (["--mmproj", MMPROJ, "--image", "nowhere.png", MODEL, "hi"], 2, "nowhere.png"),
        (["--mmproj", MMPROJ, "--image", MODEL, MODEL, "hi"], 2, "png, jpg or bmp"),
    ],
)
def test_what_is_wrong_is_said(native, ask, arguments, code, said):
    done = ask(*arguments)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == code and not done.stdout and last.startswith("ask: error: ") and said in last
