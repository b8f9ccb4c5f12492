"""Conversations and streams that pass their model's trained length (runtime/sequence.py)."""

import json

import pytest
from choosing import crossed, whole
from conversations import say
from test_stream_sessions import frames

import pykvedge
from pykvedge import ContextError, Sampling, UsageError
from pykvedge.system.memory import own_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("kind", "method"),
    crossed(["llava", "qwen2vl"], ["streaming-llm", "snapkv", "mixkv", "h2o"], ["snapkv", "h2o"], []),
)
def test_a_stream_stays_within_the_trained_length(tiny, native, kind, method):
    model = tiny(kind, n_ctx_train=512)
    with model.session(pykvedge.plan(method, 64), stream=True, n_ctx=400) as session:
        report = say(session, "What is this?", frames(60), Sampling(max_tokens=300))
        engine = session.engine
        assert report.stream.tokens > 1200 and report.stream.turned >= (3 if kind == "llava" else 1)
        assert 64 <= engine.sequence.n_past <= 512 and not report.stream.note() and not report.notes
        assert {n for heads in engine.cache.lengths() for n in heads} <= set(range(64, 64 + 129))
        assert engine.cache.stats().n_tokens == report.stream.tokens
        again = say(session, "And now?", frames(5, seed=3))
        assert again.stream.positions <= 512 and again.text


@pytest.mark.parametrize("n_images", [200, *whole(2000)])
def test_a_stream_of_many_times_the_trained_length_takes_constant_memory(tiny, native, n_images):
    sizes = []

    def watched():
        for picture in frames(n_images):
            sizes.append(own_bytes())
            yield picture

    with tiny("llava", n_ctx_train=512).session(pykvedge.plan("snapkv", 64), stream=True) as session:
        report = say(session, "What is this?", watched(), Sampling(max_tokens=4))
        assert report.stream.tokens > 6 * 512 >= 6 * report.stream.positions and report.stream.turned > 6
    half = n_images // 2
    assert max(sizes[half:]) - max(sizes[half // 2 : half]) < 2 * MIB


def test_where_positions_fit_nothing_changes(tiny, native):
    texts = []
    for positions in ("turn", "count"):
        with tiny("llava").session(pykvedge.plan("snapkv", 64), stream=True, positions=positions) as session:
            report = say(session, "What is this?", frames(20), Sampling(max_tokens=60, logprobs=3))
            texts.append((report.text, report.logprobs))
            assert report.stream.turned == 0
    assert texts[0] == texts[1]


def test_positions_go_on_counting_where_that_was_asked_for(tiny, native):
    model = tiny("llama", n_ctx_train=512)
    with model.session(pykvedge.plan("streaming-llm", 64), stream=True, positions="count") as session:
        report = say(session, "word " * 600)
        assert (
            report.stream.positions > 512
            and report.stream.turned == 0
            and "exceeds the training length 512" in report.line()
        )
    with model.session(pykvedge.plan("streaming-llm", 64), stream=True, positions=300) as session:
        report = say(session, "word " * 600)
        assert report.stream.positions <= 300 == report.stream.trained and report.stream.turned > 5
    for wrong in ("stay", 20, True, 0.5):
        with pytest.raises(UsageError, match="positions must be turn, count or a number of at least 256"):
            model.session(positions=wrong)


def test_a_model_whose_keys_cannot_turn_says_so(tiny, native):
    with tiny("gemma3", n_ctx_train=256).session(pykvedge.plan("h2o", 64), stream=True, n_ctx=1024) as session:
        report = say(session, "word " * 90)
        assert report.stream.positions > 256 and report.stream.turned == 0
        assert "exceeds the training length 256" in report.line() and "kvedge stores 2 of" in report.line()
    with tiny("gemma3", n_ctx_train=256).session(pykvedge.plan("h2o", 0.3), n_ctx=1024) as session:
        [note] = [
            n for n in say(session, "word " * 90).notes if "positions exceed the model's training length of 256" in n
        ]
        assert "kvedge stores 2 of" in note
        assert not [n for n in say(session, "And?").notes if "positions exceed" in n]  # only once


@pytest.mark.parametrize(("kind", "method", "settings"), [
    ("llama", "h2o", {"undo": True}), ("llama", "snapkv", {"bounded": True}), ("llama", "kvzip", {}),
    ("qwen2vl", "h2o", {}),
    *whole(("llama", "h2o", {}), ("qwen2vl", "h2o", {"undo": True}), ("qwen2vl", "snapkv", {"bounded": True}),
           ("qwen2vl", "kvzip", {})),
], ids=str)  # fmt: skip
def test_a_conversation_goes_on_beyond_the_trained_length(tiny, native, kind, method, settings):
    """The context is as long as the trained length: without turned positions, it would be full."""
    undo, most = "undo" in settings, 1024 if method == "kvzip" else 512  # its second pass needs cells, too
    with tiny(kind, n_ctx_train=most).session(pykvedge.plan(method, 0.2), n_ctx=most, **settings) as session:
        n = 0
        for turn in range(8):
            n += say(session, f"{turn} " * 60, (), Sampling(max_tokens=40)).tokens.prompt
            assert session.engine.sequence.n_past <= most
        assert session.engine.cache.stats().n_tokens > max(most, n) > 700
        assert session.last_report.finish in ("end", "length")
        if undo:
            before = session.last_report.text
            session.undo()
            assert say(session, "7 " * 60, (), Sampling(max_tokens=40)).text == before


def test_an_answer_passes_the_trained_length(tiny, native):
    """The answer ends when the context has no free cell for another row."""
    with tiny("llama", n_ctx_train=256).session(pykvedge.plan("h2o", 0.2), n_ctx=256) as session:
        never = {token: -float("inf") for token in range(session.model.n_vocab) if session.model.is_end(token)}
        for text, max_tokens, finish in (("word " * 30, 150, "length"), ("And?", 400, "context")):
            report = say(session, text, (), Sampling(max_tokens=max_tokens, logit_bias=never))
            assert report.finish == finish and session.engine.sequence.n_past <= 256
        assert session.engine.cache.stats().n_tokens > 256
        assert 250 < session.engine.pairs_held() <= 257


def test_what_keeps_everything_ends_with_its_context(tiny, native):
    for plan, settings in ((pykvedge.plan("full"), {}), (pykvedge.plan("h2o", 0.2), {"positions": "count"})):
        with tiny("llama", n_ctx_train=256).session(plan, n_ctx=256, **settings) as session:
            say(session, "word " * 60, (), Sampling(max_tokens=4))
            with pytest.raises(ContextError, match="are free"):
                say(session, "word " * 100)


def test_the_command_has_the_option(kvedge, tiny):
    options = ["--stream", "--method", "streaming-llm", "--budget", "64", "--max-tokens", "4", "--json"]
    found = {}
    for positions in ("turn", "count", "300"):
        done = kvedge("chat", *tiny("llama", n_ctx_train=512).arguments(), *options, "--positions", positions,
                      stdin="ab cd " * 600)  # fmt: skip
        assert done.code == 0, done
        found[positions] = json.loads(done.out)["stream"]
    assert found["turn"]["positions"] <= 512 < found["count"]["positions"]
    assert found["300"]["positions"] <= 300
    assert found["turn"]["turned"] > 0 == found["count"]["turned"]
    kvedge("chat", "--positions", "stay", "?").failed(2, "positions must be")
