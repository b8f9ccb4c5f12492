"""Session files: a saved and loaded conversation goes on unchanged; a bad file is refused."""

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from choosing import crossed, whole
from conftest import THREADS
from contexts import TinyContext, random_tokens
from conversations import LONG, PLANS, SHORT, WORDS, a_plan, fingerprint_of, say

import pykvedge
from pykvedge.errors import ContextError, ImageError, SessionFileError, StateError, UnsupportedError, UsageError
from pykvedge.runtime.interrupt import CancelledError
from pykvedge.runtime.sampling import Sampling
from pykvedge.runtime.sessionfile import fingerprint


def state(session):
    """Returns everything that the next token depends on."""
    cache, context = session.engine.cache, session.engine.context
    stats, lengths = cache.stats(), cache.lengths()
    return {
        "logits": context.logits().copy(),
        "tokens": [cache.tokens(i, h) for i in range(len(lengths)) for h in range(len(lengths[i]))],
        "stats": [stats.n_tokens, stats.n_image_tokens, stats.n_compressions, stats.n_pending],
        "bytes": stats.bytes,
        "messages": [(m.role, m.text) for m in session.messages],
        "place": (context.at.n_past, context.at.n_cells, session.pending),
    }


def assert_same(found, expected):
    np.testing.assert_allclose(found.pop("logits"), expected.pop("logits"), rtol=0, atol=1e-5)
    assert found.pop("bytes") <= expected.pop("bytes")  # free rows are not saved
    assert found == expected


def check_goes_on(model, plan, turns, file, **settings):
    """Compares a session that is saved and loaded before each later turn with a session that just goes on."""
    found = []
    for anew in (False, True):
        session = model.session(plan, **settings)
        try:
            for i, turn in enumerate(turns):
                if i and anew:
                    session.save(file)
                    session.close()
                    session = model.session(plan, **settings)
                    session.load(file)
                report = say(session, *turn)
            found.append((state(session), report.text, report.kv.kept_of_them))
        finally:
            session.close()
    (expected, *said), (parts, *said_too) = found
    assert_same(parts, expected)
    assert said == said_too


@pytest.mark.parametrize(("kind", "name"), crossed(["llava", "qwen2vl"], PLANS, ["ragged", "merged"], ["llava"]))
def test_a_loaded_conversation_goes_on_as_if_never_interrupted(tiny, kind, name, picture_file, native, tmp_path):
    turns = [
        (WORDS, [picture_file()], LONG),
        ("And what else is there to see in it?", [], LONG),
        ("Look at this too.", [picture_file("b.png", 90, 90)], SHORT),
        ("And now?", [], SHORT),
    ]
    check_goes_on(tiny(kind), a_plan(name), turns, tmp_path / "s.kvs")


@pytest.mark.parametrize(
    ("kv_type", "name"),
    crossed(
        ["q8_0", "kivi2", "bf16:kivi4"], ["full", "ragged", "scored", "sliding", "covered"], ["scored"], ["kivi2"],
    ),
)  # fmt: skip
def test_quantised_rows_go_on_as_well(tiny, kv_type, name, picture_file, native, tmp_path):
    # 33 tokens leave 32 in the cache: a full group that is not quantised yet
    turns = [(WORDS, [picture_file()], Sampling(max_tokens=33)), ("And?", [], LONG), ("Why?", [], SHORT)]
    check_goes_on(tiny("llava"), a_plan(name), turns, tmp_path / "s.kvs", kv_type=kv_type)


@pytest.mark.parametrize("kind", ["gemma3", "lfm2", *whole("llama", "qwen3")])
def test_layers_that_llama_cpp_keeps_are_in_the_file(tiny, kind, native, tmp_path):
    turns = [(WORDS, [], LONG), ("And then?", [], LONG), ("Why?", [], SHORT)]
    check_goes_on(tiny(kind), pykvedge.plan("h2o", 0.3), turns, tmp_path / "s.kvs")


def test_a_long_bounded_answer_can_be_saved(tiny, native, tmp_path):
    turns = [(WORDS, [], Sampling(max_tokens=700)), ("And then?", [], SHORT)]
    check_goes_on(tiny("llama"), a_plan("covered"), turns, tmp_path / "s.kvs")


def test_a_method_that_reads_a_prompt_twice_reads_a_loaded_answer_twice(tiny, native, tmp_path):
    """The kept tokens of the answer and of the next message do not depend on the file."""
    turns = [(WORDS, (), LONG), ("And this? " * 9, (), SHORT), ("Why?", (), SHORT)]
    check_goes_on(tiny("llama"), pykvedge.plan("kvzip", 0.3), turns, tmp_path / "s.kvs")


def test_tokens_can_still_be_taken_back(tiny, native, tmp_path):
    file, plan, states = tmp_path / "s.kvs", pykvedge.plan("h2o", 0.5), []
    for load in (False, True):
        with tiny("llama").session(plan) as session:
            say(session, WORDS)
            session.save(file)
            if load:
                session.load(file)
            context = session.engine.context
            memory, at = context.llama.llama_get_memory(context.handle), context.at.n_past - 20
            assert context.llama.llama_memory_seq_rm(memory, 0, at, -1)
            session.engine.sequence.n_past = at
            context.decode([7, 8, 9], want_logits=True)
            states.append(state(session))
    assert_same(states[1], states[0])


def test_the_demo_model_answers_alike(kvedge, native, tmp_path):
    picture = Path(__file__).parent.parent / "examples" / "scene-1.png"
    file = tmp_path / "talk.kvs"
    questions = ("How many red objects are there?", "What color is the circle?", "And the square?")
    with pykvedge.Session(plan=pykvedge.plan("lookm", 0.3), threads=THREADS) as session:
        expected = [say(session, q, [picture] * (i == 0)).text for i, q in enumerate(questions)]
    for i, question in enumerate(questions):
        first = ["--image", picture, "--method", "lookm", "--budget", "0.3"] if i == 0 else []
        done = kvedge(
            "chat", "--session", file, *first, "--threads", THREADS, "--max-tokens", 10, "--json", "--quiet", question
        )
        assert done.code == 0 and done.err == "", done
        assert done.json["text"] == expected[i] and (done.json["method"], done.json["budget"]) == ("lookm", 0.3)
        saved = {"path": str(file), "loaded": i > 0, "turns": i + 1, "file_bytes": file.stat().st_size, "error": ""}
        assert done.json["session"] == saved


def test_the_file_costs_what_the_rows_cost(saved):
    model, file = saved
    with model.session() as session:
        session.load(file)
        rows = sum(n for heads in session.engine.cache.lengths() for n in heads)
        size = session.model.pair_width * 2
        assert rows * size < file.stat().st_size < rows * (size + 4) + 4096
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_the_plan_is_the_files_unless_another_is_given(saved):
    model, file = saved
    with model.session(pykvedge.plan("h2o", 0.4)) as session:
        session.load(file)
        assert session.plan == a_plan("merged")
        session.load(file, pykvedge.plan("h2o", 0.4))
        assert say(session, WORDS).method == "h2o"


def test_pictures_of_a_lost_cache_are_missed(saved):
    model, file = saved
    with model.session() as session:
        session.load(file)
        session.cancel = threading.Event()
        session.cancel.set()
        with pytest.raises(CancelledError):
            session.ask("And?")
        session.cancel = None
        with pytest.raises(StateError, match="load the session file"):
            session.ask("And?")
        session.load(file)
        assert say(session, "And?").text


def test_what_cannot_be_saved(tiny, native, tmp_path):
    with tiny("llama").session() as session:
        with pytest.raises(StateError, match="no conversation"):
            session.save(tmp_path / "s.kvs")
        session.ask("Hello", sampling=SHORT)
        with pytest.raises(SessionFileError, match="not a file"):
            session.save(tmp_path)
        with pytest.raises(SessionFileError, match="No such file"):
            session.save(tmp_path / "nowhere" / "s.kvs")
        with pytest.raises(UsageError):
            session.save("a\0b")
    with tiny("mamba").session() as session:
        say(session, "Hello")
        with pytest.raises(UnsupportedError):
            session.save(tmp_path / "s.kvs")
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_waits_for_its_compression_is_not_saved(tiny, native, tmp_path):
    with tiny("llama").session(pykvedge.plan("h2o")) as session:
        say(session, WORDS)
        session.engine.context.decode(list(range(600, 640)), want_logits=True)
        with pytest.raises(StateError, match="not compressed"):
            session.save(tmp_path / "s.kvs")
        session.engine.compress()
        session.save(tmp_path / "s.kvs")


@pytest.mark.parametrize("n_ctx", [300, 256])
def test_a_full_conversation_is_forked_saved_and_loaded_with_its_own_settings(tiny, native, tmp_path, n_ctx):
    full = Sampling(max_tokens=1000, logit_bias={2: -np.inf})  # no end
    with tiny("llama").session(pykvedge.plan("h2o"), n_ctx=n_ctx) as session:
        assert say(session, "Hello", sampling=full).finish == "context"
        assert session.engine.sequence.n_cells == n_ctx == session.engine.context.n_ctx
        with session.fork() as other, pytest.raises(ContextError, match=f"only 0 tokens of the context of {n_ctx}"):
            other.ask("More")
        session.save(tmp_path / "s.kvs")
        session.load(tmp_path / "s.kvs")
        assert session.in_cache and session.engine.room == 0


@pytest.mark.parametrize("settings", [{}, {"keep": "ram"}, {"undo": True}])
def test_a_message_that_is_refused_before_it_is_read_costs_no_cache(saved, picture_file, settings):
    model, file = saved
    with model.session(n_ctx=400, **settings) as session:
        session.load(file)  # without pixels, it cannot be read again
        say(session, "And this?", [picture_file()])
        before = state(session)
        with pytest.raises(ContextError, match="of the context of 400"):
            session.ask("word " * 500)
        with pytest.raises(ImageError):
            session.ask("This?", ["nowhere.png"])
        assert session.in_cache
        assert all(state(session)[name] == before[name] for name in ("tokens", "messages", "place"))
        assert say(session, "And why?").text


def test_a_file_that_does_not_fit_leaves_the_conversation(saved):
    model, file = saved
    with model.session(n_ctx=30) as session:
        say(session, "Hello")
        before = state(session)
        with pytest.raises(ContextError, match="raise --ctx"):
            session.load(file)
        assert session.in_cache
        assert_same(state(session), before)


def test_other_models_types_and_contexts_are_refused(saved, tiny, native):
    model, file = saved
    with tiny("llava", seed=3).session() as session, pytest.raises(SessionFileError, match="another model"):
        session.load(file)
    with model.session(kv_type="f32") as session, pytest.raises(UsageError, match="--kv-type f16"):
        session.load(file)
    with model.session() as session:
        session.ask("Hello", sampling=SHORT)
        cache, name = session.engine.cache, os.fsencode(file)
        with pytest.raises(StateError, match="holds tokens"):
            cache.load(name, fingerprint(session.model.header))
    with tiny("llava", n_heads_kv=4).session() as session:
        session.ask("Hello", sampling=SHORT)
        session.engine.context.clear()
        with pytest.raises(SessionFileError, match="other layers"):
            session.engine.cache.load(name, fingerprint_of(file))
    with model.session(kv_type="f32") as session:
        session.ask("Hello", sampling=SHORT)
        session.engine.context.clear()
        with pytest.raises(UsageError, match="as f16:f16, but this cache stores f32:f32"):
            session.engine.cache.load(name, fingerprint_of(file))


def test_a_sequence_loads_beside_another(tiny, native, tmp_path):
    """Loaded into a second sequence of the same context, the file gives the logits of the first."""
    name = os.fsencode(tmp_path / "s.kvs")
    with TinyContext(tiny("llama").model, pykvedge.plan("h2o", 0.3, decode="sliding")) as context:
        cache = context.cache
        context.decode(random_tokens(150))
        for step in range(40):
            context.decode(random_tokens(1, step))
        cache.save(name, "m", b"a note")
        cache.load(name, "m", sequence=1)
        context.n[1] = context.n[0]
        assert context.held(1) == context.held(0)
        context.decode([77])
        expected = context.logits()
        context.decode([], [77])
        np.testing.assert_allclose(context.logits(), expected, atol=1e-5)
        assert context.held(1) == context.held(0)
        with pytest.raises(UsageError, match="no sequence 2"):
            cache.load(name, "m", sequence=2)
