"""An attached Llama holds the same KV pairs as a Session: methods, texts, images, several batches, conversations."""

import pytest
from attached import FEW, METHODS, METHODS_READ_ONCE, Choices, chat, complete, differing, held, llama, profiles, talk
from choosing import few, methods, whole
from contexts import TinyContext, random_tokens

import pykvedge
from pykvedge.models.profiles import tables_for

WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. "
BUDGET = 0.4


def budget_of(method):
    return None if method == "full" else BUDGET


TIES = 0.005  # handlers split prompts elsewhere: of two nearly equal scores, either pair may stay


def plan_of(method):
    return pykvedge.plan(method, budget_of(method))


@pytest.mark.parametrize("repeats", [20, *whole(6)], ids=["several batches", "one batch"])  # turns below: one batch
@pytest.mark.parametrize("method", methods(METHODS))
def test_texts(native, tiny, profile_file, monkeypatch, method, repeats):
    files, profile = tiny("llama"), profiles(profile_file, tiny("llama"), method)
    (turn,) = talk(monkeypatch, files, plan_of(method), [(WORDS * repeats, [])], profile=profile, n_ctx=4096)
    n_prompt = len(turn.tokens)
    assert (n_prompt > 512) == (repeats == 20)  # a batch has 512 tokens
    with llama(files, plan_of(method), profile=profile) as (llm, attached):
        answer = complete(llm, turn.tokens)
        assert differing(held(attached._cache), turn.held) == 0
        assert answer.strip() == turn.answer.strip()


@pytest.mark.parametrize("method", few(("lookm", *FEW)))
def test_images_through_a_chat_handler(native, tiny, picture_file, profile_file, monkeypatch, method):
    files, images = tiny("llava"), [picture_file(), picture_file("b.png", 60, 90)]
    profile = profiles(profile_file, files, method)
    (turn,) = talk(monkeypatch, files, plan_of(method), [(WORDS * 5, images)], profile=profile, n_ctx=4096)
    with llama(files, plan_of(method), profile=profile, images=True) as (llm, attached):
        answer = chat(llm, turn.text, images, choices=(choices := Choices()))
        assert attached.stats().n_image_tokens == 32
        assert differing(held(attached._cache), turn.held) <= TIES
        sure = llm.detokenize(choices.sure).decode(errors="ignore").strip()
        assert sure and answer.strip().startswith(sure)
        assert answer.strip() == turn.answer.strip() or (choices.near and turn.answer.strip().startswith(sure))


@pytest.mark.parametrize("method", few(FEW))
def test_turns_of_a_chat(native, tiny, profile_file, monkeypatch, method):
    """The second message is so short that it keeps more than the budget; the third message is longer."""
    files, profile = tiny("llama"), profiles(profile_file, tiny("llama"), method)
    messages = [(WORDS * 6, []), ("And now?", []), (WORDS * 5, [])]
    turns = talk(monkeypatch, files, plan_of(method), messages, profile=profile, n_ctx=4096)
    with llama(files, plan_of(method), profile=profile) as (llm, attached):
        read: list[int] = []
        for turn in turns:
            read = llm.input_ids[: llm.n_tokens].tolist() + turn.tokens
            answer = complete(llm, read)
            assert attached.stats().n_tokens == llm.n_tokens
            assert differing(held(attached._cache), turn.held) == 0
            assert answer.strip() == turn.answer.strip()
        assert attached.stats().n_compressions == 3


@pytest.mark.parametrize("method", few(FEW, METHODS_READ_ONCE))
@pytest.mark.parametrize("n_batch", [1, 64])
def test_a_prompt_that_ends_with_a_batch_of_one_token(native, tiny, profile_file, method, n_batch):
    """Compared with the same batches without llama_cpp: a single token of a prompt is no answer."""
    files, profile = tiny("llama"), profiles(profile_file, tiny("llama"), method)
    tokens = random_tokens(129 if n_batch > 1 else 40)
    plan = plan_of(method)
    context = TinyContext(files.model, pykvedge.plan("full"))
    context.cache.set_plan(plan, tables_for(plan, files.model, profile, spare=False))
    context.cache.set_auto_compress(False)
    for start in range(0, len(tokens), n_batch):
        context.decode(tokens[start : start + n_batch])
    context.cache.compress()
    with llama(files, plan, profile=profile, n_batch=n_batch) as (llm, attached):
        answer = complete(llm, tokens, n=2)  # only the first is read
        assert answer is not None and attached.stats().n_tokens == len(tokens) + 1
        kept = [[[t for t in head if t < len(tokens)] for head in heads] for heads in held(attached._cache)]
        assert differing(kept, context.held()) == 0
    context.close()
