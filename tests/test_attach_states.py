"""save_state, load_state and the caches of a llama_cpp.Llama that kvedge is attached to."""

import pickle

import gguf
import numpy as np
import pytest
from attached import FEW, A, B, chat, complete, held
from batches import logits
from choosing import whole
from llama_cpp import LlamaDiskCache, LlamaRAMCache

import pykvedge
from pykvedge.errors import SessionFileError, StateError

MORE = "And then? What did the dog do?"
Q8_0 = {"type_k": 8, "type_v": 8, "flash_attn": True}


def read_on(llm, attached):
    """Reads a further message and some answer tokens. Returns the logits, the held tokens and the number of tokens."""
    llm.eval(llm.tokenize(MORE.encode(), add_bos=False))
    after = [logits(llm.ctx)]
    for _ in range(3):
        llm.eval([llm.sample(temp=0.0)])
        after.append(logits(llm.ctx))
    return after, held(attached._cache), llm.n_tokens


@pytest.mark.parametrize(("method", "options"), [*((name, {}) for name in FEW), ("full", Q8_0)])
def test_a_state_goes_on_as_without_the_detour(attached_llama, method, options):
    with attached_llama(method, **options) as (llm, attached):
        complete(llm, A)
        state, n, rows = llm.save_state(), llm.n_tokens, held(attached._cache)
        expected = read_on(llm, attached)
        assert len(state.llama_state) > 0
        complete(llm, B, 20)
        llm.load_state(state)
        assert llm.n_tokens == n == attached.stats().n_tokens and held(attached._cache) == rows
        found = read_on(llm, attached)
        np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
        assert found[1:] == expected[1:]
        llm.load_state(state)  # a state without later changes
        assert held(attached._cache) == rows
    state = pickle.loads(pickle.dumps(state))
    with attached_llama(method, **options) as (llm, attached):  # another Llama of the same model
        llm.load_state(state)
        assert read_on(llm, attached)[1:] == expected[1:]


@pytest.mark.parametrize("method", FEW)
def test_completions_with_a_cache(attached_llama, method, tmp_path):
    """A completion continues the first request after another request or a new start; another one repeats it."""
    with attached_llama(method) as (llm, attached):
        first = complete(llm, A)
        so_far = [*llm.input_ids[: llm.n_tokens].tolist(), *llm.tokenize(MORE.encode(), add_bos=False)]
        third = complete(llm, so_far), held(attached._cache)
    with attached_llama(method) as (llm, attached):
        llm.set_cache(LlamaRAMCache())
        assert complete(llm, A) == first
        complete(llm, B)
        assert (complete(llm, so_far), held(attached._cache)) == third
        complete(llm, B)
        assert complete(llm, A) == first
        llm.set_cache(LlamaDiskCache(str(tmp_path)))
        complete(llm, A)
    with attached_llama(method) as (llm, attached):
        llm.set_cache(LlamaDiskCache(str(tmp_path)))
        assert (complete(llm, so_far), held(attached._cache)) == third


@pytest.mark.parametrize("method", ["h2o", "kvzip", *whole("full", "adakv", "elastic", "kvedge")])
def test_a_prompt_that_waits_for_its_first_token(attached_llama, method):
    """A prompt without a generated token is read again after load_state."""
    with attached_llama(method) as (llm, attached):
        llm.eval(llm.tokenize(A.encode()))
        state = llm.save_state()
        expected = read_on(llm, attached)
        complete(llm, B)
        llm.load_state(state)
        assert read_on(llm, attached)[1:] == expected[1:]
        llm.set_cache(LlamaRAMCache())
        assert complete(llm, A, 1) == complete(llm, A, 1)


def test_another_plan_reads_the_tokens_again(attached_llama):
    with attached_llama("h2o") as (llm, attached):
        first = complete(llm, A), held(attached._cache)
        state = llm.save_state()
        attached.set_plan("full")
        whole = complete(llm, A), held(attached._cache)
        llm.load_state(state)
        n = llm.n_tokens
        assert attached.kept() == [[n] * 2] * 2
        attached.set_plan("h2o", 0.4)
        llm.load_state(state)
        assert held(attached._cache) == first[1] != whole[1]


def test_cuts_of_an_uncompressed_cache_are_known(attached_llama):
    """llama_cpp cuts the cache to the common part of two prompts; a plan that compresses reads the rows that remain."""
    with attached_llama("h2o") as (llm, attached):
        complete(llm, B)
        rows = held(attached._cache)
    with attached_llama("full") as (llm, attached):
        complete(llm, A)
        complete(llm, B)
        state = llm.save_state()
        attached.set_plan("h2o", 0.4)
        llm.load_state(state)
        assert llm.n_tokens == attached.stats().n_tokens
        assert max(attached.kept()[0]) < llm.n_tokens
        assert held(attached._cache)[0][0][0] == rows[0][0][0]


def test_pictures(attached_llama, picture_file):
    text = "<s><__media__>\nWhat is this? " + A
    with attached_llama("h2o", "llava", images=True) as (llm, attached):
        chat(llm, text, [picture_file()])
        state, rows, n = llm.save_state(), held(attached._cache), llm.n_tokens
        complete(llm, B)
        llm.load_state(pickle.loads(pickle.dumps(state)))
        assert held(attached._cache) == rows and attached.stats().n_image_tokens == 16 and llm.n_tokens == n
        attached.set_plan("h2o", 0.3)
        with pytest.raises(StateError, match="pictures"):
            llm.load_state(state)
        assert held(attached._cache) == rows and llm.n_tokens == n


def test_an_empty_model(attached_llama):
    with attached_llama("h2o") as (llm, attached):
        empty = llm.save_state()
        first = complete(llm, A)
        llm.reset()
        assert llm.save_state().n_tokens == 0
        complete(llm, B)
        llm.load_state(empty)
        assert llm.n_tokens == attached.stats().n_tokens == 0
        assert complete(llm, A) == first


def test_states_of_other_times_are_refused(attached_llama, tiny):
    """A state from before attach or after detach is refused without a change. detach restores the methods."""
    with attached_llama("h2o") as (llm, attached):
        first = complete(llm, A)
        state = llm.save_state()
        attached.detach()
        assert not {"save_state", "load_state"} & set(vars(llm))
        plain = complete(llm, A)
        n, detached = llm.n_tokens, llm.save_state()
        with pytest.raises(StateError, match="attached"):
            llm.load_state(state)
        assert llm.n_tokens == n and complete(llm, A) == plain
        complete(llm, B)
        llm.load_state(detached)
        assert complete(llm, A) == plain
        with pykvedge.attach(llm, "h2o", 0.4) as again:
            complete(llm, B)
            rows = held(again._cache)
            with pytest.raises(StateError, match="not attached"):
                llm.load_state(detached)
            assert held(again._cache) == rows
            llm.load_state(state)
            assert complete(llm, A) == first


def test_a_damaged_state_leaves_an_empty_model(attached_llama):
    from dataclasses import replace

    with attached_llama("h2o") as (llm, attached):
        first = complete(llm, A)
        state = llm.save_state()
        with pytest.raises(SessionFileError):
            llm.load_state(replace(state, llama_state=state.llama_state[:-9]))
        assert llm.n_tokens == attached.stats().n_tokens == 0
        assert complete(llm, A) == first


def test_scores_of_every_token(attached_llama):
    with attached_llama("h2o", logits_all=True) as (llm, _):
        complete(llm, A)
        state, scores = llm.save_state(), llm._scores.copy()
        complete(llm, B)
        llm.load_state(state)
        np.testing.assert_array_equal(llm._scores, scores)
        assert np.any(scores[-1])


def test_another_model(attached_llama):
    with attached_llama("h2o", "qwen3") as (llm, _):
        complete(llm, A)
        state = llm.save_state()
    with attached_llama("h2o") as (llm, _), pytest.raises(StateError, match="another model"):
        llm.load_state(state)


def write_adapter(path):
    """Writes a LoRA adapter of the tiny llama, with random numbers."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for layer in range(2):
        for name, shape in (("lora_a", (4, 256)), ("lora_b", (256, 4))):
            rows = 0.2 * rng.standard_normal(shape).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.attn_output.weight.{name}", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_rows_of_another_adapter_are_computed_again(attached_llama, tmp_path):
    adapter = write_adapter(tmp_path / "lora.gguf")
    with attached_llama("h2o", lora_path=adapter) as (llm, attached):
        complete(llm, A)
        state, so_far = llm.save_state(), llm.input_ids[: llm.n_tokens].tolist()
        after = read_on(llm, attached)
        llm.load_state(state)
        assert read_on(llm, attached)[1:] == after[1:]
    for given in ({}, {"lora_path": adapter, "lora_scale": 0.5}):
        with attached_llama("h2o", **given) as (llm, attached):
            n_prompt = len(llm.tokenize(A.encode()))
            llm.eval(so_far[:n_prompt])
            for token in so_far[n_prompt:]:
                llm.eval([token])
            expected = read_on(llm, attached)
            complete(llm, B)
            llm.load_state(state)
            found = read_on(llm, attached)
            np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
            assert found[1:] == expected[1:] and np.abs(found[0][0] - after[0][0]).max() > 0.1


def test_a_pickled_model_is_a_plain_one(attached_llama):
    with attached_llama("h2o") as (llm, attached):
        complete(llm, A)
        other = pickle.loads(pickle.dumps(llm))
        assert "eval" not in vars(other)
        text = complete(other, A)
        other.close()
        attached.detach()
        assert complete(llm, A) == text
