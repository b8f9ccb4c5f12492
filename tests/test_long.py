"""Long prompts: a megabyte of text, contexts of many tokens, positions beyond the training length, many images.

docs/dev/testing.md has larger cases: scripts/long_context.py --tokens 131072, scripts/soak.py --images 1000.
"""

import json

import long_context
import pytest
from choosing import whole
from test_stream_sessions import frames

import pykvedge
from pykvedge.runtime.sampling import Sampling
from pykvedge.system.memory import own_bytes

MEGABYTE = "ab cd " * (10**6 // 6)
STRANGE = ["a" * 10**6, "\u56fe" * 30_000, *whole(" " * 10**6 + "x", "word\n" * 40_000, "<s>" * 3_000)]
MIB = 2**20


@pytest.mark.parametrize(("kind", "n"), [("qwen2", 10**5), *whole(("llama", 10**6), ("qwen2", 10**6))])
def test_a_megabyte_is_refused_before_it_is_read(kvedge, tiny, kind, n):
    """With both kinds of tokenizers, and with a context that no memory can hold."""
    done = kvedge("chat", *tiny(kind).arguments(), stdin=MEGABYTE[:n])
    done.failed(1, "the prompt has", "tokens, the context holds", "--ctx")
    done = kvedge("chat", *tiny(kind).arguments(), "--ctx", 700_000_000, stdin=MEGABYTE[:n])
    done.failed(1, "not enough memory", "lower --ctx")


@pytest.mark.parametrize("text", STRANGE)
def test_text_that_is_no_language_is_refused_in_one_line(kvedge, tiny, text):
    """llama.cpp's tokenizer of this kind takes quadratic time for text outside its vocabulary."""
    kvedge("chat", *tiny("llama").arguments(), stdin=text).failed(1, "the prompt has", "the context holds")


def test_a_prompt_beyond_the_context_is_read_as_a_stream(kvedge, tiny):
    options = ["--stream", "--method", "streaming-llm", "--budget", "64", "--ctx", "512", "--max-tokens", "4", "--json"]
    done = kvedge("chat", *tiny("llama").arguments(), *options, stdin=MEGABYTE[:20_000])
    assert done.code == 0 and len(done.err.splitlines()) <= 1, done
    report = json.loads(done.out)
    assert report["tokens"]["prompt"] > 6_000 and report["text"]
    assert report["kv"]["kept_bytes"] < report["kv"]["full_bytes"] / 50


@pytest.mark.parametrize(("n_tokens", "trained"), [(8192, 8192 + long_context.ROOM), (3000, 256)])
def test_a_long_context_says_what_llama_cpp_says(native, n_tokens, trained):
    """The second prompt has twelve times the model's training length."""
    found = long_context.compare(n_tokens, trained, 1)
    assert 0 < found["divergence"] < long_context.TOLERANCE
    assert found["lookm_bytes"] < 0.25 * found["kvedge_bytes"] < 0.25 * 0.7 * found["llama_cpp_bytes"]


def test_beyond_the_training_length_only_where_it_was_asked_for(kvedge, tiny):
    model, text = tiny("llama", n_ctx_train=256), "ab cd " * 200
    kvedge("chat", *model.arguments(), stdin=text).failed(1, "set --ctx above the model's training length")
    done = kvedge("chat", *model.arguments(), "--ctx", "2048", "--max-tokens", "2", "--json", stdin=text)
    assert done.code == 0 and done.json["tokens"]["prompt"] > 256


def test_many_images_in_a_stream(native, tiny):
    """Twice as many positions as in training. Neither rows nor pixels stay in memory."""
    sizes = []

    def watched():
        for picture in frames(200):
            sizes.append(own_bytes())
            yield picture

    settings = {"stream": True, "positions": "count"}
    with tiny("llava", n_ctx_train=2048).session(pykvedge.plan("snapkv", 64), **settings) as session:
        answer = session.ask("What is this?", watched(), Sampling(max_tokens=4))
        answer.read()
        report = answer.report
        assert report.tokens.image == 200 * 16 and report.kv.kept_bytes < report.kv.full_bytes / 10
        assert report.stream.tokens > report.stream.positions * 0.99 and report.stream.positions > 2048
    assert max(sizes[100:]) - max(sizes[50:100]) < 2 * MIB
