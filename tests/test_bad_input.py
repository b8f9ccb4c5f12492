"""Bad input gives one line on stderr that names the problem, exit code 2 (usage) or 1 (run time), and no abort."""

import json
import os
import struct
import zlib
from pathlib import Path

import pytest

import pykvedge
from pykvedge.cli import modelfiles, options
from pykvedge.errors import ModelError, UsageError, one_line
from pykvedge.models.gguf import read_header


@pytest.fixture
def llava(tiny):
    return tiny("llava")


def pair(model, mmproj=None):
    return ["--model", model, *(["--mmproj", mmproj] if mmproj else []), "--threads", "1"]


# ------------------------------------------------------------------------------------------------- models


def test_no_model(kvedge, llava, monkeypatch, tmp_path):
    kvedge("chat", "--mmproj", llava.mmproj, "Hello").failed(2, "no model", "--model")
    monkeypatch.setattr(modelfiles, "DATA", tmp_path)  # an installation without the demo model
    with pytest.raises(UsageError, match="no model: pass --model"):
        modelfiles.model_files({"model": None, "mmproj": None})


def test_a_model_that_is_not_there(kvedge, llava, tmp_path):
    kvedge("chat", *pair("nowhere.gguf"), "Hello").failed(1, "nowhere.gguf does not exist")
    kvedge("chat", *pair(llava.model, "nowhere.gguf"), "Hello").failed(1, "nowhere.gguf does not exist")
    kvedge("chat", *pair(tmp_path), "Hello").failed(2, "has no GGUF model")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_a_model_that_must_not_be_read(kvedge, llava, tmp_path):
    copy = tmp_path / "m.gguf"
    copy.write_bytes(llava.model.read_bytes())
    copy.chmod(0)
    kvedge("chat", *pair(copy), "Hello").failed(1, "cannot be read")


@pytest.mark.parametrize(
    ("which", "share"),
    [*((which, share) for which in ("model", "mmproj") for share in (0.0, 0.01, 0.9999)), ("model", 0.000005)],
)
def test_a_truncated_file(refused, llava, tmp_path, which, share):
    whole = getattr(llava, which).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    files = {"model": llava.model, "mmproj": llava.mmproj, which: cut}
    done = refused("chat", *pair(files["model"], files["mmproj"]), "Hello")
    done.failed(1, "cut.gguf")
    assert "truncated" in done.err or "not a GGUF file" in done.err


def test_truncation_anywhere_in_the_header_is_found(llava, tmp_path, pytestconfig):
    whole = llava.mmproj.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, 6000, 7 if pytestconfig.getoption("all") else 17):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_header(cut)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, just some text", b"GGML" + bytes(100)])
def test_a_file_that_is_no_gguf(refused, tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    refused("chat", *pair(path), "Hello").failed(1, "is not a GGUF file")


@pytest.mark.parametrize("version", [0, 1, 4, 50331648])
def test_a_gguf_of_another_version(refused, llava, tmp_path, version):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + llava.mmproj.read_bytes()[8:])
    refused("chat", *pair(path), "Hello").failed(1, "version")


def test_counts_that_no_file_has(tmp_path):
    path = tmp_path / "x.gguf"
    for counts in ((2**63, 1), (1, 2**63), (2**40, 2**40)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(100))
        with pytest.raises(ModelError, match="damaged"):
            read_header(path)


@pytest.mark.parametrize("length", [2**24, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_lengths_that_no_text_has(tmp_path, length):
    path = tmp_path / "x.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    for value in (struct.pack("<IQ", 8, length), struct.pack("<IIQQQ", 9, 8, 2, length, length)):
        path.write_bytes(head + value + bytes(100))
        with pytest.raises(ModelError, match="damaged"):
            read_header(path)


def test_model_and_mmproj_swapped(kvedge, llava):
    kvedge("chat", *pair(llava.mmproj), "Hello").failed(1, "is an image encoder", "--mmproj")
    kvedge("chat", *pair(llava.model, llava.model), "Hello").failed(1, "not an image encoder")


def test_an_mmproj_of_another_model(kvedge, tiny, llava, picture_file):
    qwen, wide = tiny("qwen2vl"), tiny("llava", head_size=128)
    image = ["--image", picture_file(), "Hello"]
    kvedge("chat", *pair(llava.model, wide.mmproj), *image).failed(1, "width 512", "needs 256")
    kvedge("chat", *pair(llava.model, qwen.mmproj), *image).failed(1, "was not made for a 'llama' model")
    kvedge("chat", *pair(qwen.model, llava.mmproj), *image).failed(1, "was not made for a 'qwen2vl' model")


def with_value(path, out, name, replacement):
    """Writes a copy of a GGUF file with one text replaced by a text of the same length."""
    data = path.read_bytes()
    assert data.count(name) >= 1 and len(name) == len(replacement)
    out.write_bytes(data.replace(name, replacement))
    return out


def test_an_architecture_that_does_not_exist(kvedge, tiny, tmp_path):
    odd = with_value(tiny("llama").model, tmp_path / "odd.gguf", b"llama", b"lxama")
    kvedge("chat", *pair(odd), "Hello").failed(1, "odd.gguf", "unknown model architecture", "lxama")


def test_a_projector_that_does_not_exist(kvedge, llava, tmp_path):
    length = struct.pack("<Q", 3)
    odd = with_value(llava.mmproj, tmp_path / "odd.gguf", length + b"mlp", length + b"xyz")
    kvedge("chat", *pair(llava.model, odd), "Hello").failed(1, "odd.gguf", "unknown projector type")


def test_a_model_with_nothing_to_compress(kvedge, tiny):
    for kind in ("mamba", "deepseek2"):
        kvedge("chat", *pair(tiny(kind).model), "Hello").failed(1, "nothing to compress", "--method full")


# ------------------------------------------------------------------------------------------------- images


def test_an_image_for_a_text_model(kvedge, tiny, picture_file):
    kvedge("chat", *pair(tiny("llama").model), "--image", picture_file(), "Hello").failed(2, "--image", "--mmproj")
    with tiny("llama").session() as session, pytest.raises(UsageError, match="without an image encoder"):
        session.ask("Hello", images=[picture_file()])


def test_images_that_cannot_be_read(kvedge, llava, picture_file, tmp_path):
    arguments = ["chat", *llava.arguments(), "--image"]
    kvedge(*arguments, "nowhere.png", "Hello").failed(1, "nowhere.png does not exist")
    kvedge(*arguments, tmp_path, "Hello").failed(1, "is a folder")
    text = tmp_path / "text.png"
    text.write_text("no picture")
    kvedge(*arguments, text, "Hello").failed(1, "text.png is not a readable image")
    (tmp_path / "empty.png").write_bytes(b"")
    kvedge(*arguments, tmp_path / "empty.png", "Hello").failed(1, "empty.png is not a readable image")


def png_header(width, height):
    """Returns a PNG whose header states this size, with only a few pixels of data."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(100000, 100000), (2**31 - 1, 2**31 - 1), (50_000_001, 1)])
def test_a_decompression_bomb(kvedge, llava, tmp_path, size):
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png_header(*size))
    done = kvedge("chat", *llava.arguments(), "--image", bomb, "Hello")
    done.failed(1, "bomb.png", "pixels")


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_odd_shapes_of_images_work(tiny, picture_file, kind):
    with tiny(kind).session() as session:
        for width, height in ((1, 1), (1, 700), (2000, 3)):
            image = picture_file(f"{width}x{height}.png", width, height)
            answer = session.ask("Hello", image, pykvedge.Sampling(max_tokens=2))
            assert answer.read() and answer.report.tokens.image > 0
            session.clear()


# ------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_longer_than_the_context(kvedge, llava, picture_file):
    long = "word " * 300
    kvedge("chat", *llava.arguments(), "--ctx", 256, long).failed(1, "tokens", "the context holds 256", "--ctx")
    image = ["--image", picture_file()]
    kvedge("chat", *llava.arguments(), *image, "--ctx", 20, "Hello").failed(1, "16 of images", "--ctx")


def test_a_prompt_that_fills_the_context_to_the_brim(kvedge, tiny):
    arguments = ["chat", *tiny("llama").arguments(), "--json", "--max-tokens", 50, "Hello there"]
    n = kvedge(*arguments).json["tokens"]["prompt"]
    # llama.cpp rounds contexts up to a multiple of 256 tokens, but the answer must end at the given size
    for ctx in (n, n + 1, n + 5):
        done = kvedge(*arguments, "--ctx", ctx)
        assert done.code == 0 and 1 <= done.json["tokens"]["generated"] <= 50
    kvedge(*arguments, "--ctx", n - 1).failed(1, f"{n} tokens")


def test_two_values_of_one_setting(kvedge, llava):
    ask = ["chat", *llava.arguments(), "--method", "snapkv", "--set", "scorer.window=8", "--set"]
    kvedge(*ask, "scorer.window=16", "Hello").failed(2, "scorer.window two values, 8 and 16")
    assert kvedge(*ask, " scorer.window = 8", "--max-tokens", 1, "Hello").code == 0


def test_an_empty_prompt(kvedge, llava, tmp_path):
    for stdin in ("", "\n", "  \n "):
        kvedge("chat", *llava.arguments(), stdin=stdin).failed(2, "empty")
    kvedge("chat", *llava.arguments(), "").failed(2, "empty")
    kvedge("inspect", *llava.arguments(), "--no-figures", "--prompt", " ", "--output", tmp_path).failed(2, "empty")


def test_prompts_with_anything_in_them(kvedge, llava, picture_file):
    odd = ("<__media__>", "<__image_0__> <image>", "</s>", "<|im_end|>", "{{ 7*7 }} {% raise %}", "\x00x", "🦙é\u0301")
    for text in odd:
        done = kvedge("chat", *llava.arguments(), "--image", picture_file(), "--max-tokens", 2, "--quiet", stdin=text)
        assert done.code == 0, (text, done)


# ------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(("options", "says"), [
    (["--budget", "0"], "budget"), (["--budget", "-0.2"], "budget"), (["--budget", "-5"], "budget"),
    (["--budget", "1.5"], "budget"), (["--budget", "lots"], "budget"), (["--budget", ""], "budget"),
    (["--budget", "8", "--recent", "10"], "protected"), (["--budget", "8", "--sinks", "10"], "protected"),
    (["--budget", "0.2", "--recent", "0.6"], "protected"),
    (["--recent", "many"], "recent"), (["--recent", "-1"], "recent"), (["--sinks", "-1"], "sinks"),
    (["--method", "lokm"], "did you mean 'lookm'"), (["--method", ""], "unknown method"),
    (["--reducer", "pivotl"], "did you mean 'pivotal'"),
    (["--method", "full", "--budget", "0.5"], "keeps all KV pairs"),
    (["--ctx", "0"], "--ctx"), (["--ctx", "-5"], "--ctx"), (["--ctx", "5000000000"], "--ctx must be at most"),
    (["--threads", "0"], "--threads"), (["--threads", "100000"], "threads"), (["--gpu-layers", "-2"], "gpu_layers"),
    (["--kv-type", "q9_9"], "kv_type"), (["--kv-type", "q8_0:"], "kv_type"), (["--kv-type", "f16:kivi3"], "kivi"),
    (["--max-tokens", "0"], "max_tokens"), (["--temp", "-1"], "temp"),
    (["--temp", "nan"], "temp"), (["--top-p", "0"], "top_p"), (["--top-k", "-1"], "top_k"), (["--seed", "-1"], "seed"),
    (["--seed", "x"], "--seed"), (["--budgt", "0.2"], "--budget"), (["--merge", "pivotal"], "--merge"),
    (["--set", "window=3"], "STAGE.NAME=VALUE"), (["--set", "scorer.nothing=3"], "nothing"),
    (["--set", "scorer.window=many"], "scorer.window"), (["--allocator", "uniformly"], "did you mean 'uniform'"),
])  # fmt: skip
def test_options_out_of_range(refused, llava, options, says):
    refused("chat", *llava.arguments(), *options, "Hello").failed(2, says)


def test_a_budget_that_the_protected_tokens_of_this_prompt_exceed(kvedge, llava):
    kvedge("chat", *llava.arguments(), "--budget", "0.1", "--recent", "30", "word " * 60).failed(2, "protected")
    kvedge("chat", *llava.arguments(), "--budget", "0.1", "--sinks", "40", "word " * 60).failed(2, "protected")


def test_no_number_is_within_no_bounds(kvedge):
    for words in (("serve", "--grace"), ("serve", "--temp"), ("tune", "--minutes"), ("tune", "--target")):
        kvedge(*words, "nan").failed(2, words[1], "nan is not a number")


def test_unknown_commands(kvedge):
    kvedge("chatt").failed(2, "chatt")
    kvedge("methods", "x", "y").failed(2, "y")


# ------------------------------------------------------------------------------------------------- memory


def test_a_context_that_no_memory_holds(kvedge, llava):
    done = kvedge("chat", *llava.arguments(), "--ctx", 400_000_000, "Hello")
    done.failed(1, "not enough memory", "--ctx")


# ------------------------------------------------------------------------------------------------- error messages


def broken_plan(**fields):
    return json.dumps({**json.loads(pykvedge.plan("lookm", 0.2).to_json()), **fields})


BAD_PLANS = {
    "a list as a stage": broken_plan(scorer=["mean"]),
    "an object as a stage": broken_plan(reducer={"evict": 1}),
    "no name as a method": broken_plan(method=3),
    "a list as params": broken_plan(params=["scorer.window"]),
    "no params": broken_plan(params=None),
    "a number as params": broken_plan(params=7),
    "brackets": "[" * 100_000,
    "objects": '{"a":' * 100_000,
    "a long name": broken_plan(scorer="x" * 100_000),
    "too large": " " * (1 << 20) + broken_plan(),
}


@pytest.mark.parametrize("text", BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_is_none(text, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(UsageError) as said:
        options.read_plan(file)
    assert len(one_line(said.value)) < 2100


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a device that has no end")
def test_a_plan_without_end(kvedge, llava):
    done = kvedge("chat", *llava.arguments(), "--plan", "/dev/zero", "Hello", preexec_fn=no_more_than(2 << 30))
    done.failed(2, "/dev/zero is not a plan")


def no_more_than(n_bytes):
    def limit():
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))

    return limit


def test_commands_for_a_terminal_are_written_out(kvedge, llava, tmp_path):
    name = "\x1b]0;gone\x07\x1b[2J\u202e.png"
    done = kvedge("chat", *llava.arguments(), "--image", tmp_path / name, "Hello")
    done.failed(1, r"\x1b]0;gone\x07\x1b[2J\u202e.png does not exist")
    assert done.err.rstrip("\n").isprintable()
    done = kvedge("chat", "--model", f"{name}.gguf", "Hello")
    done.failed(1, r"\x1b[2J")
    assert done.err.rstrip("\n").isprintable()


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError


def test_an_error_that_cannot_be_written_is_one_line_too(kvedge, llava, write):
    assert one_line(MuteError()) == "MuteError (its text is not available)"
    plugin = write(
        "from pykvedge import scorer\n"
        "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError\n"
        "@scorer('mute')\ndef mute(layer, settings):\n    raise Mute\n"
    )
    done = kvedge("chat", *llava.arguments(), "--plugin", plugin, "--method", "h2o", "--scorer", "mute", "word " * 40)
    done.failed(1, "failed: Mute", "my_method.py:7")
