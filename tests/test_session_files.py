"""Session files: a conversation that was saved and loaded goes on as if nothing had happened; a bad file is refused."""

from __future__ import annotations

import json
import os
import stat
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import THREADS

import pykvedge
from pykvedge.errors import (
    ContextError,
    KvedgeError,
    SessionFileError,
    StateError,
    UnsupportedError,
    UsageError,
)
from pykvedge.model import CancelledError
from pykvedge.sampling import Sampling
from pykvedge.sessionfile import Note, fingerprint, read_note

SHORT = Sampling(max_tokens=10)
LONG = Sampling(max_tokens=70)  # beyond one block of generated rows
WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. " * 3
PLANS = {
    "full": ("full", None, {}),
    "merged": ("lookm", 0.25, {}),
    "ragged": ("snapkv", 0.3, {"allocator": "ada", "reducer": "weighted"}),
    "elastic": ("elastic", 0.3, {}),
    "prefixkv": ("prefixkv", 0.3, {}),
    "sliding": ("h2o", 0.3, {"decode": "sliding"}),
    "covered": ("h2o", 500, {"decode": "sliding"}),  # the budget holds the prompt: its block stays whole, and is cut
}


def a_plan(name):
    method, budget, settings = PLANS[name]
    return pykvedge.plan(method, budget, **settings)


def say(session, text, images=(), sampling=SHORT):
    answer = session.ask(text, images, sampling)
    answer.read()
    return answer.report


def state(session):
    """Everything that the next token depends on."""
    cache, context = session.engine.cache, session.engine.context
    stats, lengths = cache.stats(), cache.lengths()
    logits = np.ctypeslib.as_array(context.llama.llama_get_logits_ith(context.handle, -1), (session.model.n_vocab,))
    return {
        "logits": logits.copy(),
        "tokens": [cache.tokens(i, h) for i in range(len(lengths)) for h in range(len(lengths[i]))],
        "stats": [stats.n_tokens, stats.n_image_tokens, stats.n_compressions, stats.n_pending],
        "bytes": stats.bytes,
        "messages": [(m.role, m.text) for m in session.messages],
        "place": (context.n_past, context.n_cells, session.pending),
    }


def assert_same(found, expected):
    np.testing.assert_allclose(found.pop("logits"), expected.pop("logits"), rtol=0, atol=1e-5)
    assert found.pop("bytes") <= expected.pop("bytes")  # room for growth that nobody needs any more is left out
    assert found == expected


def go_on_after(model, plan, turns, file, load_before):
    """The state after all turns, the session saved and loaded anew before those in load_before."""
    session = model.session(plan)
    try:
        for i, turn in enumerate(turns):
            if i in load_before:
                session.save(file)
                session.close()
                session = model.session(plan)
                session.load(file)
            report = say(session, *turn)
        return state(session), report
    finally:
        session.close()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_a_loaded_conversation_goes_on_as_if_never_interrupted(tiny, kind, name, picture_file, native, tmp_path):
    turns = [
        (WORDS, [picture_file()], LONG),
        ("And what else is there to see in it?", [], LONG),
        ("Look at this too.", [picture_file("b.png", 90, 90)], SHORT),
        ("And now?", [], SHORT),
    ]
    whole, expected = go_on_after(tiny(kind), a_plan(name), turns, tmp_path / "s.kvs", ())
    parts, found = go_on_after(tiny(kind), a_plan(name), turns, tmp_path / "s.kvs", (1, 2, 3))
    assert_same(parts, whole)
    assert found.text == expected.text and found.kv.kept_of_them == expected.kv.kept_of_them


@pytest.mark.parametrize("kind", ["gemma3", "lfm2", "llama", "qwen3"])
def test_layers_that_llama_cpp_keeps_are_in_the_file(tiny, kind, native, tmp_path):
    turns = [(WORDS, [], LONG), ("And then?", [], LONG), ("Why?", [], SHORT)]
    plan = pykvedge.plan("h2o", 0.3)
    whole, _ = go_on_after(tiny(kind), plan, turns, tmp_path / "s.kvs", ())
    parts, _ = go_on_after(tiny(kind), plan, turns, tmp_path / "s.kvs", (1, 2))
    assert_same(parts, whole)


def test_a_long_bounded_answer_can_be_saved(tiny, native, tmp_path):
    turns = [(WORDS, [], Sampling(max_tokens=700)), ("And then?", [], SHORT)]
    plan = a_plan("covered")
    whole, _ = go_on_after(tiny("llama"), plan, turns, tmp_path / "s.kvs", ())
    parts, _ = go_on_after(tiny("llama"), plan, turns, tmp_path / "s.kvs", (1,))
    assert_same(parts, whole)


def test_tokens_can_still_be_taken_back(tiny, native, tmp_path):
    file, plan, states = tmp_path / "s.kvs", pykvedge.plan("h2o", 0.5), []
    for load in (False, True):
        with tiny("llama").session(plan) as session:
            say(session, WORDS)
            session.save(file)
            if load:
                session.load(file)
            context = session.engine.context
            memory, at = context.llama.llama_get_memory(context.handle), context.n_past - 20
            assert context.llama.llama_memory_seq_rm(memory, 0, at, -1)
            context.n_past = at
            context.decode([7, 8, 9], want_logits=True)
            states.append(state(session))
    assert_same(states[1], states[0])


def test_the_demo_model_answers_alike(kvedge, native, tmp_path):
    picture = Path(__file__).parent.parent / "examples" / "scene-1.png"
    file = tmp_path / "talk.kvs"
    questions = ("How many red objects are there?", "What color is the circle?", "And the square?")
    with pykvedge.Session(*demo_files(), pykvedge.plan("lookm", 0.3), threads=THREADS) as session:
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


def demo_files():
    data = Path(pykvedge.__file__).parent / "data"
    return data / "demo-model.gguf", data / "demo-mmproj.gguf"


@pytest.fixture
def saved(tiny, picture_file, native, tmp_path):
    """A model and a session file with a compressed conversation about an image."""
    model, file = tiny("llava"), tmp_path / "s.kvs"
    with model.session(a_plan("merged")) as session:
        say(session, "What is this?", [picture_file()])
        assert session.save(file) == file.stat().st_size
    return model, file


def test_the_file_costs_what_the_rows_cost(saved):
    model, file = saved
    with model.session() as session:
        session.load(file)
        rows = sum(n for heads in session.engine.cache.lengths() for n in heads)
        size = session.model.pair_width * 2
        assert rows * size < file.stat().st_size < rows * (size + 4) + 4096
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_the_checksums_are_those_of_zlib(saved):
    data = saved[1].read_bytes()
    n_head = 32 + struct.unpack_from("<I", data, 12)[0] + struct.unpack_from("<Q", data, 16)[0]
    assert struct.unpack_from("<I", data, n_head)[0] == zlib.crc32(data[:n_head])
    assert struct.unpack_from("<I", data, len(data) - 4)[0] == zlib.crc32(data[n_head + 4 : -4])


def test_the_plan_is_the_files_unless_another_is_given(saved):
    model, file = saved
    with model.session(pykvedge.plan("h2o", 0.4)) as session:
        session.load(file)
        assert session.plan == a_plan("merged")
        session.load(file, pykvedge.plan("h2o", 0.4))
        assert say(session, WORDS).method == "h2o"


def test_a_conversation_is_replaced_only_by_one_that_loads(saved, tiny, tmp_path):
    model, file = saved
    cut = tmp_path / "cut.kvs"
    cut.write_bytes(file.read_bytes()[:-1])
    with model.session() as session:
        first = say(session, "Hello")
        with pytest.raises(SessionFileError):
            session.load(cut)
        assert session.messages[-1].text == first.text and say(session, "Still there?").text


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


def test_other_models_types_and_contexts_are_refused(saved, tiny, native):
    model, file = saved
    with tiny("llava", seed=3).session() as session, pytest.raises(SessionFileError, match="another model"):
        session.load(file)
    with model.session(kv_type="f32") as session, pytest.raises(UsageError, match="--kv-type f16"):
        session.load(file)
    with model.session(n_ctx=16) as session, pytest.raises(ContextError, match="raise --ctx"):
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
        with pytest.raises(UsageError, match="as f16, this cache stores f32"):
            session.engine.cache.load(name, fingerprint_of(file))


def fingerprint_of(file):
    data = file.read_bytes()
    return data[32 : 32 + struct.unpack_from("<I", data, 12)[0]].decode()


def reframed(data, **changes):
    """The file with other head fields, note or payload, its lengths and checksums right again."""
    n_model, n_note = struct.unpack_from("<I", data, 12)[0], struct.unpack_from("<Q", data, 16)[0]
    end = 32 + n_model + n_note
    model, note, payload = data[32 : 32 + n_model], data[32 + n_model : end], data[end + 4 : -4]
    note, payload = changes.get("note", note), changes.get("payload", payload)
    head = data[:8] + struct.pack("<IIQQ", changes.get("version", 1), n_model, len(note), len(payload)) + model + note
    return head + struct.pack("<I", zlib.crc32(head)) + payload + struct.pack("<I", zlib.crc32(payload))


def test_a_newer_version_is_refused(saved):
    model, file = saved
    file.write_bytes(reframed(file.read_bytes(), version=2))
    with model.session() as session, pytest.raises(SessionFileError, match=r"version 2.*update"):
        session.load(file)


def test_a_note_that_is_none(saved):
    model, file = saved
    data = file.read_bytes()
    with model.session() as session:
        good = json.loads(read_note(file, fingerprint(session.model.header)).encode())
        bad = [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, json.dumps({**good, "plan": "{}"}).encode()]
        bad += [json.dumps({**good, key: value}).encode() for key, value in [
            ("n_ctx", -1), ("n_ctx", 2**40), ("n_past", True), ("pending", [1, 2]), ("messages", []), ("held", None),
            ("messages", [{"role": "root", "text": "", "pictures": []}]), ("kv_type", 3)]]  # fmt: skip
        for note in bad:
            file.write_bytes(reframed(data, note=note))
            with pytest.raises(SessionFileError, match="no conversation"):
                session.load(file)
        contradictory = json.dumps({**good, "n_cells": 3000}).encode()
        file.write_bytes(reframed(data, note=contradictory))
        with pytest.raises(SessionFileError, match="contradicts itself"):
            session.load(file)
        file.write_bytes(reframed(data, note=json.dumps(good).encode()))
        session.load(file)
        assert Note.decode(json.dumps(good).encode()).n_cells == session.engine.context.n_cells


def test_damaged_files_are_refused_whatever_the_damage(saved):
    """Bytes flipped and files cut anywhere: the checksums or the lengths tell."""
    model, file = saved
    data, rng = file.read_bytes(), np.random.default_rng(0)
    with model.session() as session:
        session.load(file)
        cache, context, name = session.engine.cache, session.engine.context, os.fsencode(file)
        ours = fingerprint(session.model.header)
        places = [*range(40), *rng.integers(0, len(data), 150), len(data) - 1]
        for at in places:
            flipped = bytearray(data)
            flipped[at] ^= 1 << rng.integers(8)
            damaged = data[:at] if rng.integers(2) else bytes(flipped)
            file.write_bytes(damaged)
            context.clear()
            with pytest.raises(SessionFileError):
                cache.load(name, ours)
        file.write_bytes(data + b"\0")
        with pytest.raises(SessionFileError, match="damaged"):
            cache.load(name, ours)
        file.write_bytes(data)
        cache.load(name, ours)


HOSTILE = [0, 1, 0x7F, 0x80, 0xFF]
EDGES = [-1, 0, 1, 255, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("name", ["merged", "sliding"])
def test_hostile_files_with_right_checksums_do_no_harm(tiny, name, native, tmp_path):
    """A payload changed on purpose is refused, or can be gone on with; memory stays in proportion."""
    from pykvedge.memory import rss_bytes

    model, file = tiny("llama"), tmp_path / "s.kvs"
    rng = np.random.default_rng(1)
    with model.session(a_plan(name)) as session:
        say(session, WORDS, sampling=LONG)
        session.save(file)
        data = file.read_bytes()
        end = 32 + struct.unpack_from("<I", data, 12)[0] + struct.unpack_from("<Q", data, 16)[0] + 4
        payload = data[end:-4]
        cache, context, path = session.engine.cache, session.engine.context, os.fsencode(file)
        ours, before, loaded = fingerprint(session.model.header), rss_bytes(), 0
        for i in range(600):
            bad = bytearray(payload)
            at = i if i < 300 else int(rng.integers(len(bad) - 4))  # what comes first counts most
            if i % 2:
                bad[at] = HOSTILE[rng.integers(len(HOSTILE))]
            else:
                struct.pack_into("<i", bad, at, EDGES[rng.integers(len(EDGES))])
            if i % 10 == 9:
                bad = bad[: rng.integers(len(bad))]
            file.write_bytes(reframed(data, payload=bytes(bad)))
            context.clear()
            try:
                cache.load(path, ours)
            except KvedgeError:
                continue
            loaded += 1
            last = context.llama.llama_memory_seq_pos_max(context.llama.llama_get_memory(context.handle), 0)
            if last < 2**30:
                context.n_past = last + 1
                context.decode([5], want_logits=True)
                context.decode(list(range(500, 530)), want_logits=True)
                cache.compress()
        assert loaded > 50  # rows are data: any bytes will do
        assert rss_bytes() - before < 64 << 20


# ------------------------------------------------------------------------------------------------- command line


def test_the_program_refuses_bad_files(kvedge, saved, tiny, tmp_path):
    model, file = saved
    ask = ["chat", *model.arguments(), "--session"]
    cut = tmp_path / "cut.kvs"
    cut.write_bytes(file.read_bytes()[:-1])
    kvedge(*ask, cut, "Hi").failed(1, "cut.kvs is damaged or truncated")
    cut.write_bytes(b"something else, and long enough to be a header of a file")
    kvedge(*ask, cut, "Hi").failed(1, "cut.kvs is no session file")
    kvedge(*ask, tmp_path, "Hi").failed(1, "is not a file")
    kvedge(*ask, tmp_path / "nowhere" / "s.kvs", "Hi").failed(2, "there is no folder")
    kvedge(*ask, file, "--system", "Be brief.", "Hi").failed(2, "--system", "has begun")
    kvedge(*ask, file, "--kv-type", "f32", "Hi").failed(2, "--kv-type f16")
    kvedge(*ask, file, "--ctx", "16", "Hi").failed(1, "raise --ctx")
    other = tiny("llava", seed=3)
    kvedge("chat", *other.arguments(), "--session", file, "Hi").failed(1, "another model")


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files as POSIX does")
def test_a_full_disk_leaves_the_old_file(kvedge, saved):
    import resource

    model, file = saved
    old = file.read_bytes()

    def small_files():
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, len(old) // 2))

    ask = ["chat", *model.arguments(), "--session", file, "--max-tokens", 3, "--quiet"]
    done = kvedge(*ask, "--json", "And?", preexec_fn=small_files)
    assert done.code == 1 and len(done.err.splitlines()) == 1
    assert "cannot be written" in done.err and "untouched" in done.err
    assert done.json["text"] and "cannot be written" in done.json["session"]["error"]
    assert file.read_bytes() == old and [p.name for p in file.parent.iterdir()] == [file.name]
    assert kvedge(*ask, "And?").code == 0 and file.read_bytes() != old


def test_a_conversation_saves_after_each_answer(kvedge, saved, tmp_path, environment):
    pty = pytest.importorskip("pty")
    assert pty
    from test_interactive import Terminal

    model, file = saved
    old, copy = file.read_bytes(), tmp_path / "copy.kvs"
    terminal = Terminal(["chat", *model.arguments(), "--session", file, "--max-tokens", 5], environment)
    terminal.wait_for("> ")
    terminal.type("And what else?\n")
    terminal.wait_for("tok/s")
    terminal.wait_for("> ")
    assert file.read_bytes() != old
    terminal.type(f"/save {copy}\n")
    terminal.wait_for("saved to")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert copy.read_bytes() == file.read_bytes()
