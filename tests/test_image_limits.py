"""Limits of an image's tokens: mtmd's counts, the numbers of `kvedge fit`, and the savings."""

import random
from pathlib import Path

import pytest
from conversations import say
from PIL import Image
from server import serving

import pykvedge
from pykvedge import ContextError, Sampling, Session, UsageError
from pykvedge.fit.imagework import _readable, image_work
from pykvedge.models.documents import PageSize
from pykvedge.models.encoder import Encoder
from pykvedge.models.gguf import Header, Tensor, read_header
from pykvedge.models.images import Picture, scaled_size
from pykvedge.models.imagetokens import MAX_TOKENS, ImageGrid, image_grid, token_limits
from pykvedge.models.vision import ImagePiece, Vision

FEW = Sampling(max_tokens=3)
SIZES = [(80, 60), (14, 14), (1, 500), (333, 1021), (999, 998), (2000, 30), (28, 28), (1400, 1400), (57, 3000)]


@pytest.fixture(scope="module")
def qwen(tiny, native):
    files = tiny("qwen2vl")
    with pykvedge.load(files.model, files.mmproj, threads=1) as model:
        yield files, model


@pytest.mark.parametrize("asked", [(0, 16), (64, 0), (10, 10), (1, 1), (0, 3), (5000, 0), (30, 200), (0, 1000)])
def test_tokens_are_those_of_mtmd(qwen, asked):
    files, model = qwen
    loan = model.lend()
    header, draw = read_header(files.mmproj), random.Random(str(asked))
    n_more = 12 if asked[0] < 1000 else 4  # images of this model are large
    sizes = SIZES + [(draw.randrange(1, 1200), draw.randrange(1, 1200)) for _ in range(n_more)]
    encoder = Encoder(files.mmproj, loan.model, 1, False, False, asked)
    vision = Vision(encoder)
    try:
        for width, height in sizes:
            pieces = vision.split(vision.marker, [Picture("p", width, height, bytes(width * height * 3))])
            made = sum(p.n_tokens for p in pieces if isinstance(p, ImagePiece))
            vision.release(pieces)
            assert image_grid(header, width, height, token_limits(header, *asked)).n_tokens == made, (width, height)
            assert made >= asked[0] or asked[0] == asked[1]
            # an image enlarged to the minimum may get one more row and column
            if asked[1] and asked[0] < asked[1] // 2 and max(width, height) < asked[1] * min(width, height):
                assert made <= asked[1], (width, height)
    finally:
        encoder.close()
        loan.give_back()


def test_a_session_and_fit_know_the_limits(qwen, kvedge, picture_file):
    files, _ = qwen
    image = picture_file("large.png", 800, 600)
    seen = {}
    for most in (0, 100, 12):
        with files.session(image_max_tokens=most) as session:
            seen[most] = say(session, "What?", [image], FEW).tokens.image
    assert seen[0] == 29 * 21 and 50 < seen[100] <= 100 and 6 < seen[12] <= 12
    options = ["--image", image, "--image-max-tokens", 100, "--json"]
    assert kvedge("fit", files.model, "--mmproj", files.mmproj, *options).json["image_tokens"] == seen[100]
    assert kvedge("chat", *files.arguments(), *options, "--max-tokens", 2, "What?").json["tokens"]["image"] == seen[100]


def test_fit_counts_a_huge_picture_as_chat_reads_it(qwen, kvedge, tmp_path):
    """The picture is scaled at loading: in chat, beside a PDF, and by its size alone."""
    files, _ = qwen
    image = tmp_path / "huge.png"
    Image.new("RGB", (3001, 1999), "red").save(image)
    most = ["--image-max-tokens", 2, "--image-min-tokens", 1, "--json"]  # few tokens, so that rounding matters
    said = [
        kvedge("fit", files.model, "--mmproj", files.mmproj, *size, *most).json["image_tokens"]
        for size in (["--image", image], ["--image-size", "3001x1999"])
    ]
    read = kvedge("chat", *files.arguments(), "--image", image, *most, "--max-tokens", 2, "?").json["tokens"]["image"]
    header = read_header(files.mmproj)
    pixels = PageSize.asked(header, 1, 2).pixels
    with Session(pykvedge.load(files.model, files.mmproj, image_min_tokens=1, image_max_tokens=2)) as session:
        assert session.page_size.pixels == pixels
        loaded = pykvedge.load_picture(image, None, pixels)
    assert (loaded.width, loaded.height) == scaled_size(3001, 1999, pixels) != (3001, 1999)
    assert said == [read, read] == [image_grid(header, loaded.width, loaded.height, (1, 2)).n_tokens] * 2


def test_a_larger_least_enlarges(qwen, picture_file):
    files, model = qwen
    with Session(model) as session:
        before = say(session, "What?", [picture_file()], FEW).tokens.image
    with pykvedge.load(files.model, files.mmproj, threads=1, image_min_tokens=40) as other, Session(other) as session:
        assert before < 40 <= say(session, "What?", [picture_file()], FEW).tokens.image < 60


def test_limits_that_cannot_be(tiny, native, refused, picture_file):
    llava, llama, qwen = tiny("llava"), tiny("llama"), tiny("qwen2vl")
    for wrong in ({"image_min_tokens": -1}, {"image_max_tokens": MAX_TOKENS + 1}, {"image_max_tokens": 2.5}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            pykvedge.Settings(**wrong)
    steps = []
    for limits in ({"image_max_tokens": 8}, {"image_min_tokens": 8}):
        with pytest.raises(UsageError, match=r"mmproj\.gguf: its images have a fixed size; use --image-tokens"):
            pykvedge.load(llava.model, llava.mmproj, progress=lambda *step: steps.append(step), **limits)
        with pytest.raises(UsageError, match="give the mmproj"):
            pykvedge.load(llama.model, progress=lambda *step: steps.append(step), **limits)
    assert not steps  # nothing was loaded for that
    with pykvedge.load(qwen.model, qwen.mmproj, threads=1) as model, pytest.raises(UsageError, match=r"pykvedge\.load"):
        Session(model, image_max_tokens=8)
    ask = ("chat", *llava.arguments(), "--image", picture_file())
    refused(*ask, "--image-max-tokens", 8, "Hi").failed(2, "--image-max-tokens", "a fixed size", "--image-tokens")
    refused(*ask, "--image-max-tokens", 0, "Hi").failed(2, "--image-max-tokens", "at least 1")
    refused(*ask, "--image-min-tokens", 9, "--image-max-tokens", 8, "Hi").failed(2, "image_min_tokens is 9", "8")
    fit = ("fit", qwen.model, "--mmproj", qwen.mmproj)
    refused(*fit, "--image-min-tokens", 9, "--image-max-tokens", 8).failed(2, "image_min_tokens is 9", "8")
    refused(*fit, "--image-max-tokens", 9, "--encoder-tokens", 8).failed(2, "--encoder-tokens")
    refused("fit", llama.model, "--image-max-tokens", 9).failed(2, "--mmproj")
    refused("fit", llava.model, "--mmproj", llava.mmproj, "--image-max-tokens", 9).failed(2, "--image-tokens")


def test_encoders_that_slice_their_images_are_told_apart_from_those_of_one_size(tiny):
    header = read_header(tiny("qwen2vl").mmproj)
    sliced = Header(**{**vars(header), "values": {**header.values, "clip.projector_type": "internvl"}})
    assert token_limits(sliced) is None
    with pytest.raises(UsageError, match="'internvl' takes no limits; use --image-tokens"):
        token_limits(sliced, 0, 100)


def test_images_of_other_limits_are_not_taken_from_a_folder(tiny, native, tmp_path):
    files, picture = tiny("qwen2vl"), Picture("p", 300, 200, bytes(range(250)) * 720)
    seen = []
    for limits in ((0, 0), (0, 16), (4, 16), (0, 16), (0, 0)):
        names = dict(zip(("image_min_tokens", "image_max_tokens"), limits, strict=True))
        with pykvedge.load(files.model, files.mmproj, threads=1, cache=tmp_path, **names) as model:
            with Session(model) as session:
                report = say(session, "What?", [picture], FEW)
            seen.append((report.tokens.images_reused, report.tokens.image))
    assert [reused for reused, _ in seen] == [0, 0, 0, 1, 1]
    assert seen[3][1] == seen[1][1] < seen[0][1] == seen[4][1]


# ------------------------------------------------------------------------------------------------------------
# What an image costs


def file_of(values, tensors):
    return Header(Path("x.gguf"), values, {}, {}, {}, {n: Tensor(s, 1, 0) for n, s in tensors.items()}, 0)


def tower(width, ff, layers, patch, projector, more):
    tensors = {"v.patch_embd.weight": (patch, patch, 3, width), "v.position_embd.weight": (width, 577), **more}
    for i in range(layers):
        tensors |= {f"v.blk.{i}.{name}.weight": (width, width) for name in ("attn_q", "attn_k", "attn_v", "attn_out")}
        tensors |= {f"v.blk.{i}.ffn_up.weight": (width, ff), f"v.blk.{i}.ffn_down.weight": (ff, width)}
        tensors[f"v.blk.{i}.ln1.weight"] = (width,)
    values = {"clip.projector_type": projector, "clip.vision.block_count": layers, "clip.vision.patch_size": patch}
    return file_of({**values, "clip.vision.embedding_length": width}, tensors)


def language(width, ff, layers, heads, heads_kv, experts=(1, 1)):
    used, there = experts
    one = (1,) if there == 1 else ()
    exps = "" if there == 1 else "_exps"
    kv, tensors = width // heads * heads_kv, {"token_embd.weight": (width, 32000), "output.weight": (width, 32000)}
    for i in range(layers):
        tensors |= {f"blk.{i}.attn_{name}.weight": (width, width) for name in ("q", "output")}
        tensors |= {f"blk.{i}.attn_{name}.weight": (width, kv) for name in "kv"}
        shapes = {"ffn_gate": (width, ff), "ffn_up": (width, ff), "ffn_down": (ff, width)}
        tensors |= {f"blk.{i}.{n}{exps}.weight": (*s, there)[: 2 + (not one)] for n, s in shapes.items()}
    names = {"embedding_length": width, "block_count": layers, "attention.head_count": heads,
             "attention.head_count_kv": heads_kv, "feed_forward_length": ff, "context_length": 4096,
             "vocab_size": 32000}  # fmt: skip
    values = {f"llama.{name}": value for name, value in names.items()} | {"general.architecture": "llama"}
    if there > 1:
        values |= {"llama.expert_used_count": used, "llama.expert_count": there, "llama.expert_feed_forward_length": ff}
    return file_of(values, tensors)


LLAVA_TOWER = tower(1024, 4096, 24, 14, "mlp", {})
QWEN_TOWER = tower(1280, 5120, 32, 14, "qwen2vl_merger", {"mm.0.weight": (5120, 5120), "mm.2.weight": (5120, 1536)})
LLAMA_7B, QWEN_2B = language(4096, 11008, 32, 32, 32), language(1536, 8960, 28, 12, 2)
QWEN_72B = language(8192, 29568, 80, 64, 8)


def test_the_encoder_s_work_is_what_others_count():
    """timm counts 191.1 billion multiplications and additions for vit_large_patch14_clip_336."""
    work = image_work(LLAVA_TOWER, LLAMA_7B, ImageGrid((576,), 577, 336 * 336), 0)
    assert work.encoder / 2 == pytest.approx(191.1e9, rel=0.005)


def test_the_prompt_s_work_is_two_operations_a_weight_and_token():
    """Llama-2-7B has 6.74 billion weights: 131 million are looked up, and 131 million make the logits."""
    work = image_work(LLAVA_TOWER, LLAMA_7B, ImageGrid((100,), 577, 336 * 336), 0)
    assert work.prompt == pytest.approx(100 * 2 * (6.738e9 - 2 * 131e6), rel=0.001)
    longer = image_work(LLAVA_TOWER, LLAMA_7B, ImageGrid((100,), 577, 336 * 336), 4000)
    # on average each token attends to 2000 others: a product for scores and one for values, in 32 layers
    assert longer.prompt - work.prompt == 100 * 32 * 2 * 2 * 2000 * 4096


def test_experts_that_rest_do_no_work():
    grid = ImageGrid((1,), 577, 336 * 336)
    dense, mixed = (
        image_work(LLAVA_TOWER, language(1024, 4096, 2, 8, 8, experts), grid, 0).prompt for experts in ((1, 1), (2, 8))
    )
    assert mixed - dense == 2 * 2 * 3 * 1024 * 4096  # a second expert in both layers; the other six experts do not run


@pytest.mark.parametrize(
    ("mmproj", "model", "grid", "share", "better"),
    [
        (LLAVA_TOWER, LLAMA_7B, ImageGrid((576,), 577, 336 * 336), (0.03, 0.07), "image_tokens"),
        (QWEN_TOWER, QWEN_2B, ImageGrid((1000,), 4000, 4000 * 196), (0.6, 0.9), "image_max_tokens"),
        (QWEN_TOWER, QWEN_72B, ImageGrid((1000,), 4000, 4000 * 196), (0.02, 0.1), "image_tokens"),
        (LLAVA_TOWER, language(512, 1024, 2, 8, 8), ImageGrid((576,), 577, 336 * 336), (0.9, 1.0), "image_tokens"),
    ],
    ids=["llava-7b", "qwen2-vl-2b", "qwen2-vl-72b", "one-size"],
)
def test_the_better_of_the_two_ways(mmproj, model, grid, share, better):
    work = image_work(mmproj, model, grid, grid.n_tokens + 64)
    assert share[0] < work.encoder_share < share[1] and work.better == better
    text = work.line()
    assert "\n" not in text and f"--{better.replace('_', '-')}" in text
    if mmproj is LLAVA_TOWER:
        assert "--image-max-tokens" not in text  # this encoder does not support the option


def test_fit_says_which_of_the_two(kvedge, tiny):
    model = tiny("qwen2vl")
    options = ["fit", model.model, "--mmproj", model.mmproj, "--image-size"]
    large, small = (kvedge(*options, size, "--json").json["image_work"] for size in ("1600x1600", "56x56"))
    for work in (large, small):
        share = work["encoder_flop"] / (work["encoder_flop"] + work["prompt_flop"])
        assert work["encoder_share"] == pytest.approx(share, abs=1e-4)
        assert work["better"] == ("image_max_tokens" if share >= 0.5 else "image_tokens")
    # patches attend to each other: the encoder's work grows quadratically, the prompt's nearly linearly
    assert large["encoder_share"] > 0.5 > small["encoder_share"]
    assert "--image-max-tokens (before the encoder) saves more" in " ".join(kvedge(*options, "1600x1600").out.split())
    assert kvedge(*options, "56x56", "--image-tokens", "0.5", "--json").json["image_work"] == small
    assert kvedge("fit", tiny("llama").model, "--json").json["image_work"] is None


def test_a_large_image_of_two_directions_comes_with_the_first_message(tiny, native, picture_file, monkeypatch):
    """A bidirectional image needs one batch, and the context is made for the largest image of the first message."""
    files, picture = tiny("llava", image_size=322), picture_file()
    with files.session() as session:
        session.ask("Hello.", sampling=FEW).read()
        session.ask("And this?", picture, sampling=FEW).read()
        assert session.last_report.tokens.image == 23 * 23 > session.engine.context.n_ubatch == 512
    monkeypatch.setattr(Vision, "non_causal", lambda self: True)
    with files.session() as session:
        session.ask("Hello.", sampling=FEW).read()
        with pytest.raises(ContextError, match="an image of 529 tokens is too large for a later message"):
            session.ask("And this?", picture)
        assert session.ask("And now?", sampling=FEW).read()


def test_operations_are_written_in_units_that_fit():
    shown = [_readable(n) for n in (3_440_000_000_000, 10**12, 999_940_000_000, 10**9, 12_500_000, 40_000)]
    assert shown == ["3.4 TFLOP", "1.0 TFLOP", "999.9 GFLOP", "1.0 GFLOP", "12.5 MFLOP", "0.0 MFLOP"]


def test_serve_says_what_a_large_picture_takes(qwen, environment):
    """The memory of the largest picture, in addition to --memory."""
    files, _ = qwen
    model = ("--model", files.model, "--mmproj", files.mmproj, "--image-max-tokens")
    for most, told in ((16384, True), (1024, False)):
        with serving(environment, *model, most) as server:
            _, _, said = server.end()
        assert ("a picture takes up to" in said and "--image-max-tokens takes less" in said) == told
