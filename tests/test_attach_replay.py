"""Prompts of an attached llama_cpp.Llama that need a second pass. test_attach_equals_session.py compares the results of
all methods with a session."""

import numpy as np
import pytest
from attached import chat, complete, held, llama

import pykvedge
from pykvedge.errors import ContextError, UnsupportedError
from pykvedge.runtime.llama_context import Context

WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. " * 5
PICTURE = "<__media__>\n" + WORDS
PLAN = {"method": "kvzip", "budget": 0.4, "scorer.chunk": 24}


def plan(**settings):
    chosen = {**PLAN, **settings}
    return pykvedge.plan(chosen.pop("method"), chosen.pop("budget"), **chosen)


def test_the_pass_is_reported_and_leaves_the_prompts_logits(native, tiny):
    with llama(tiny("llama"), plan(budget=0.99)) as (llm, attached):
        assert attached.replay_s == 0
        text = complete(llm, WORDS, 1)
        assert attached.replay_s == 0  # nothing followed the prompt
        assert complete(llm, WORDS, 3).startswith(text) and attached.replay_s > 0
        n = attached.stats()
        assert (n.n_compressions, n.n_tokens) == (1, llm.n_tokens)
    with llama(tiny("llama"), plan(budget=1.0)) as (llm, attached):
        assert complete(llm, WORDS, 3).startswith(text)
        assert attached.replay_s == 0  # everything is kept


def test_an_interrupted_pass_leaves_the_prompt(native, tiny, monkeypatch):
    with llama(tiny("llama"), plan()) as (llm, attached):
        told = complete(llm, WORDS), held(attached._cache)
    decode, calls = Context.decode, []

    def interrupted(self, tokens, want_logits):
        calls.append(len(tokens))
        if len(calls) == 4:  # the first chunks were read
            raise KeyboardInterrupt
        return decode(self, tokens, want_logits)

    with llama(tiny("llama"), plan()) as (llm, attached):
        with monkeypatch.context() as patched:
            patched.setattr(Context, "decode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                complete(llm, WORDS)
        assert attached.stats().n_tokens == attached.stats().n_pending == llm.n_tokens
        assert (complete(llm, WORDS), held(attached._cache)) == told


def test_a_plan_that_asks_for_a_pass_may_come_later_and_go(native, tiny, picture_file):
    files = tiny("llava")
    with llama(files, "snapkv", 0.4, images=True) as (llm, attached):
        handler, own = llm.chat_handler, llm.chat_handler._mtmd_cpp
        chat(llm, PICTURE, [picture_file()])
        attached.set_plan(plan())
        chat(llm, PICTURE, [picture_file()])
        assert attached.replay_s > 0 and handler._mtmd_cpp is not own
        attached.set_plan("h2o", 0.4)
        chat(llm, PICTURE, [picture_file()])
        attached.detach()
        assert handler._mtmd_cpp is own


def test_pictures_that_nobody_saw_are_refused_in_a_line_and_instructions_do_without(native, tiny, picture_file):
    for settings, works in (({}, False), ({"scorer.source": "instruction"}, True)):
        with llama(tiny("llava"), plan(**settings), images=True) as (llm, attached):
            llm.chat_handler._mtmd_cpp = llm.chat_handler._mtmd_cpp._inner  # a handler may get the module another way
            if works:
                chat(llm, PICTURE, [picture_file()])
                assert attached.replay_s > 0
                continue
            with pytest.raises(UnsupportedError, match=r"kvedge does not know the content.*scorer\.source=instruction"):
                chat(llm, PICTURE, [picture_file()])
            complete(llm, WORDS)  # prompts of text still work
            assert attached.replay_s > 0


def test_a_context_without_room_for_the_pass_says_so(native, tiny):
    with llama(tiny("llama"), plan(), n_ctx=512) as (llm, attached):
        tokens = np.random.default_rng(3).integers(20, 200, 490).tolist()
        with pytest.raises(ContextError, match="second pass over the prompt does not fit"):
            complete(llm, tokens)
        complete(llm, WORDS)
        assert attached.stats().n_compressions == 1


def test_a_model_that_takes_nothing_back_says_so(native, tiny):
    with llama(tiny("lfm2"), plan()) as (llm, _), pytest.raises(UnsupportedError, match="recurrent layers"):
        complete(llm, WORDS)
