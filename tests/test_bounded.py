"""Bounded prefill keeps and answers the same as the ordinary prefill, and the full cache never exists."""

import json
import threading

import gguf
import numpy as np
import pytest
from attached import FEW, held, profiles
from batches import send
from choosing import distinct
from contexts import TinyContext

import pykvedge
from pykvedge import Budget, CancelledError, Session, StateError, UnsupportedError, UsageError, load_picture
from pykvedge.library.native_plan import why_not_bounded
from pykvedge.models.gguf import read_header
from pykvedge.models.token_table import TokenTable
from pykvedge.models.vision import ImagePiece, TextPiece
from pykvedge.runtime import bounded_batch

QUESTION = "What is in the two images? " * 3
METHODS = [name for name in pykvedge.methods() if name != "full" and not why_not_bounded(pykvedge.plan(name, 0.3))]


def pictures(picture_file):
    return [load_picture(picture_file(seed=seed)) for seed in (1, 2)]


def ask(model, plan, images, bounded, turns=1, **settings):
    """Returns (kept sets, report, text, stats) after the last of the turns."""
    with Session(model.model, model.mmproj, plan, bounded=bounded, threads=1, **settings) as session:
        for turn in range(turns):
            answer = session.ask(QUESTION if turn == 0 else "And now?", images if turn == 0 else [])
            sets = held(session.engine.cache)
            text = "".join(piece for _, piece in zip(range(6), answer, strict=False))
            answer.close()
        return sets, answer.report, text, session.engine.cache.stats()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(kind, method, marks=() if method in usual else pytest.mark.whole)
        for kind, usual in (("llava", distinct()), ("qwen2vl", FEW))
        for method in METHODS
    ],
)
def test_keeps_and_answers_as_the_ordinary_way_does(native, tiny, picture_file, profile_file, kind, method):
    plan, images = pykvedge.plan(method, 0.3), pictures(picture_file)
    profile = profiles(profile_file, tiny(kind), method)
    sets, report, text, _ = ask(tiny(kind), plan, images, False, profile=profile)
    ours, bounded, same, _ = ask(tiny(kind), plan, images, True, profile=profile)
    assert bounded.bounded is True and bounded.not_bounded == "" and report.bounded is None
    assert ours == sets and same == text
    assert bounded.kv.kept_bytes == report.kv.kept_bytes and bounded.kv.kept_of_them == report.kv.kept_of_them
    assert bounded.kv.compressed_tokens == report.kv.compressed_tokens == bounded.tokens.prompt
    assert bounded.kv.peak_bytes < report.kv.peak_bytes


def test_the_full_cache_never_exists(native, tiny):
    """The peak is the kept rows, one layer of eight, and the gathered data of this layer: a few bytes per token."""
    with TinyContext(tiny("llama", n_layers=8).model, pykvedge.plan("lookm", 0.1)) as context:
        context.cache.bound_prompt(np.zeros(1200, dtype=np.uint8))
        assert decode(context, 1200) == 0
        stats = context.cache.stats()
        gathered = 1200 * 8 * stats.n_heads_kv + stats.index_bytes
        assert stats.after_bytes == stats.bytes < 0.11 * stats.before_bytes
        assert stats.peak_bytes < stats.bytes + stats.before_bytes / 8 + gathered + 2**14


def test_quantised_rows_and_a_second_turn(native, tiny, picture_file):
    plan, images = pykvedge.plan("lookm", 0.3), pictures(picture_file)
    sets, _, text, _ = ask(tiny("llava"), plan, images, False, turns=2, kv_type="kivi4")
    ours, report, same, _ = ask(tiny("llava"), plan, images, True, turns=2, kv_type="kivi4")
    assert report.bounded and ours == sets and same == text


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0", "Q4_0"])
def test_rows_of_the_token_table(tmp_path, dtype):
    """The rows equal those of the gguf library, which reads the whole table."""
    rows = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[dtype]
    data = rows if dtype == "F32" else gguf.quants.quantize(rows, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("other", np.zeros(7, dtype=np.float32))
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = gguf.quants.dequantize(data, kind) if dtype != "F32" else rows
    table = TokenTable(read_header(tmp_path / "m.gguf"))
    assert (table.width, table.n_vocab) == (64, 40)
    np.testing.assert_array_equal(table.rows([3, 39, 0, 3]), wanted[[3, 39, 0, 3]])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "lfm2"])
def test_a_prompt_of_text_alone(native, tiny, kind):
    plan = pykvedge.plan("snapkv", 0.5)
    sets, _, text, _ = ask(tiny(kind), plan, [], False)
    ours, report, same, _ = ask(tiny(kind), plan, [], True)
    assert report.bounded and ours == sets and same == text


@pytest.mark.parametrize(
    ("kind", "method", "why"),
    [
        ("llava", "meda", "bounded prefill cannot use allocator 'entropy'"),
        ("llava", "full", "the budget covers the whole prompt"),
    ],
)
def test_falls_back_and_says_why(kvedge, tiny, picture_file, kind, method, why):
    chat = ["chat", *tiny(kind).arguments(), "--image", picture_file(), "--max-tokens", 4, "--method", method]
    ordinary = kvedge(*chat, "--json", QUESTION)
    bounded = kvedge(*chat, "--json", "--bounded", QUESTION)
    assert why in bounded.err and bounded.err.count("not bounded") == 1
    said = json.loads(bounded.out)
    assert said["bounded"]["used"] is False and why in said["bounded"]["why_not"]
    assert said["text"] == json.loads(ordinary.out)["text"] and "bounded" not in json.loads(ordinary.out)


def test_what_cannot_go_in_one_causal_pass(tiny):
    """Gemma 3 scales the rows of its token table, and its images attend in bidirectional attention."""
    with pytest.raises(UnsupportedError, match="gemma3"):
        TokenTable(read_header(tiny("gemma3").model))

    class BothWays:
        def non_causal(self):
            return True

    assert "bidirectional attention" in bounded_batch.why_not(BothWays(), [ImagePiece(None, 4, "", 4)])
    assert bounded_batch.why_not(BothWays(), [TextPiece([1, 2])]) == ""


def test_a_model_without_a_cache_of_ours_falls_back(kvedge, tiny):
    done = kvedge("chat", *tiny("mamba").arguments(), "--method", "full", "--bounded", "--kv-type", "f16", "Hello")
    assert done.code == 0 and "not bounded" in done.err


def test_ctrl_c_in_the_middle_leaves_a_usable_session(native, tiny, picture_file):
    stop, layers = threading.Event(), []

    def progress(what, share):
        if "layer by layer" in what:
            layers.append(share)
            if share > 0:
                stop.set()

    plan, images = pykvedge.plan("lookm", 0.3), pictures(picture_file)
    model = tiny("llava")
    with Session(model.model, model.mmproj, plan, bounded=True, threads=1, progress=progress, cancel=stop) as session:
        with pytest.raises(CancelledError):
            session.ask(QUESTION, images)
        assert 0 < layers[-1] < 1
        stop.clear()
        stop.set = lambda: None
        session.ask(QUESTION, images)
        assert layers[-1] == 1.0
        ours = held(session.engine.cache)
    assert ours == ask(model, plan, images, False)[0]


# ------------------------------------------------------------------------------------------------------------


def decode(context, n, image=False):
    """Sends one batch of n tokens, as a C program does. Returns llama.cpp's status."""
    tokens = [3 + i % 50 for i in range(n)]
    status = send(context.context, range(context.n[0], context.n[0] + n), tokens)
    context.n[0] += n
    return status


@pytest.fixture
def context(native, tiny):
    made = TinyContext(tiny("llama").model, pykvedge.plan("snapkv", 0.25))
    yield made
    made.close()


def test_a_batch_that_was_not_announced_so_is_refused(context):
    context.cache.bound_prompt(np.zeros(100, dtype=np.uint8))
    assert decode(context, 99) != 0
    with pytest.raises(StateError, match="must have the announced number of tokens"):
        context.cache.check()


def test_more_tokens_than_a_pass_holds_are_refused(context):
    with pytest.raises(UsageError, match="n_ubatch"):
        context.cache.bound_prompt(np.zeros(context.llama.llama_n_ubatch(context.context) + 1, dtype=np.uint8))


def test_a_plan_that_looks_at_all_layers_is_refused(context):
    context.cache.set_plan(pykvedge.plan("meda", 0.25))
    with pytest.raises(UnsupportedError, match="entropy"):
        context.cache.bound_prompt(np.zeros(10, dtype=np.uint8))


def test_compressed_even_without_automatic_compression(context):
    context.cache.set_auto_compress(False)
    context.cache.bound_prompt(np.zeros(100, dtype=np.uint8))
    assert decode(context, 100) == 0
    assert context.cache.bounded_layers() == context.cache.stats().n_layers
    assert all(n == 25 for heads in context.cache.lengths() for n in heads)
    assert context.cache.stats().n_pending == 0 and context.cache.stats().n_compressions == 1
    assert decode(context, 1) == 0 and context.cache.bounded_layers() == -1
    assert all(n == 26 for heads in context.cache.lengths() for n in heads)


def test_the_mask_counts_where_nothing_is_dropped(context):
    """An announced prompt within the budget is read as usual, and its image tokens are known."""
    context.cache.set_plan(pykvedge.plan("snapkv").with_(budget=Budget(pairs=100)))
    mask = np.zeros(100, dtype=np.uint8)
    mask[10:30] = 1
    context.cache.bound_prompt(mask)
    assert decode(context, 100) == 0
    assert context.cache.stats().n_image_tokens == 20 and context.cache.stats().n_pending == 100
