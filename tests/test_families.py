"""Families of vision-language models: answers equal stock llama.cpp's; the compressed layers equal docs/models.md's."""

import functools
import sys
from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np
import pytest
from choosing import crossed
from conversations import SHORT, a_plan, say
from modelgen import text
from modelgen import tiny as tiny_models
from modelgen.families import FAMILIES
from stock_runner import Runner, picture
from test_provider import divergence

import pykvedge
from pykvedge.errors import NothingToCompressError, UnsupportedError
from pykvedge.library.libkvedge import Cache
from pykvedge.models import imagecount
from pykvedge.models.gguf import read_header
from pykvedge.models.imagetokens import image_grid
from pykvedge.models.vision import Vision
from pykvedge.native.abi import DEVICES_ALL, DEVICES_AUTO

N = 6  # tokens of an answer
MAX_KL = 1e-4  # nats
PAGE = 4096 if sys.platform != "darwin" else 16384  # a layer is rounded up to pages
QUESTION = "What is to be seen here, and what is to the left of it? Say it in a few words, please."
# kind -> layers whose keys and values kvedge holds; all other layers have a window, a state, or another cache
HELD = {kind: [1, 3] for kind in ("qwen35", "gemma3v", "lfm2vl", "gemma4v", "gemma4e")} | {"kimivl": [], "llama4": [3]}
# stock llama.cpp cannot drop the same tokens: positions differ from token numbers, or chunks are wide
NOT_DROPPED = {"qwen25vl", "qwen3vl", "qwen35", "glm4v", "llama4"}
PAIRS = list(FAMILIES)


def layers_of(kind):
    return HELD.get(kind, list(range(FAMILIES[kind].n_layers)))


@functools.cache
def scene(width=300, height=200):
    return picture(width, height, seed=5)


@dataclass
class Reading:
    """A session's input for a question: its prompt, with mtmd's marker for the picture; and N rows of logits."""

    prompt: str = ""
    logits: list = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    n_image: int = 0
    kept: list[int] = field(default_factory=list)  # tokens of the first head that kvedge holds


def read_by_session(files, monkeypatch, plan=None):
    seen, split = Reading(), Vision.split

    def noting(self, text, pictures):
        seen.prompt += text.replace(self.marker, "<__media__>")
        return split(self, text, pictures)

    with monkeypatch.context() as patched, files.session(plan) as session:
        patched.setattr(Vision, "split", noting)
        answer = session.ask(QUESTION, [scene()])
        seen.n_image = answer.report.tokens.image
        seen.kept = session.engine.cache.tokens(0, 0) if session.engine.cache else []
        for _ in range(N):
            seen.logits.append(session.engine.context.logits().copy())
            seen.ids.append(int(seen.logits[-1].argmax()))
            session.engine.extend(seen.ids[-1])
        answer.close()
    return seen


@pytest.mark.parametrize("kind", PAIRS)
def test_answers_are_those_of_stock(tiny, native, monkeypatch, kind):
    files = tiny(kind)
    ours = read_by_session(files, monkeypatch)
    with Runner(files.model, files.mmproj, exact=True) as stock:
        stock.special = False  # the prompt has its BOS token already
        theirs = stock.answer(scene(), ours.prompt, N)
    assert ours.prompt.count("<__media__>") == 1 and ours.n_image == theirs.image_tokens > 0
    assert ours.ids == theirs.ids
    apart = list(map(divergence, theirs.logits, ours.logits))
    assert max(apart) < MAX_KL, apart


COMPRESSED = [kind for kind in PAIRS if layers_of(kind)]


@pytest.mark.parametrize(("kind", "method"), list(zip(COMPRESSED, cycle(["mixkv", "lookm"]), strict=False)))
def test_its_layers_are_compressed(tiny, native, kind, method):
    plan = pykvedge.plan(method, 0.3)
    with tiny(kind).session(plan) as session:
        answer = session.ask(QUESTION, [scene()], pykvedge.Sampling(max_tokens=N))
        lengths, n = session.engine.cache.lengths(), answer.report.tokens.prompt
        assert session.engine.cache.layer_ids() == layers_of(kind)
        assert {kept for heads in lengths for kept in heads} == {plan.count(n)} and plan.count(n) < n / 3
        assert answer.read() and answer.report.tokens.generated
        kv = answer.report.kv
    assert kv.kept_per_layer == [plan.count(n)] * len(layers_of(kind))
    layers, row = len(layers_of(kind)), 2 * 2 * 32 * 2  # bytes: keys and values of two heads of 32, f16
    kept = plan.count(n) * row * layers
    assert kept <= kv.kept_bytes < kept + layers * PAGE and kv.full_bytes >= n * row * layers


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if not layers_of(kind)])
def test_what_has_nothing_to_compress_says_so(tiny, native, kind):
    with (
        tiny(kind).session(pykvedge.plan("lookm", 0.3)) as session,
        pytest.raises(NothingToCompressError, match="use --method full"),
    ):
        session.ask(QUESTION, [scene()])


@pytest.mark.parametrize("kind", [kind for kind in COMPRESSED if kind not in NOT_DROPPED])
def test_what_was_dropped_is_read_by_no_layer(tiny, native, monkeypatch, kind):
    """Equals stock llama.cpp without these tokens: windows of 32 do not reach back to dropped tokens."""
    files = tiny(kind)
    ours = read_by_session(files, monkeypatch, pykvedge.plan("streaming-llm", 60))
    with Runner(files.model, files.mmproj, exact=True) as stock:
        stock.special = False
        theirs = stock.answer(scene(), ours.prompt, N, kept=ours.kept)
        whole = stock.answer(scene(), ours.prompt, N)
    assert len(ours.kept) == 60 < theirs.prompt_tokens - 20
    apart, without = (list(map(divergence, x.logits, ours.logits)) for x in (theirs, whole))
    assert max(apart) < MAX_KL < max(without), (apart, without)


@pytest.mark.parametrize("plan", ["sliding", "scored", "ragged", "merged"])
def test_layers_that_share_a_cache_read_what_is_kept(tiny, native, plan):
    """Layers 4 and 5 of gemma4e have no keys and values. Layer 5 reads those of layer 3, at their held length."""
    with tiny("gemma4e").session(a_plan(plan), undo=True) as session:
        answer = session.ask(QUESTION, [scene()], SHORT)
        first = [session.engine.cache.layer_ids(), session.engine.cache.lengths()]
        text = answer.read()
        second = say(session, "And to the right of it?", [scene(90, 120)])
        assert first[0] == [1, 3] and all(n < answer.report.tokens.prompt for heads in first[1] for n in heads)
        assert second.text and second.kv.compressed_tokens > 0
        session.undo()
        assert say(session, "And to the right of it?", [scene(90, 120)]).text == second.text
    assert text


def test_a_model_that_shares_a_cache_takes_no_bounded_prompt(tiny, native):
    with tiny("gemma4e").session(pykvedge.plan("lookm", 0.3), bounded=True) as session:
        report = say(session, QUESTION, [scene()])
        assert report.bounded is False and "earlier layer" in report.not_bounded
        session.engine.cache.compress()
        with pytest.raises(UnsupportedError, match="an earlier layer"):
            session.engine.cache.bound_prompt(np.zeros(4, np.uint8))


def test_on_devices_layers_that_share_a_cache_stay_with_llama_cpp(tiny, native):
    """The CPU acts as a device, through ggml's graphs."""
    files = tiny("gemma4e")
    with files.session(device="CPU") as session:
        assert say(session, QUESTION, [scene()]).text and session.engine.cache is None
    with (
        files.session(pykvedge.plan("lookm", 0.3), device="CPU") as session,
        pytest.raises(NothingToCompressError, match="use --method full"),
    ):
        session.ask(QUESTION, [scene()])
    assert "keep the layers off the devices" in attach_error(files.model, DEVICES_ALL)


def test_a_reading_layer_of_another_shape_is_named_as_the_cause(tmp_path, native, monkeypatch):
    """Layer 5 reads the rows of layer 3, but has 8 query heads instead of 4."""
    normed, text_model = text.normed, tiny_models.text_model

    def wider(spec, i, *mean):
        return normed(replace(spec, n_heads=8, width=spec.n_embd) if i == 5 else spec, i, *mean)

    def model(spec):
        meta, tensors = text_model(spec)
        return meta | {"gemma4.attention.head_count": [4] * 5 + [8]}, tensors

    monkeypatch.setattr(text, "normed", wider)
    monkeypatch.setattr(tiny_models, "text_model", model)
    path, _ = tiny_models.write_tiny("gemma4e", tmp_path)
    assert "other heads" in attach_error(path, DEVICES_AUTO)


def attach_error(model, devices):
    with Runner(model) as stock, pytest.raises(NothingToCompressError) as refused:
        Cache(stock.ctx, pykvedge.plan("lookm", 0.3), devices=devices)
    return str(refused.value)


SIZES = [(300, 200), (80, 60), (14, 14), (64, 2000), (333, 1021), (1200, 900)]


@pytest.mark.parametrize("kind", PAIRS)
def test_fit_counts_image_tokens_as_mtmd_does(tiny, native, kind):
    files = tiny(kind)
    model, mmproj = read_header(files.model), read_header(files.mmproj)
    with Runner(files.model, files.mmproj) as stock:
        made = [stock.image_tokens(scene(*size)) for size in SIZES]
    try:
        grids = [image_grid(mmproj, *size) for size in SIZES]
    except UnsupportedError:
        grids = imagecount.count(model, mmproj, SIZES)
    assert [grid.n_tokens for grid in grids] == made
    assert all(grid.n_patches > 0 for grid in grids)


@pytest.mark.parametrize(
    ("kind", "limits"),
    crossed(["smolvlm", "qwen3vl", "lfm2vl"], [(), *(("--image-tokens", n) for n in ("3", "0.3"))], [], ["smolvlm"]),
    ids=str,
)
def test_fit_says_what_chat_reads(tiny, kvedge, picture_file, kind, limits):
    """One image, tiled or not, and two images of different sizes."""
    files = tiny(kind)
    small, large = (picture_file(f"{w}.png", w, h) for w, h in ((300, 200), (600, 500)))
    for images in ([small], [small, large]):
        given = [*(arg for image in images for arg in ("--image", image)), *limits]
        fit = "fit", files.model, "--mmproj", files.mmproj, *given
        planned = kvedge(*fit, "--json").json
        read = kvedge("chat", *files.arguments(), *given, "--method", "full", "--max-tokens", 1, "--json", "What?").json
        assert planned["bytes"]["prompt_tokens"] - 64 == read["tokens"]["image"] > 0
        assert planned["bytes"]["encoder_compute"] > 0
        if len(images) == 1:
            assert planned["image_tokens"] == read["tokens"]["image"]
    all_alike = planned["image_tokens"] * 2 == read["tokens"]["image"]
    assert f"2 images of {'' if all_alike else 'up to '}{planned['image_tokens']} tokens" in kvedge(*fit).out


def test_an_encoder_that_is_not_here_is_not_asked(tiny, native):
    header = read_header(tiny("smolvlm").mmproj)
    assert imagecount.is_here(header)
    assert not imagecount.is_here(header, replace(header, path=header.path.with_name("other.gguf")))
    assert not imagecount.is_here(replace(header, file_size=header.file_size + 1))
