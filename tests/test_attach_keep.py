"""attach with whole rows: a request that continues a conversation is answered as by a session with keep."""

import numpy as np
import pytest
from attached import A, B, complete, held, llama, talk
from choosing import crossed

import pykvedge
from pykvedge.errors import UsageError

MESSAGES = [(A, []), (B, []), ("And now?", []), ("Why?", [])]


RAM = {"keep": "ram"}


def plan_of(method):
    return pykvedge.plan(method, 0.2)


def chain(llm, attached, turns):
    """Yields (answer, held tokens) of requests that each add a message to everything read before."""
    read: list[int] = []
    for turn in turns:
        read = llm.input_ids[: llm.n_tokens].tolist() + turn.tokens
        yield complete(llm, read), held(attached._cache)


@pytest.fixture
def turns(monkeypatch):
    """turns(files, plan) -> the turns of a session with keep. Each turn's tokens extend the attached model's tokens."""

    return lambda files, plan: talk(monkeypatch, files, plan, MESSAGES, keep="ram", n_ctx=4096)


@pytest.mark.parametrize(
    ("kind", "method"), crossed(["llama", "qwen3"], ["snapkv", "h2o", "lookm", "expected"], ["expected"], ["llama"])
)
def test_requests_that_add_are_answered_as_in_a_session(native, tiny, turns, kind, method):
    files, plan = tiny(kind), plan_of(method)
    expected = turns(files, plan)
    with llama(files, plan, kept=RAM) as (llm, attached):
        for turn, (answer, kept) in zip(expected, chain(llm, attached, expected), strict=True):
            assert kept == turn.held
            assert answer.strip() == turn.answer.strip()
            assert attached.stats().whole_bytes > 0 and not attached.keep_problem
            assert attached.stats().n_tokens == llm.n_tokens


@pytest.mark.parametrize(
    ("kind", "method"),
    crossed(["llama", "gemma3", "qwen2vl"], ["snapkv", "h2o", "lookm", "expected"], ["h2o"], ["llama"]),
)
def test_requests_that_add_are_answered_as_one_prompt(native, tiny, turns, kind, method):
    files, plan = tiny(kind), plan_of(method)
    read: list[int] = []
    with llama(files, plan, kept=RAM) as (llm, attached), llama(files, plan) as (fresh, attached_fresh):
        for turn in turns(files, plan):
            read = llm.input_ids[: llm.n_tokens].tolist() + turn.tokens
            answer, kept = complete(llm, read), held(attached._cache)
            fresh.reset()
            assert complete(fresh, read) == answer
            assert held(attached_fresh._cache) == kept


def test_an_answer_in_other_tokens_is_read_again_alone(native, tiny, turns, monkeypatch):
    """If only the last answer differs, the request reads from there on. Any other difference reads everything again."""
    files, plan = tiny("llama"), plan_of("snapkv")
    first = turns(files, plan)[0].tokens
    changed = [*first, 7, 8, 9, *range(20, 60)]
    read, expected = [], None
    with llama(files, plan, kept=RAM) as (llm, attached):
        inner = attached._inner["eval"]
        attached._inner["eval"] = lambda tokens: (read.append(list(tokens)), inner(tokens))[1]
        complete(llm, first)
        read.clear()
        answer = complete(llm, changed)
        assert [token for tokens in read for token in tokens][: len(changed) - len(first)] == changed[len(first) :]
        kept = held(attached._cache)
        attached._inner["eval"] = inner
        llm.reset()
        expected = complete(llm, [*changed])
        assert answer == expected and kept == held(attached._cache)
        read.clear()
        attached._inner["eval"] = lambda tokens: (read.append(list(tokens)), inner(tokens))[1]
        again = complete(llm, [*first[:-3], 11, 12])
        assert read[0][: len(first) - 3] == first[:-3]
        attached._inner["eval"] = inner
        llm.reset()
        assert complete(llm, [*first[:-3], 11, 12]) == again
        assert complete(llm, changed) == expected


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_state_has_them(native, tiny, turns, kind):
    files, plan = tiny(kind), plan_of("snapkv")
    expected = turns(files, plan)
    with llama(files, plan, kept=RAM) as (llm, attached):
        steps = chain(llm, attached, expected)
        next(steps), next(steps)
        state = llm.save_state()
        complete(llm, [5, 6, 7])
        llm.load_state(state)
        assert attached.stats().whole_bytes > 0
        for turn in expected[2:]:
            answer = complete(llm, llm.input_ids[: llm.n_tokens].tolist() + turn.tokens)
            assert held(attached._cache) == turn.held or kind == "gemma3"  # gemma3's answer stays as it was read
            assert answer.strip() == turn.answer.strip() or kind == "gemma3"
            assert attached.stats().whole_bytes > 0
    with llama(files, plan) as (llm, attached):  # without whole rows, everything is read again
        llm.load_state(state)
        assert attached.stats().whole_bytes == 0
        assert np.array_equal(llm.input_ids[: llm.n_tokens], state.input_ids)


def test_without_keep_nothing_changes(native, tiny, turns, monkeypatch):
    files, plan = tiny("llama"), plan_of("snapkv")
    expected = talk(monkeypatch, files, plan, MESSAGES, n_ctx=4096)
    with llama(files, plan) as (llm, attached):
        for turn, (answer, kept) in zip(expected, chain(llm, attached, expected), strict=True):
            assert kept == turn.held and answer.strip() == turn.answer.strip()
    assert [turn.held for turn in turns(files, plan)][1:] != [turn.held for turn in expected][1:]


def test_what_cannot_be_kept_is_refused(native, tiny, tmp_path):
    files = tiny("llama")
    with (
        pytest.raises(UsageError, match="keep must be 'ram' or 'disk'"),
        llama(files, plan_of("snapkv"), kept={"keep": "tape"}),
    ):
        pass
    with pytest.raises(UsageError, match="reads the conversation twice"), llama(files, plan_of("kvzip"), kept=RAM):
        pass
    with llama(files, plan_of("snapkv"), kept={"keep": pykvedge.Keep("disk", tmp_path)}) as (_, attached):
        with pytest.raises(UsageError, match="reads the conversation twice"):
            attached.set_plan("kvzip", 0.3)
        assert attached.plan.method == "snapkv"


def test_one_token_more_belongs_to_the_prompt(native, tiny, turns):
    """A request may add a single token, as a request after an answer of one token does."""
    files, plan = tiny("llama"), plan_of("snapkv")
    prompt = turns(files, plan)[0].tokens
    with llama(files, plan, kept=RAM) as (llm, attached), llama(files, plan) as (fresh, attached_fresh):
        for asked in (prompt, [*prompt, 7], [*prompt, 8], [*prompt, 8, 9]):
            answer, kept = complete(llm, asked), held(attached._cache)
            fresh.reset()
            assert (complete(fresh, asked), held(attached_fresh._cache)) == (answer, kept)
