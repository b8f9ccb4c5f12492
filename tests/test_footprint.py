"""Memory planned from metadata, against llama.cpp's buffers, mtmd's token counts, and the system's figures."""

import re
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
from choosing import whole
from hubs import in_parts

import pykvedge
from pykvedge.errors import UnsupportedError
from pykvedge.fit.footprint import Files, Request, Weights, footprint, most_images, most_turns
from pykvedge.models.gguf import read_header, tensor_bytes
from pykvedge.models.imagetokens import image_grid
from pykvedge.models.shape import ModelShape
from pykvedge.runtime.llama_context import N_UBATCH

MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_images_that_cannot_be_counted(tiny):
    header = read_header(tiny("llava").mmproj)
    other = replace(header, values={**header.values, "clip.projector_type": "internvl"})
    with pytest.raises(UnsupportedError, match="--encoder-tokens"):
        image_grid(other, 100, 100)


def test_a_model_in_several_files_takes_as_much_as_in_one(tiny, tmp_path, refused):
    model = tiny("llama", n_layers=3).model
    one, files = read_header(model), in_parts(model, tmp_path)
    assert len(files) > 3
    found = read_header(files[0])
    assert {name: (t.shape, t.type) for name, t in found.tensors.items()} == {
        name: (t.shape, t.type) for name, t in one.tensors.items()
    }
    assert found.file_size + found.other_bytes == sum(file.stat().st_size for file in files)
    assert ModelShape.of(found) == ModelShape.of(one)
    weights, expected = Weights.of(found), Weights.of(one)
    assert (weights.in_place, weights.repacked) == (expected.in_place, expected.repacked)
    for file in files[1:]:
        refused("fit", "--model", file).failed(1, file.name, "-00001-of-")
    files[-1].write_bytes(files[-1].read_bytes()[:-40])
    refused("fit", "--model", files[0]).failed(1, files[-1].name, "truncated")
    files[-1].unlink()
    refused("fit", "--model", files[0]).failed(1, files[-1].name, "does not exist")
    refused("fit", "--model", files[0].rename(tmp_path / "other.gguf")).failed(1, "other.gguf", "-00001-of-")


@pytest.mark.parametrize("kind", ["llama", "qwen2vl", "qwen3"])
def test_the_compute_buffer_is_the_one_that_llama_cpp_reserves(tiny, kvedge, kind):
    model = tiny(kind, n_layers=2, n_heads=8, n_heads_kv=4, head_size=128)
    done = kvedge("chat", *model.arguments(), "--method", "full", "--max-tokens", 1, "--verbose", "Hello")
    sizes = [float(x) * MIB for x in re.findall(r"sched_reserve: +CPU compute buffer size = +([\d.]+) MiB", done.err)]
    shape = ModelShape.of(read_header(model.model))
    work = N_UBATCH * shape.n_ff * 34 // 32
    assert shape.compute(N_UBATCH) - work == pytest.approx(sizes[1], rel=0.03)  # sizes[0] is stock's


def as_much_again(tensor) -> float:
    """Counts a copy of every matrix in q4_0, as AVX2 makes one."""
    return float(tensor.type == gguf.GGMLQuantizationType.Q4_0)


def test_weights_on_devices_are_not_counted_and_all_others_are(tiny):
    header = read_header(tiny("llama", n_layers=3, weight="q4_0").model)
    for layer in ("blk.0.", "blk.1.", "blk.2."):
        away = frozenset(name for name in header.tensors if name.startswith(layer))
        rest = {name: tensor for name, tensor in header.tensors.items() if name not in away}
        found = Weights.of(header, away, as_much_again)
        assert found == Weights.of(replace(header, tensors=rest), copied=as_much_again)
        gone = sum(tensor_bytes(header.tensors[name]) for name in away)
        whole = Weights.of(header, copied=as_much_again)
        copied = sum(int(tensor_bytes(tensor) * as_much_again(tensor)) for tensor in map(header.tensors.get, away))
        assert whole.in_place + whole.repacked - found.in_place - found.repacked == gone and copied > 0


@linux
@pytest.mark.parametrize(
    ("weight", "method"), [("q4_0", "full"), *whole(("q8_0", "h2o"), ("q4_0", "h2o"), ("q8_0", "full"))]
)
def test_the_peak_is_the_measured_one(tiny, kvedge, weight, method):
    model = tiny("llama", n_layers=4, n_heads=8, n_heads_kv=8, head_size=128, weight=weight)
    options = ["--method", method, "--budget", "0.2" if method == "h2o" else "1.0", "--json", "--threads", 1]
    run = kvedge("chat", "--model", model.model, *options, "--max-tokens", 2, stdin="ab cd " * 400).json
    plan = kvedge("fit", model.model, *options, "--text", run["tokens"]["prompt"]).json["bytes"]
    assert plan["peak_prefill"] == pytest.approx(run["rss"]["peak_bytes"], rel=0.05)
    assert plan["after_compression"] == pytest.approx(run["rss"]["after_compress_bytes"], rel=0.05)
    assert plan["kv_prompt"] == pytest.approx(run["kv"]["full_bytes"], rel=0.01)
    assert plan["kv_kept"] == pytest.approx(run["kv"]["kept_bytes"], rel=0.05)


@linux
@pytest.mark.parametrize("keep", ["ram", "disk"])
def test_whole_rows_are_counted(tiny, kvedge, keep):
    model = tiny("llama", n_layers=3, n_heads=8, n_heads_kv=8, head_size=128, weight="q8_0")
    options = ["--method", "h2o", "--budget", "0.2", "--json", "--threads", 1, "--keep", keep]
    run = kvedge("chat", "--model", model.model, *options, "--max-tokens", 2, stdin="ab cd " * 400).json
    plan = kvedge("fit", model.model, *options, "--text", run["tokens"]["prompt"]).json["bytes"]
    assert plan["peak_prefill"] == pytest.approx(run["rss"]["peak_bytes"], rel=0.05)
    assert plan["whole_memory"] + plan["whole_file"] == pytest.approx(run["kv"]["whole_bytes"], rel=0.02)
    assert plan["whole_file"] == (pytest.approx(run["kv"]["full_bytes"], rel=0.02) if keep == "disk" else 0)
    if keep == "ram":
        assert plan["after_compression"] == pytest.approx(run["rss"]["after_compress_bytes"], rel=0.05)
    without = kvedge("fit", model.model, *options[:-2], "--text", run["tokens"]["prompt"]).json["bytes"]
    more = plan["after_compression"] - plan["program"] - (without["after_compression"] - without["program"])
    assert more == plan["whole_memory"] and without["whole_memory"] == without["whole_file"] == 0
    peaks = [found["peak_prefill"] - found["program"] for found in (plan, without)]
    assert peaks[0] - peaks[1] > plan["kv_kept"] // 2


@linux
@pytest.mark.parametrize(
    ("reducer", "method", "budget"),
    [("nearest", "snapkv", "0.5"), *whole(("averaged", "snapkv", "0.5"), ("position", "snapkv", "0.5"),
     ("match", "snapkv", "0.3"), ("match", "pyramidkv", "0.15"))],
)  # fmt: skip
def test_what_a_reducer_works_in_is_counted(tiny, kvedge, reducer, method, budget):
    """The peak rises by the work space of the reducer, compared with a reducer that only evicts."""
    n_layers = 1 if method == "snapkv" else 2  # pyramidkv divides the budget between layers
    model = tiny("llama", n_layers=n_layers, n_heads=8, n_heads_kv=8, head_size=128)

    def peaks(name):
        options = ["--method", method, "--budget", budget, "--reducer", name, "--json", "--threads", 2, "--ctx", 8192]
        run = kvedge("chat", "--model", model.model, *options, "--max-tokens", 1, stdin="ab cd " * 1600).json
        text = run["tokens"]["prompt"]
        assert text > 5000
        plan = kvedge("fit", model.model, *options, "--text", text).json["bytes"]
        return np.array([run["rss"]["peak_bytes"], plan["peak_prefill"] - plan["program"]])

    measured, told = peaks(reducer) - peaks("evict")
    most = 1.25 if method == "snapkv" else 1.5  # the unevenness of heads is estimated
    assert measured > 15 * MIB and 0.75 * measured < told < most * measured


@pytest.fixture
def files(tiny):
    header = read_header(tiny("llama").model)
    return Files(
        ModelShape.of(header),
        Weights.of(header, copied=as_much_again),
        program=50 * MIB,
        encoder=10 * MIB,
        encoder_compute=MIB,
    )


def test_the_largest_number_of_images_is_the_largest(files):
    request = Request(pykvedge.plan("lookm", 0.2), 1, 576, 64)
    for available in (80 * MIB, 200 * MIB, 3000 * MIB):
        found = {kind: most_images(files, request, available, kind) for kind in ("stock", "full", "compressed")}
        for kind, peak in [("stock", "peak_stock"), ("full", "peak_full"), ("compressed", "peak_prefill")]:
            for n, fits in ((found[kind], True), (found[kind] + 1, False)):
                f = footprint(files, replace(request, n_images=n))
                assert (getattr(f, peak) - f.reclaimable <= available) == fits or n < 0
        assert most_turns(files, request, available) > 3 * found["compressed"]
    assert most_images(files, request, MIB, "stock") == -1 == most_images(files, request, MIB, "compressed")


def test_what_is_not_attended_costs_no_cache(tiny):
    lfm2 = ModelShape.of(read_header(tiny("lfm2").model))
    assert len(lfm2.layers) == 2  # the other two are convolutions
    for kind, own in (("gemma4e", 4), ("gemma3n", 20)):  # the other layers read the keys and values of these
        assert len(ModelShape.of(read_header(tiny(kind).model)).layers) == own
    llama = ModelShape.of(read_header(tiny("llama").model))
    assert llama.kv_per_token(2) == 2 * 2 * (64 + 64) * 2


@pytest.mark.parametrize(("method", "settings", "grams", "weights"), [
    ("snapkv", {}, 0, 0), ("snapkv", {"critical": "l1"}, 0, 1), ("snapkv", {"critical": "l2"}, 1, 1),
    ("kvzip", {}, 0, 0), ("kvzip-plus", {}, 1, 1),
])  # fmt: skip
def test_what_weighing_values_takes_is_counted(tiny, method, settings, grams, weights):
    """W_O of one layer; with Euclidean norms, also a triangle of 32 x 33 / 2 for each head, from then on."""
    shape = ModelShape.of(read_header(tiny("llama", n_layers=3, n_heads=4, n_heads_kv=2, head_size=32).model))
    files = Files(shape, Weights(0, 0, 0), program=50 * MIB)
    plan = pykvedge.plan(method, 0.2, **settings)
    found = footprint(files, Request(plan, text_tokens=50))
    assert found.grams == grams * 4 * 3 * 4 * (32 * 33 // 2)
    plain = footprint(files, Request(pykvedge.plan("knorm", 0.2), text_tokens=50))
    assert found.after_compression - plain.after_compression == found.grams
    assert found.peak_prefill - plain.peak_prefill >= found.grams
    assert found.scores_and_layer - found.scores >= weights * 4 * shape.n_embd * 4 * 32
    all_kept = footprint(files, Request(pykvedge.plan(method, 1.0, **settings), text_tokens=50))
    assert all_kept.grams == 0  # nothing is compressed


@pytest.mark.parametrize(
    ("kind", "weight"), [("llama", "f16"), ("llama", "q4_0"), ("llama", "q8_0"), ("llama4", "q4_0")]
)
def test_what_is_rearranged_is_what_llama_cpp_says(tiny, kvedge, kind, weight):
    model = tiny(kind, n_layers=2, weight=weight)
    done = kvedge("chat", *model.arguments(), "--max-tokens", 1, "--verbose", "Hello")
    sizes = re.findall(r"(\w+) model buffer size = +([\d.]+) MiB", done.err)
    copies = sum(float(size) * MIB for name, size in sizes if name in ("AMX", "CPU_REPACK"))
    assert sizes and Weights.of(read_header(model.model)).repacked == pytest.approx(copies, rel=0.01, abs=0.01 * MIB)


# ------------------------------------------------------------------------------------------------- command line


def test_the_program_says_whether_it_fits(kvedge, tiny):
    model = tiny("qwen2vl")
    options = [model.model, "--mmproj", model.mmproj, "--images", 3, "--image-size", "300x200", "--ctx", 2048]
    done = kvedge("fit", *options)
    assert done.code == 0 and done.out.startswith("Fits: KV ") and "peak" in done.out and "3 images of" in done.out
    data = kvedge("fit", *options, "--json").json
    assert data["fits"] is True and data["bytes"]["n_ctx"] == 2048
    assert data["bytes"]["prompt_tokens"] == 64 + 3 * data["image_tokens"]
    tight = kvedge("fit", *options, "--text", 10**8, "--json").json
    assert tight["fits"] is False and set(tight["most_images"].values()) == {0}
    demo = kvedge("fit", "--json").json
    assert demo["image_tokens"] == 144 and demo["most_images"]["one_per_message"] > demo["most_images"]["stock"]


@pytest.mark.parametrize(("options", "n_ctx"), [(["--ctx", 256], 256), ([], 512)])
def test_a_prompt_that_would_be_refused_is_named(kvedge, refused, tiny, options, n_ctx):
    model = tiny("llama", n_ctx_train=512).model
    fit = ("fit", model, *options, "--text")
    assert "set a larger --ctx" not in kvedge(*fit, n_ctx).out
    said = " ".join(kvedge(*fit, n_ctx + 1).out.split())
    assert f"The prompt has {n_ctx + 1} tokens, more than the context of {n_ctx}: set a larger --ctx." in said
    refused("chat", "--model", model, *options, "word " * n_ctx).failed(1, "raise --ctx" if options else "set --ctx")


def test_plans_that_make_no_sense(refused, tiny, tmp_path):
    model = tiny("llava")
    refused("fit", tmp_path / "no.gguf").failed(1, "does not exist")
    refused("fit", model.model, "--mmproj", "none", "--images", 2).failed(2, "--mmproj")
    refused("fit", model.model, "--mmproj", model.mmproj, "--image-size", "big").failed(2, "--image-size", "big")
    refused("fit", model.model, "--mmproj", model.mmproj, "--image-size", "0x5").failed(2, "--image-size")
    refused("fit", model.model, "--method", "loookm").failed(2, "did you mean 'lookm'")
    refused("fit", model.model, "--budget", "2.5").failed(2, "budget")
    refused("fit", model.model, "--kv-type", "q9").failed(2, "kv_type")
    refused("fit", model.model, "--text", "0").failed(2, "--text")
    refused("fit", model.mmproj).failed(1, "image encoder")
