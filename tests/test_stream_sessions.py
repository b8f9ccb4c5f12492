"""Streams as sessions and on the command line: images one at a time, memory, turns, session files."""

import pytest
from choosing import whole
from conversations import say

import pykvedge
from pykvedge import ContextError, ImageError, NothingToCompressError, Picture, Sampling, StateError, UsageError

SHORT = Sampling(max_tokens=12)
LONG = Sampling(max_tokens=300)


def frames(n, size=60, seed=0):
    """Yields n different pictures, made on demand."""
    for i in range(n):
        pixels = bytes((x * 7 + i * 31 + seed) % 256 for x in range(size * size * 3))
        yield Picture(f"{i}.png", size, size, pixels)


@pytest.fixture(params=["llava", "qwen2vl"])
def vision_model(request, tiny):
    return tiny(request.param)


@pytest.mark.parametrize("n_images", [0, 3])
def test_with_an_ample_bound_the_answer_is_that_of_the_full_cache(vision_model, native, n_images):
    """With the same chat template, in pieces, over two turns."""
    texts, cells = [], []
    for plan, settings in ((pykvedge.plan("full"), {}), (pykvedge.plan("h2o", 4000), {"stream": True})):
        with vision_model.session(plan, **settings) as session:
            first = say(session, "What is this, and what follows from it?", list(frames(n_images)))
            second = say(session, "And this?", list(frames(1, seed=5)))
            texts.append((first.text, second.text, first.tokens, second.tokens))
            cells.append(session.engine.cache.stats().n_tokens)
    assert texts[0] == texts[1] and cells[0] == cells[1]


@pytest.mark.parametrize("method", ["h2o", "snapkv", *whole("lookm", "mixkv", "streaming-llm")])
def test_images_without_end(vision_model, native, method):
    held = []

    def watched(pictures):
        for picture in pictures:
            held.append(session.engine.cache.stats().bytes if session.engine.cache else 0)
            yield picture

    with vision_model.session(pykvedge.plan(method, 96), stream=True, n_ctx=512) as session:
        report = say(session, "What is this?", watched(frames(60)), LONG)
        stats, context = session.engine.cache.stats(), session.engine.context
        assert report.tokens.prompt > 512 < report.tokens.image  # more than the context can hold
        assert report.kv.full_bytes > 5 * report.kv.kept_bytes
        assert max(held[20:]) <= max(held[10:20])
        assert stats.n_tokens == report.tokens.prompt + report.tokens.generated - len(session.pending)
        assert all(n <= 96 + 128 for heads in session.engine.cache.lengths() for n in heads)
        assert context.room > 100
        assert report.stream.bound == 96 and report.stream.tokens == stats.n_tokens
        assert report.stream.kv_bytes == stats.bytes
        again = say(session, "And now?", frames(20, seed=3))
        assert again.stream.tokens > report.stream.tokens + again.tokens.image
        assert [len(m.pictures) for m in session.messages] == [60, 0, 20, 0]
        assert not any(p.rgb for m in session.messages for p in m.pictures)


def test_a_number_of_tokens_between_compressions(tiny, native):
    with tiny("llava").session(pykvedge.plan("h2o", 64), stream=40) as session:
        report = say(session, "word " * 400)
        n = session.engine.cache.stats().n_compressions
        assert report.tokens.prompt // 40 - 2 <= n <= report.tokens.prompt // 40 + 1
        assert session.engine.pace.step == 40


def test_a_session_file_goes_on_as_a_stream(tiny, native, tmp_path):
    file, plan = tmp_path / "s.kvs", pykvedge.plan("lookm", 64)
    answers = []
    for reload in (False, True):
        with tiny("llava").session(plan, stream=True, n_ctx=400) as session:
            say(session, "What is this?", frames(30))
            session.save(file)
            if not reload:  # saving did not end the stream
                assert session.engine.cache.stats().n_pending == session.engine.cache.lengths()[0][0]
                say(session, "And this?", frames(20, seed=9))
                assert {n for heads in session.engine.cache.lengths() for n in heads} <= set(range(64, 64 + 129))
                continue
        with tiny("llava").session(plan, stream=True, n_ctx=400) as session:
            session.load(file)
            assert session.engine.context.room > 300
            report = say(session, "And this?", frames(20, seed=9))
            assert report.stream.tokens > 400
            answers.append(report.text)
            assert {n for heads in session.engine.cache.lengths() for n in heads} <= set(range(64, 64 + 129))
        with tiny("llava").session(plan) as session:  # as an ordinary conversation
            session.load(file)
            say(session, "And what else?")
    with tiny("llava").session(pykvedge.plan("h2o", 0.2)) as session:
        say(session, "What is this? " * 10)
        session.save(file)
    with tiny("llava").session(plan, stream=True) as session:
        with pytest.raises(UsageError, match="needs a budget in KV pairs"):
            session.load(file)
        session.load(file, plan)
        say(session, "word " * 200)
        assert {n for heads in session.engine.cache.lengths() for n in heads} <= set(range(64, 64 + 129))
        session.save(file)
    with tiny("llava").session(plan) as session:  # kept tokens are counted from the end of the stream
        session.load(file)
        kv = say(session, "And why?").kv
        assert 0 < kv.kept_of_them <= kv.compressed_tokens


def test_a_stream_that_keeps_everything_holds_no_more_than_everything(tiny, native):
    with tiny("llava").session(pykvedge.plan("h2o", 1000), stream=True) as session:
        report = say(session, "word " * 50)
        assert report.kv.kept_of_them == report.kv.compressed_tokens
        assert report.kv.kept_bytes <= report.kv.full_bytes < report.stream.full_bytes  # includes the answer
        assert report.stream.kv_bytes <= report.stream.full_bytes <= report.kv.peak_bytes
        assert f"KV {report.stream.kv_bytes / 2**20:.1f} MiB, peak" in (line := report.line())
        assert f"full {report.stream.full_bytes / 2**20:.1f}" in line


def test_a_restored_stream_answers_alike_where_scores_need_no_history(tiny, native, tmp_path):
    file, plan, texts = tmp_path / "s.kvs", pykvedge.plan("snapkv", 64, **{"scorer.window": 16}), []
    with tiny("llava").session(plan, stream=True) as session:
        say(session, "What is this?", frames(10))
        session.save(file)
        texts.append(say(session, "And this? " * 30).text)
    with tiny("llava").session(plan, stream=True) as session:
        session.load(file)
        texts.append(say(session, "And this? " * 30).text)
    assert texts[0] == texts[1]


def test_what_is_refused(tiny, native, picture_file, tmp_path):
    model = tiny("llava")
    for plan in (pykvedge.plan("h2o", 0.2), pykvedge.plan("adakv", 64), pykvedge.plan("h2o", 64, decode="ratio")):
        with pytest.raises(UsageError):
            model.session(plan, stream=True)
    for settings in ({"stream": -1}, {"stream": "yes"}, {"stream": True, "kv_type": "kivi2"}):
        with pytest.raises(UsageError):
            model.session(pykvedge.plan("h2o", 64), **settings)
    with model.session(pykvedge.plan("h2o", 64), stream=True) as session:
        with pytest.raises(UsageError):
            session.set_plan(pykvedge.plan("h2o", 0.5))
        with pytest.raises(UsageError, match="empty"):
            session.ask(" ", iter(()))
        with pytest.raises(ImageError):
            session.ask("What?", [picture_file(), tmp_path / "none.png"])
        assert not session.messages
        say(session, "What?", [picture_file()])
        session.in_cache = False  # as after an interrupted decode
        with pytest.raises(StateError, match="are lost with its cache"):
            session.ask("And?")
    with tiny("llama").session(pykvedge.plan("h2o", 64), stream=True) as session, pytest.raises(UsageError):
        session.ask("What?", frames(1))
    with tiny("mamba").session(pykvedge.plan("h2o", 64), stream=True) as session, pytest.raises(NothingToCompressError):
        session.ask("What?")
    with tiny("gemma3").session(pykvedge.plan("h2o", 64), stream=True, n_ctx=256) as session:  # noqa: SIM117
        with pytest.raises(ContextError, match="stores some layers"):
            session.ask("word " * 400)


def test_the_command(kvedge, tiny, picture_file):
    model = tiny("llava")
    images = [x for i in range(12) for x in ("--image", picture_file(f"{i}.png", 60 + i, 60))]
    options = ["--method", "lookm", "--budget", 64, "--stream", "--max-tokens", 5, "--ctx", 256, *images]
    report = kvedge("chat", *model.arguments(), *options, "--json", "What happens?").json
    stream = report["stream"]
    assert stream["bound"] == 64 and stream["tokens"] >= report["tokens"]["prompt"] and stream["compressions"] >= 10
    assert report["kv"]["kept_per_layer"] == [64] * len(report["kv"]["kept_per_layer"])
    assert report["kv"]["peak_bytes"] < report["kv"]["full_bytes"]
    shown = kvedge("chat", *model.arguments(), *options, "What happens?")
    assert shown.code == 0 and "-> 64 of 64" in shown.err and "KV" in shown.err
    kvedge("chat", *model.arguments(), "--stream", "What?").failed(2, "a budget in KV pairs per head, such as 2048")
    kvedge("chat", *model.arguments(), *options, "--kv-type", "q4_0", "What?").failed(2, "q4_0")
    kvedge("chat", *model.arguments(), *options, "--image", "none.png", "What?").failed(1, "none.png")
    spoken = kvedge("chat", *model.arguments(), "--budget", 64, "--stream", stdin="And? " * 40)
    assert spoken.code == 0 and "stream of" in spoken.err


@pytest.mark.parametrize("bound", [300, *whole(1500)])
def test_the_demo_model_answers_as_with_the_full_cache(native, bound):
    """About scenes with several pictures, also with a bound below the prompt that holds everything important."""
    from itertools import islice
    from pathlib import Path

    from kvedge_lab.demo_tasks.evalset import samples

    data = Path(pykvedge.__file__).parent / "data"
    files = data / "demo-model.gguf", data / "demo-mmproj.gguf"
    outliers = pykvedge.plan("h2o", bound, scorer="dct", recent=0, **{"scorer.share": "head"})
    answers, n_tokens = [], []
    for plan, settings in (
        (pykvedge.plan("full"), {}),
        (outliers, {"stream": True}),
    ):
        with pykvedge.Session(*files, plan, **settings) as session:
            for sample in islice(samples("code-in-image-k", 3, 4), 3):
                session.clear()
                shown = [Picture(f"{i}", x.shape[1], x.shape[0], x.tobytes()) for i, x in enumerate(sample.images())]
                answers.append(session.ask(sample.question.text, shown).read())
                n_tokens.append(session.last_report.tokens.prompt)
    same = sum(a == b for a, b in zip(answers[:3], answers[3:], strict=True))
    assert n_tokens[:3] == n_tokens[3:]
    if bound > max(n_tokens):
        assert same == 3
    else:
        assert same >= 2 and min(n_tokens) > 1.2 * bound, (answers, n_tokens)
