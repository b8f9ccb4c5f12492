"""Session files that lie, are cut, or do not fit: one clear error, no crash, no excessive memory."""

import json
import os
import struct

import numpy as np
import pytest
from conversations import LONG, WORDS, a_plan, reframed, say
from limits import of_child

from pykvedge.errors import KvedgeError, SessionFileError
from pykvedge.runtime.sessionfile import Note, fingerprint, read_note


def test_a_newer_version_is_refused(saved):
    model, file = saved
    file.write_bytes(reframed(file.read_bytes(), version=5))
    with model.session() as session, pytest.raises(SessionFileError, match=r"version 5.*update"):
        session.load(file)


def test_a_model_whose_name_is_no_text(saved):
    model, file = saved
    file.write_bytes(reframed(file.read_bytes(), model=b"\xff\xfe"))
    with model.session() as session, pytest.raises(SessionFileError, match="saved with another model"):
        session.load(file)


def test_a_note_that_is_none(saved):
    model, file = saved
    data = file.read_bytes()
    with model.session() as session:
        good = json.loads(read_note(file, fingerprint(session.model.header)).encode())
        bad = [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, json.dumps({**good, "plan": "{}"}).encode()]
        bad += [json.dumps({**good, key: value}).encode() for key, value in [
            ("n_ctx", -1), ("n_ctx", 2**40), ("n_past", True), ("pending", [1, 2]), ("messages", []), ("held", None),
            ("held", float("nan")), ("held", float("inf")), ("held", -1),
            ("messages", [{"role": "root", "text": "", "pictures": []}]), ("kv_type", 3)]]  # fmt: skip
        for note in bad:
            file.write_bytes(reframed(data, note=note))
            with pytest.raises(SessionFileError, match="no conversation"):
                session.load(file)
        file.write_bytes(reframed(data, note=json.dumps({**good, "n_cells": 3000}).encode()))
        with pytest.raises(SessionFileError, match="is inconsistent"):
            session.load(file)
        file.write_bytes(reframed(data, note=json.dumps(good).encode()))
        session.load(file)
        assert Note.decode(json.dumps(good).encode()).n_cells == session.engine.context.at.n_cells


def test_damaged_files_are_refused_whatever_the_damage(saved):
    """Flipped bytes and cuts at any place: the checksums or the lengths detect them."""
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


def test_a_damaged_file_costs_no_conversation(saved, tmp_path):
    """A failed load does not change the session. Only the session's cache has the pictures of a loaded conversation."""
    model, file = saved
    data, damaged = file.read_bytes(), tmp_path / "damaged.kvs"
    with model.session() as session, model.session() as never:
        for one in (session, never):
            one.load(file)
        for at in (len(data) // 2, -5, -1):
            damaged.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at:][1:])
            with pytest.raises(SessionFileError, match="damaged or truncated"):
                session.load(damaged)
        assert session.in_cache and session.messages == never.messages
        assert say(session, "And?").text == say(never, "And?").text
        session.load(file)
        assert session.messages == never.messages[:-2]


HOSTILE = [0, 1, 0x7F, 0x80, 0xFF]
EDGES = [-1, 0, 1, 255, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("name", ["merged", "sliding"])
def test_hostile_files_with_right_checksums_do_no_harm(tiny, name, native, tmp_path):
    """A payload changed on purpose is refused, or usable. Memory stays proportional."""
    from pykvedge.system.memory import rss_bytes

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
            at = i if i < 300 else int(rng.integers(len(bad) - 4))  # the first bytes matter most
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
                context.at.n_past = last + 1
                context.decode([5], want_logits=True)
                context.decode(list(range(500, 530)), want_logits=True)
                cache.compress()
        assert loaded > 50  # rows are data: any bytes are valid
        assert rss_bytes() - before < 64 << 20


# ------------------------------------------------------------------------------------------------- command line


def test_the_program_refuses_bad_files(kvedge, saved, tiny, tmp_path):
    model, file = saved
    ask = ["chat", *model.arguments(), "--session"]
    cut = tmp_path / "cut.kvs"
    cut.write_bytes(file.read_bytes()[:-1])
    kvedge(*ask, cut, "Hi").failed(1, "cut.kvs is damaged or truncated")
    cut.write_bytes(b"something else, and long enough to be a header of a file")
    kvedge(*ask, cut, "Hi").failed(1, "cut.kvs is not a session file")
    kvedge(*ask, tmp_path, "Hi").failed(2, "the path is a folder, not a file")
    kvedge(*ask, tmp_path / "nowhere" / "s.kvs", "Hi").failed(2, "does not exist")
    kvedge(*ask, file, "--system", "Be brief.", "Hi").failed(2, "--system", "already has messages")
    kvedge(*ask, file, "--kv-type", "f32", "Hi").failed(2, "--kv-type f16")
    kvedge(*ask, file, "--ctx", "16", "Hi").failed(1, "raise --ctx")
    other = tiny("llava", seed=3)
    kvedge("chat", *other.arguments(), "--session", file, "Hi").failed(1, "another model")


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files as POSIX does")
def test_a_full_disk_leaves_the_old_file(kvedge, saved):
    model, file = saved
    old = file.read_bytes()
    ask = ["chat", *model.arguments(), "--session", file, "--max-tokens", 3, "--quiet"]
    done = kvedge(*ask, "--json", "And?", preexec_fn=of_child(len(old) // 2))
    assert done.code == 1 and len(done.err.splitlines()) == 1
    assert "cannot be written" in done.err and "an older file of this name is unchanged" in done.err
    assert done.json["text"] and "cannot be written" in done.json["session"]["error"]
    assert file.read_bytes() == old and [p.name for p in file.parent.iterdir()] == [file.name]
    assert kvedge(*ask, "And?").code == 0 and file.read_bytes() != old


def test_a_conversation_saves_after_each_answer(saved, tmp_path, environment, closing):
    pytest.importorskip("pty")
    from test_interactive import XTERM, Terminal

    model, file = saved
    old, copy = file.read_bytes(), tmp_path / "copy.kvs"
    arguments = ["chat", *model.arguments(), "--session", file, "--max-tokens", 5]
    terminal = closing(Terminal(arguments, {**environment, **XTERM}))
    terminal.enter("And what else?", "tok/s")
    assert file.read_bytes() != old
    terminal.enter(f"/save {copy}", "saved to")
    terminal.leave()
    assert copy.read_bytes() == file.read_bytes()
