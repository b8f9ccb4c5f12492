"""Whole rows in q8_0: what a later message sees, their size, and their limits."""

import functools
from contextlib import suppress

import keeping
import numpy as np
import pytest
from attached import METHODS, differing
from choosing import distinct, whole
from conftest import THREADS
from contexts import TinyContext, random_tokens
from keeping import ANSWER, Talk, answers, give_plan, messages, methods_plan

import pykvedge
from kvedge_lab.commands.bench import bench
from pykvedge.cli.chat import chat
from pykvedge.cli.fit import fit
from pykvedge.cli.serve import serve
from pykvedge.errors import UnsupportedError, UsageError
from pykvedge.library import libkvedge
from pykvedge.native.abi import DEVICES_ALL
from pykvedge.native.calls import call
from pykvedge.reference.kvtypes import KEEP_TYPES, NAMES, KvType
from pykvedge.reference.kvtypes.q8_0 import rounded
from pykvedge.runtime.settings import Settings

FIRST = len(messages()[0])
FEW = ["kvedge", "meda", "lookm", "flashcache", "criticalkv-ada"]
GREEDY = pykvedge.Sampling(temp=0, max_tokens=20)


@pytest.fixture
def made(native, tiny):
    """made(method, keep, type, kv_type) -> an empty context, closed after the test."""
    contexts = []

    def make(method, keep="ram", of="q8_0", kv_type="f16", kind="llama", **shape):
        contexts.append(TinyContext(tiny(kind, **shape).model, methods_plan(method), kv_type))
        if keep:
            contexts[-1].cache.keep(keep, kv_type=of)
        return contexts[-1]

    yield make
    for context in contexts:
        context.close()


def q8_0(rows):
    n, d = rows.shape
    return rounded(rows.reshape(n, d // 32, 32)).reshape(n, d).astype(np.float32)


def half(rows):
    return rows.astype(np.float16).astype(np.float32)


def of_tokens(context, heads, tokens):
    """Yields, for each head, the held tokens below `tokens`, and their keys and values."""
    held = [head for layer in context.held() for head in layer]
    for (k, v, _), own in zip(heads, held, strict=True):
        kept = [t for t in own if t < tokens]
        yield kept, k[: len(kept)], v[: len(kept)]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "kivi4"])
def test_a_later_message_sees_rows_that_were_rounded_once(made, kv_type):
    """Rows equal the definition of q8_0, and logits equal those of a cache that stores all rows in q8_0."""
    context, plain = made("snapkv", kv_type=kv_type), made("full", "")
    stored = made("full", "", kv_type=KvType.parse("q8_0", "off"))
    for one in (plain, stored):
        one.decode(messages()[0])
    whole = [(q8_0(k), q8_0(v)) for k, v, _ in keeping.rows(plain)]
    talk = Talk(context)
    talk.say(messages()[0])
    for turn in (1, 2):
        talk.decode(messages()[turn])
        for (k, v, _), (k_whole, v_whole) in zip(keeping.rows(context), whole, strict=True):
            np.testing.assert_array_equal(k[:FIRST], k_whole)
            np.testing.assert_array_equal(v[:FIRST], v_whole)
        if turn == 1:
            stored.cache.compress()
            stored.decode(messages()[1])
            np.testing.assert_array_equal(context.logits(), stored.logits())
        talk.compress()
    if kv_type == "f16":
        kept_rows = of_tokens(context, keeping.rows(context), FIRST)
        for (kept, k, v), (k_whole, v_whole) in zip(kept_rows, whole, strict=True):
            np.testing.assert_array_equal(k, half(k_whole[kept]))
            np.testing.assert_array_equal(v, half(v_whole[kept]))


@pytest.mark.parametrize("method", [m for m in METHODS if m in distinct()])
def test_every_method_chooses_nearly_as_from_rows_as_they_are(made, tiny, profile_file, method):
    talks = [Talk(made("full", of=of)) for of in ("q8_0", "f16")]
    for talk in talks:
        give_plan(talk.context, tiny("llama"), methods_plan(method), profile_file)
    for message, answer in zip(messages(), answers(), strict=True):
        for talk in talks:
            talk.say(message)
            assert not talk.context.cache.keep_problem()
            talk.answer(answer)
        rounded_rows, as_they_are = (talk.context.held() for talk in talks)
        assert differing(rounded_rows, as_they_are) < 0.1


@pytest.mark.parametrize("method", [*FEW, *whole(*(m for m in METHODS if m not in FEW))])
def test_questions_about_pictures_are_answered_as_over_rows_as_they_are(closing, method):
    """The last question is about an image that no other question asked about. A turn is dropped before it."""
    sessions = [
        closing(pykvedge.Session(plan=methods_plan(method), threads=THREADS, keep="ram", keep_type=of))
        for of in ("q8_0", "f16")
    ]
    answered = [[], []]
    for session, texts in zip(sessions, answered, strict=True):
        session.ask("What is the code?", ["examples/scene-1.png"], GREEDY).read()
        session.ask("What is the code in image 2?", ["examples/scene-2.png"], GREEDY).read()
        texts.append(session.ask("How many triangles are there?", [], GREEDY).read())
        with suppress(UnsupportedError):  # methods that read twice, or keep queries
            session.drop_turn(2)
        texts.append(session.ask("What is the code?", [], GREEDY).read())
    held = [
        [[cache.tokens(i, h) for h in range(len(heads))] for i, heads in enumerate(cache.lengths())]
        for cache in (session.engine.cache for session in sessions)
    ]
    assert differing(*held) < 0.1 and answered[0] == answered[1]
    rounded_full, full = (session.last_report.kv.full_bytes for session in sessions)
    assert 0.8 < rounded_full / full <= 1  # of tokens, without the free rows of blocks


def test_a_message_over_them_attends_on_the_host_where_a_device_has_the_others(made, monkeypatch):
    host = Talk(made("kvedge"))
    monkeypatch.setattr(libkvedge, "Cache", functools.partial(libkvedge.Cache, devices=DEVICES_ALL))
    device = Talk(made("kvedge"))
    for message, answer in zip(messages(), answers(), strict=True):
        for talk in (host, device):
            talk.say(message)
            talk.answer(answer)
        assert differing(host.context.held(), device.context.held()) < 0.02
        stats = device.context.cache.stats()
        assert stats.whole_rounded == 1 and stats.device_bytes > 0


@pytest.mark.parametrize("kind", ["llama", "qwen2vl"])
def test_they_take_half(made, kind, tmp_path):
    sizes = []
    for of in ("q8_0", "f16"):
        talk = Talk(made("snapkv", of=of, kind=kind))
        talk.say(random_tokens(1500))
        sizes.append(talk.context.cache.stats().whole_bytes)
    assert 0.53 < sizes[0] / sizes[1] < 0.56


def test_what_all_of_is_kept_is_not_rounded(made):
    context, plain = made("full"), made("full", "")
    for one in (context, plain):
        one.decode(messages()[0])
        one.cache.compress()
    assert keeping.equal_pairs(context, plain)


def test_rows_from_a_file_are_those_that_were_saved(made, tmp_path):
    talk, path = Talk(made("snapkv")), tmp_path / "talk.kvs"
    talk.say(messages()[0])
    talk.answer(random_tokens(ANSWER))
    talk.context.cache.save(bytes(path), "model", b"", whole=True)
    other = made("snapkv")
    other.cache.load(bytes(path), "model")
    other.n[0] = talk.n
    back = Talk(other, answered=list(talk.answered))
    assert abs(other.cache.stats().whole_bytes - talk.context.cache.stats().whole_bytes) < 100  # free rows of scores
    plain = Talk(made("snapkv", of="f16"))
    plain.say(messages()[0])
    plain.context.cache.save(bytes(tmp_path / "plain.kvs"), "model", b"", whole=True)
    assert path.stat().st_size < 0.8 * (tmp_path / "plain.kvs").stat().st_size  # includes the kept rows
    for one in (talk, back):
        one.say(messages()[1])
    assert keeping.equal_pairs(talk.context, other)
    np.testing.assert_array_equal(talk.context.logits(), other.logits())


def test_answers_over_them_are_not_called_exact(made, tmp_path):
    talk = Talk(made("snapkv"))
    talk.say(messages()[0])
    talk.answer([5])
    talk.context.cache.save(bytes(tmp_path / "talk.kvs"), "model", b"", whole=True)
    other = made("snapkv", of="f16")
    other.cache.load(bytes(tmp_path / "talk.kvs"), "model")
    for context in (talk.context, other):
        with pytest.raises(UnsupportedError, match="whole rows are rounded to q8_0"):
            call("verify_whole", context.cache.handle, 0, 2)
    for settings, says in [
        ({"keep": "ram", "keep_type": "q8_0", "exact": True}, "omit exact or keep_type"),
        ({"keep": "ram", "keep_type": "q4_0"}, "keep_type must be 'f16' or 'q8_0'"),
        ({"keep_type": "q8_0"}, "set keep to 'ram' or 'disk'"),
    ]:
        with pytest.raises(UsageError, match=says):
            Settings(**settings)


def test_the_library_and_all_commands_take_the_same_types(made):
    cache, taken = made("snapkv", keep="").cache, []
    for name in NAMES:
        with suppress(UsageError, UnsupportedError):
            cache.keep("ram", kv_type=name)
            taken.append(name)
    assert tuple(taken) == KEEP_TYPES
    for command in (chat, serve, fit, bench):
        [option] = [param for param in command.params if param.name == "keep_type"]
        assert tuple(option.type.choices) == KEEP_TYPES, command.name


def test_a_conversation_over_them_becomes_no_stream(made):
    talk = Talk(made("snapkv"))
    talk.say(messages()[0])
    talk.context.cache.set_plan(pykvedge.plan("snapkv", 64))
    talk.decode(messages()[1])
    talk.context.cache.keep("")
    with pytest.raises(UnsupportedError, match="each compression would round quantised rows again"):
        call("compress_stream", talk.context.cache.handle, 0)


def test_an_exact_session_says_that_rows_of_a_file_were_rounded(closing, tmp_path):
    plan, path = pykvedge.plan("snapkv", 0.3), tmp_path / "talk.kvs"
    first = closing(pykvedge.Session(plan=plan, threads=THREADS, keep="ram", keep_type="q8_0"))
    first.ask("What is the code?", ["examples/scene-1.png"], GREEDY).read()
    first.save(path, whole=True)
    other = closing(pykvedge.Session(plan=plan, threads=THREADS, keep="ram", exact=True))
    other.load(path)
    answer = other.ask("How many triangles are there?", [], GREEDY)
    answer.read()
    assert answer.report.drafts.exact is False and other.engine.cache.stats().whole_rounded == 1
    assert any("may differ from that of --method full" in note for note in answer.report.notes)


def test_head_sizes_that_q8_0_cannot_hold_are_refused(made):
    with pytest.raises(UnsupportedError, match="needs a multiple of 32; use f16"):
        made("snapkv", head_size=40)
