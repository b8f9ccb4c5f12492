"""Whole rows in session files: a saved and loaded conversation keeps the same tokens as an unsaved conversation."""

import json
import struct

import numpy as np
import pytest
from attached import held, profiles
from choosing import crossed, distinct
from contexts import TinyContext, random_tokens
from conversations import SHORT, WORDS, reframed, say

import pykvedge
from pykvedge.errors import SessionFileError, UnsupportedError, UsageError
from pykvedge.library import libkvedge
from pykvedge.library.native_plan import replays
from pykvedge.plans.presets import PRESETS
from pykvedge.runtime.llama_context import take_back

KINDS = ["llama", "qwen3", "gemma3", "qwen2vl"]
# after loading, llama.cpp's layers have their cells, and so their sums, in another order; f16 weights also round inputs
WEIGHT = {"gemma3": "f32"}
TOLERANCE = {"gemma3": 5e-3}
ONCE = [name for name in PRESETS if not replays(pykvedge.plan(name))]  # presets without a second pass
USUAL = {"llama": distinct(), "gemma3": ("snapkv",), "qwen2vl": ("lookm", "kvedge")}
CASES = [
    pytest.param(kind, method, marks=() if method in USUAL.get(kind, ()) else pytest.mark.whole)
    for kind in KINDS
    for method in ONCE
]
TURNS = (WORDS, "And what else is there to see in it? " * 3, "Why?")


def budget_of(method):
    return None if method == "full" else 0.3


def state(session):
    """Returns the held tokens, the logits, and the last message."""
    cache, context = session.engine.cache, session.engine.context
    return held(cache), context.logits().copy(), session.messages[-1].text


def talk(model, plan, file=None, turns=TURNS, **settings):
    """Returns the state after each turn. file: saves with whole rows after each turn, and loads again."""
    session, out = model.session(plan, **settings), []
    try:
        for i, turn in enumerate(turns):
            if i and file is not None:
                assert session.engine.cache.stats().whole_bytes > 0
                session.save(file, whole=True)
                session.close()
                session = model.session(plan, **settings)
                session.load(file)
                assert session.engine.cache.stats().whole_bytes > 0
            images = turn[1] if isinstance(turn, tuple) else ()
            say(session, turn[0] if images else turn, images)
            out.append(state(session))
        return out
    finally:
        session.close()


def assert_same(found, expected, atol=1e-5):
    for (kept, logits, text), (kept_too, logits_too, text_too) in zip(found, expected, strict=True):
        assert kept == kept_too and text == text_too
        np.testing.assert_allclose(logits, logits_too, rtol=0, atol=atol)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_a_later_message_chooses_as_without_the_file(tiny, native, tmp_path, profile_file, kind, method):
    model = tiny(kind, weight=WEIGHT.get(kind, "f16"))
    given = {"keep": "ram", "profile": profiles(profile_file, model, method)}
    plan = pykvedge.plan(method, budget_of(method))
    without = talk(model, plan, **given)
    assert_same(talk(model, plan, tmp_path / "s.kvs", **given), without, TOLERANCE.get(kind, 1e-5))


@pytest.mark.parametrize(
    ("kind", "kv_type"), crossed(["llava", "qwen2vl"], ["f16", "q8_0", "kivi2"], ["kivi2"], ["llava"])
)
def test_images_and_quantised_rows(tiny, native, tmp_path, picture_file, kind, kv_type):
    turns = [(WORDS, [picture_file()]), ("And this one?", [picture_file("b.png", 90, 90)]), "Why?", "And then?"]
    given = {"keep": "disk", "keep_folder": str(tmp_path), "kv_type": kv_type}
    plan = pykvedge.plan("snapkv", 0.3, reducer="weighted")
    model, file = tiny(kind), tmp_path / "s.kvs"
    assert_same(talk(model, plan, file, turns, **given), talk(model, plan, None, turns, **given))


def test_recurrent_layers_take_no_answer_back(tiny, native, tmp_path):
    plan = pykvedge.plan("h2o", 0.3)
    assert_same(talk(tiny("lfm2"), plan, tmp_path / "s.kvs", keep="ram"), talk(tiny("lfm2"), plan, keep="ram"))


class Windowed(TinyContext):
    """A context whose windowed layers keep little more than their window, as in many programs."""

    def _adjust(self, params):
        params.n_ubatch, params.swa_full = 512, False


@pytest.mark.parametrize(("n", "taken"), [(10, True), (1100, False)])
def test_windowed_layers_go_back_as_far_as_they_can(tiny, native, n, taken):
    """llama.cpp reuses cells that left the window, so a long answer cannot be taken back."""
    seen = []
    for answer in (random_tokens(n, 2), []):
        with Windowed(tiny("gemma3").model, pykvedge.plan("full"), n_ctx=4096, n_seq=1) as context:
            context.cache.keep("ram")
            context.decode(random_tokens(300, 1))
            context.cache.compress()
            for token in answer:
                context.decode([token])
            if answer:
                assert take_back(context.llama, context.context, 0, 300) == taken
                assert context.cache.stats().n_tokens == 300 + (0 if taken else n)
                context.n[0] -= n if taken else 0
            context.decode(random_tokens(40, 3))
            seen.append(context.logits())
    assert not taken or np.array_equal(*seen)


@pytest.fixture
def whole(tiny, native, tmp_path):
    """A model, a file of a conversation with whole rows, and a file of the same without."""
    model, files = tiny("llama"), (tmp_path / "whole.kvs", tmp_path / "plain.kvs")
    with model.session(pykvedge.plan("snapkv", 0.2), keep="ram") as session:
        say(session, WORDS)
        session.save(files[1])
        assert session.save(files[0], whole=True) == files[0].stat().st_size
    return model, *files


def test_older_libraries_read_what_has_none(whole):
    _, file, plain = whole
    version = [struct.unpack_from("<I", data.read_bytes(), 8)[0] for data in (file, plain)]
    assert version == [4, 1]
    assert file.stat().st_size > 2 * plain.stat().st_size


def test_a_session_that_keeps_nothing_drops_them_and_says_so(whole):
    model, file, _ = whole
    with model.session() as session:
        session.load(file)
        assert session.engine.cache.stats().whole_bytes == 0
        assert any(
            "the uncompressed KV rows in the session file were dropped" in note for note in say(session, "Why?").notes
        )
        assert say(session, "And?").notes == []


def test_the_answer_is_read_again_where_they_were_dropped(whole, tmp_path):
    """Saving takes the answer's tokens back; loading without whole rows reads them before the next message."""
    model, file, _ = whole
    with model.session(keep="ram") as kept, model.session() as session:
        kept.load(file)
        n = kept.engine.sequence.n_cells
        answer = len(kept.engine.sequence.unread)
        assert answer == SHORT.max_tokens - 1 and len(kept.pending) == 1
        session.load(file)
        report = say(session, "Why?", sampling=SHORT)
        assert session.engine.cache.stats().n_tokens == n + answer + report.tokens.prompt + SHORT.max_tokens - 1


def test_they_go_where_the_session_keeps_them(whole, tmp_path):
    model, file, _ = whole
    with model.session(keep="disk", keep_folder=str(tmp_path)) as session:
        session.load(file)
        said = say(session, "Why?").kv
        assert said.whole_bytes > 0
        assert session.engine.cache.keep_problem() == ""


def test_their_limit_holds_for_a_file(whole):
    model, file, _ = whole
    with model.session(keep="ram", keep_space=4096) as session:
        session.load(file)
        assert session.engine.cache.stats().whole_bytes == 0
        assert "exceeded the limit" in session.engine.cache.keep_problem()


def test_saving_changes_nothing_for_the_conversation(tiny, native, tmp_path):
    model, plan, states = tiny("llama"), pykvedge.plan("snapkv", 0.2), []
    for save in (False, True):
        with model.session(plan, keep="ram") as session:
            states.append([])
            for turn in TURNS:
                say(session, turn)
                states[-1].append(state(session))
                if save:
                    session.save(tmp_path / "s.kvs", whole=True)
                    session.save(tmp_path / "s.kvs")
    assert_same(*states)


def test_a_plain_file_of_a_conversation_that_was_saved_whole(tiny, native, tmp_path):
    """The file has the tokens that were taken back as pending. Older versions allow only one, and refuse the file."""
    model, file = tiny("llama"), tmp_path / "s.kvs"
    with model.session(pykvedge.plan("snapkv", 0.2), keep="ram") as session:
        say(session, WORDS)
        session.save(file, whole=True)
        unread, pending = list(session.engine.sequence.unread), list(session.pending)
        session.save(file)
    note = json.loads(libkvedge.read_saved(str(file).encode())[1])
    assert note["pending"] == [*unread, *pending] and note["unread"] == len(unread) == SHORT.max_tokens - 1
    with model.session() as session:
        session.load(file)
        assert session.engine.sequence.unread == unread and session.pending == pending


def test_a_fork_and_undo_have_them(tiny, native):
    model, plan = tiny("llama"), pykvedge.plan("snapkv", 0.2)
    expected = talk(model, plan, keep="ram")[-1:]
    with model.session(plan, keep="ram", undo=True) as session:
        for turn in TURNS[:-1]:
            say(session, turn)
        with session.fork() as other:
            assert other.engine.cache.stats().whole_bytes > 0
            say(other, TURNS[-1])
            assert_same([state(other)], expected)
        say(session, "Something else, which is taken back.")
        session.undo()
        say(session, TURNS[-1])
        assert_same([state(session)], expected)


def test_the_command_saves_them(kvedge, tiny, native, tmp_path):
    model, file = tiny("llama"), tmp_path / "talk.kvs"
    given = [*model.arguments(), "--method", "snapkv", "--budget", "0.3", "--max-tokens", 10, "--json"]
    keep = ["--keep", "ram", "--keep-saved"]
    texts = [kvedge("chat", *given, "--session", file, *keep, turn).json["text"] for turn in TURNS]
    assert texts == [text for _, _, text in talk(model, pykvedge.plan("snapkv", 0.3), keep="ram")]
    assert libkvedge.read_saved(str(file).encode())[2]
    dropped = kvedge("chat", *given, "--session", file, "And now?")
    assert dropped.code == 0 and "the uncompressed KV rows in the session file were dropped" in dropped.err
    assert not libkvedge.read_saved(str(file).encode())[2]
    for wrong in (["--session", file, "--keep-saved"], keep):
        done = kvedge("chat", *given, *wrong, "Hello")
        assert done.code == 2 and "--keep-saved needs --keep and --session" in done.err
    done = kvedge("chat", *model.arguments(), "--method", "kvzip", "--session", file, *keep, "Hello")
    assert done.code == 2 and "reads the conversation twice" in done.err


def test_what_cannot_be_saved_is_refused(tiny, native, tmp_path):
    model = tiny("llama")
    with model.session(pykvedge.plan("snapkv", 0.2)) as session:
        say(session, WORDS)
        with pytest.raises(UsageError, match="keep='ram' or 'disk'"):
            session.save(tmp_path / "s.kvs", whole=True)
    with model.session(pykvedge.plan("kvzip", 0.3), keep="ram") as session:
        say(session, WORDS)
        with pytest.raises(UnsupportedError, match="reads the conversation twice"):
            session.save(tmp_path / "s.kvs", whole=True)
        session.save(tmp_path / "s.kvs")
    assert [path.name for path in tmp_path.iterdir()] == ["s.kvs"]


def test_damage_is_found(whole):
    """In any part of the file; also with a correct checksum, if sizes do not fit."""
    model, file, _ = whole
    data, rng = file.read_bytes(), np.random.default_rng(7)
    n_head = 32 + struct.unpack_from("<I", data, 12)[0] + struct.unpack_from("<Q", data, 16)[0]
    payload = data[n_head + 4 : -4]
    with model.session(keep="ram") as session, model.session() as drops:
        for other in (session, drops):
            say(other, "Hello")
            for at in rng.integers(0, len(data), 20):
                file.write_bytes(bytes([*data[:at], data[at] ^ 4, *data[at + 1 :]]))
                with pytest.raises(SessionFileError):
                    other.load(file)
        for cut in rng.integers(len(payload) // 2, len(payload), 20):
            file.write_bytes(reframed(data, payload=payload[:cut], version=4))
            with pytest.raises(SessionFileError):
                session.load(file)
        for _ in range(60):  # changes a number anywhere in the observed data, at the end of the file
            at = len(payload) - int(rng.integers(1, 4000))
            lie = struct.pack("<i", int(rng.choice([-1, 0, 1, 2**31 - 1, -(2**31)])))
            file.write_bytes(
                reframed(data, payload=(payload[:at] + lie + payload[at + 4 :])[: len(payload)], version=4)
            )
            try:
                session.load(file)
            except SessionFileError:
                continue
            say(session, "And?")
