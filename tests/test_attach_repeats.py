"""Requests to an attached model that repeat, or share a beginning, are answered as the first time."""

import llama_cpp
import numpy as np
import pytest
from attached import FEW, A, B, chat, complete, held
from choosing import few

import pykvedge
from pykvedge.chat.reuse import History, shared
from pykvedge.errors import StateError


def outcome(llm, attached, prompt, n=8):
    """Returns the text, the number of tokens and the held tokens: equal for equal requests."""
    text = complete(llm, prompt, n)
    return text, attached.stats().n_tokens, held(attached._cache)


@pytest.mark.parametrize("method", few(FEW))
def test_the_same_request_at_once_and_after_another(attached_llama, method):
    with attached_llama(method) as (llm, attached):
        first = outcome(llm, attached, A)
        assert outcome(llm, attached, A) == first
        between = outcome(llm, attached, B)
        assert outcome(llm, attached, A) == first
        assert outcome(llm, attached, B) == between
    with attached_llama(method) as (llm, attached):
        assert outcome(llm, attached, B) == between


@pytest.mark.parametrize("method", few(FEW))
def test_a_turn_that_comes_again_or_is_changed(attached_llama, method):
    with attached_llama(method) as (llm, attached):

        def say(read, text):
            tokens = read + llm.tokenize(text.encode(), add_bos=False)
            return outcome(llm, attached, tokens), tokens

        opening, first = say([], A)
        so_far = llm.input_ids[: llm.n_tokens].tolist()
        again, second = say(so_far, "And then? What did the dog do?")
        n_compressions = attached.stats().n_compressions
        assert n_compressions == 2 and outcome(llm, attached, second) == again
        assert attached.stats().n_compressions == n_compressions  # the answer in between is no prompt
        changed, _ = say(so_far, "And the fox?")
        assert outcome(llm, attached, second) == again
        assert say(so_far, "And the fox?")[0] == changed
        assert outcome(llm, attached, first) == opening


@pytest.mark.parametrize("keep", ["", "ram"])
@pytest.mark.parametrize("method", ["h2o", "elastic"])
def test_guesses_of_a_draft_model_are_no_prompt(attached_llama, method, keep):
    """Draft tokens come several at a time, and wrong ones are removed."""

    def guess(ids, **_):
        return np.resize(ids[-3:], 6)

    def told(llm, attached):
        prompts = [A, A + llm(A, max_tokens=8, temperature=0)["choices"][0]["text"] + B, A]
        outcomes = [outcome(llm, attached, prompt, 24) for prompt in prompts]
        return outcomes, attached.stats().n_compressions

    with attached_llama(method, kept={"keep": keep}) as one:
        plain = told(*one)
    with attached_llama(method, kept={"keep": keep}, draft_model=guess) as (llm, attached):
        with pytest.warns(pykvedge.KvedgeWarning, match="draft_model has no effect"):
            assert told(llm, attached) == plain
        assert llm.draft_model is guess


@pytest.mark.parametrize("method", ["full", "h2o", "elastic", "kvzip"])  # also a decode policy and a second pass
@pytest.mark.parametrize("left", [0, 30])
def test_tokens_that_functions_of_llama_h_took_away_are_read_again(attached_llama, method, left):
    with attached_llama(method) as (llm, attached):
        outcome(llm, attached, A)
        longer = llm.input_ids[: llm.n_tokens].tolist() + llm.tokenize(b"And then?", add_bos=False)
        expected = outcome(llm, attached, longer)
        outcome(llm, attached, A)
        memory = llama_cpp.llama_get_memory(llm.ctx)
        llama_cpp.llama_memory_seq_rm(memory, 0, left, -1) if left else llama_cpp.llama_memory_clear(memory, True)
        assert outcome(llm, attached, longer) == expected


@pytest.mark.parametrize("method", few(FEW))
def test_images_three_times(attached_llama, picture_file, method):
    text = "<s><__media__>\nWhat is this? " + A
    with attached_llama(method, "llava", images=True) as (llm, attached):

        def ask():
            return chat(llm, text, [picture_file()]), attached.stats().n_tokens, held(attached._cache)

        first = ask()
        assert ask() == first
        complete(llm, A)
        assert ask() == first


def test_requests_that_share_a_beginning_with_an_image_are_read_anew(attached_llama, picture_file):
    """In the place of an image, llama_cpp remembers tokens that are not the image's."""
    with attached_llama("h2o", "llava", images=True) as (llm, attached):
        expected = outcome(llm, attached, A)
        chat(llm, "<s>" + A + "<__media__>\nWhat?", [picture_file()])
        assert outcome(llm, attached, A) == expected and attached.stats().n_image_tokens == 0


def test_one_token_at_a_time_and_none(attached_llama):
    """A prompt without a generated token is asked again: its logits are still there."""
    with attached_llama("snapkv") as (llm, attached):
        once = outcome(llm, attached, A, n=1)
        assert outcome(llm, attached, A, n=1) == once and attached.stats().n_compressions == 0
        whole = outcome(llm, attached, A)
        assert outcome(llm, attached, A) == whole
    with attached_llama("snapkv") as (llm, attached):
        assert outcome(llm, attached, A) == whole


def test_an_answer_that_is_broken_off(attached_llama):
    with attached_llama("h2o") as (llm, attached):
        first = outcome(llm, attached, A)
        steps = llm.create_completion(A, max_tokens=20, temperature=0.0, stream=True)
        next(steps)
        steps.close()
        assert outcome(llm, attached, A) == first


BETWEEN = [lambda llm: complete(llm, A, 20), lambda llm: llm.eval([7, 8]), lambda llm: llm.reset()]


@pytest.mark.parametrize("between", BETWEEN)
def test_an_answer_that_others_came_between_is_not_gone_on_with(attached_llama, between):
    """llama_cpp would sample from missing logits, which ends the process, or from the logits of other tokens."""
    with attached_llama("h2o") as (llm, attached):
        first = outcome(llm, attached, A)
        steps = llm.create_completion(A, max_tokens=20, temperature=0.0, stream=True)
        next(steps)
        between(llm)
        with pytest.raises(StateError, match="the model has read other tokens"):
            list(steps)
        assert outcome(llm, attached, A) == first


def test_another_plan_and_the_same_request(attached_llama):
    with attached_llama("h2o") as (llm, attached):
        first = outcome(llm, attached, A)
        attached.set_plan("full")
        outcome(llm, attached, A)
        whole = outcome(llm, attached, A)
        assert whole == outcome(llm, attached, A) and len(whole[2][0][0]) == whole[1]
        attached.set_plan("h2o", 0.4)
        assert outcome(llm, attached, A) == first == outcome(llm, attached, A)


def test_quantised_rows_are_not_gone_on_from(attached_llama):
    from llama_cpp import llama_cpp

    types = {"type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0, "flash_attn": True}
    with attached_llama("full", **types) as (llm, attached):
        first = outcome(llm, attached, A, n=40)
        assert outcome(llm, attached, A, n=40) == first
        assert outcome(llm, attached, A, n=40) == first


def test_a_batch_that_fails_is_no_beginning(attached_llama, monkeypatch):
    with attached_llama("h2o", n_batch=16) as (llm, attached):
        first = outcome(llm, attached, A)
        complete(llm, B)
        decode, left = llm._ctx.decode, [2]

        def failing(batch):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("llama_decode returned -3")
            decode(batch)

        monkeypatch.setattr(llm._ctx, "decode", failing)
        with pytest.raises(RuntimeError, match="-3"):
            complete(llm, A)
        monkeypatch.undo()
        assert outcome(llm, attached, A) == first


def test_what_may_be_gone_on_from():
    history = History()
    history.clear(uncut=False)
    history.begin()
    history.note(0, [1, 2, 3], generated=False)
    history.note(3, [4], generated=True)
    history.begin()
    history.note(4, [5, 6], generated=False)
    assert [r.tokens for r in history.before(4)[0]] == [[1, 2, 3], [4]]
    assert [r.generated for r in history.before(9)[0]] == [False, True]
    assert history.before(3) == ([], [])
    assert history.knows(6) and not history.knows(5)
    history.note(9, [7], generated=True)  # tokens that nobody noted
    assert not history.knows(10) and history.before(4) == ([], [])
    assert shared([1, 2, 3], [1, 2, 4]) == 2 and shared([1], [1, 2]) == 1 and shared([], [1]) == 0
