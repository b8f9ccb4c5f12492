"""kvedge's report of the attention of generated tokens, against the softmax of llama.cpp without kvedge."""

import numpy as np
import pytest
from choosing import crossed
from contexts import TinyContext, random_tokens

import pykvedge
from pykvedge.errors import StateError, UsageError

FULL = pykvedge.plan("full")


@pytest.fixture
def opened(closing, tiny):
    def start(plan, kind="llama", shape=None, **options) -> TinyContext:
        return closing(TinyContext(tiny(kind, weight="f32", **(shape or {})).model, plan, **options))

    return start


def assert_as_stock(ours, stock, sequence=0):
    """Checks every query head of every layer that kvedge stores (llama.cpp stores gemma3's sliding windows)."""
    layers = ours.cache.stats().n_layers
    assert layers > 0
    for layer in range(layers):
        expected = stock.attention[native_layer(ours, layer)][:, 0]
        for head, weights in enumerate(expected):
            found = ours.cache.attention(layer, head, sequence)
            assert len(found) == ours.cache.lengths(sequence)[layer][0] == len(weights)
            np.testing.assert_allclose(found, weights, rtol=1e-3, atol=1e-7)


def native_layer(context, layer):
    from pykvedge.library import libkvedge

    return libkvedge.lib().kvedge_layer_id(context.cache._handle, layer)


@pytest.mark.parametrize(("threads", "kind"), crossed([1, 3], ["llama", "qwen3", "phi3", "gemma3"], ["llama"], [3]))
def test_weights_are_those_of_llama_cpp(opened, kind, threads):
    ours, stock = opened(FULL, kind, kv_type="f32", threads=threads), opened(None, kind)
    ours.cache.watch(True)
    for tokens in (random_tokens(1, 9), random_tokens(900), *(random_tokens(1, i) for i in range(3))):
        ours.decode(tokens)
        stock.decode(tokens)
        if len(tokens) == 1:
            assert_as_stock(ours, stock)


@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (40, 2)])
def test_any_number_of_query_heads_shares_a_kv_head(opened, heads):
    shape = {"n_heads": heads[0], "n_heads_kv": heads[1], "head_size": 16}
    ours, stock = opened(FULL, shape=shape, kv_type="f32"), opened(None, shape=shape)
    ours.cache.watch(True)
    for tokens in (random_tokens(80), random_tokens(1)):
        ours.decode(tokens)
        stock.decode(tokens)
    assert_as_stock(ours, stock)


def test_sequences_of_one_batch_are_watched_apart(opened):
    ours, stocks = opened(FULL, kv_type="f32"), (opened(None), opened(None))
    ours.cache.watch(True)
    prompts, answers = (random_tokens(300), random_tokens(70, 2)), (random_tokens(1, 7), random_tokens(1, 8))
    for parts in (prompts, answers, answers[::-1]):
        ours.decode(*parts)
        for stock, tokens in zip(stocks, parts, strict=True):
            stock.decode(tokens)
    for sequence, stock in enumerate(stocks):
        assert_as_stock(ours, stock, sequence)
    ours.decode(random_tokens(1, 3))  # only of the first sequence: the other's last token stays the last
    assert_as_stock(ours, stocks[1], 1)


def test_what_was_dropped_takes_no_part(opened):
    """In the first layer, queries and keys depend only on a token and its position, whatever was dropped."""
    ours, stock = opened(pykvedge.plan("adakv", 0.3, decode="sliding"), kv_type="f32"), opened(None)
    ours.cache.watch(True)
    for step, tokens in enumerate((random_tokens(200), *(random_tokens(1, i) for i in range(90)))):
        ours.decode(tokens)
        stock.decode(tokens)
        if step in (1, 5, 90):
            held = ours.held()[0]
            for query_head, weights in enumerate(stock.attention[0][:, 0]):
                rows = weights[held[query_head // 2]]
                found = ours.cache.attention(0, query_head)
                np.testing.assert_allclose(found, rows / rows.sum(), rtol=1e-3, atol=1e-7)
                assert found.sum() == pytest.approx(1, abs=1e-5)


def test_nothing_is_kept_unless_asked_for(opened):
    ours = opened(FULL)
    ours.decode(random_tokens(50))
    ours.decode(random_tokens(1))
    with pytest.raises(StateError, match="watched"):
        ours.cache.attention(0, 0)
    without = ours.cache.stats().score_bytes
    ours.cache.watch(True)
    with pytest.raises(StateError, match="watched"):
        ours.cache.attention(0, 0)  # available from the next token on
    ours.decode(random_tokens(1))
    assert len(ours.cache.attention(1, 3)) == 52
    assert ours.cache.stats().score_bytes - without >= 2 * 4 * 52 * 4  # layers, heads, rows, float
    ours.cache.watch(False)
    assert ours.cache.stats().score_bytes == without
    with pytest.raises(StateError, match="watched"):
        ours.cache.attention(0, 0)


def test_rows_that_changed_since_have_no_weights(opened):
    ours = opened(FULL)
    ours.cache.watch(True)
    ours.decode(random_tokens(50))
    for _ in range(3):
        ours.decode(random_tokens(1))
        assert len(ours.cache.attention(0, 0)) == ours.n[0]
    ours.llama.llama_memory_seq_rm(ours.memory, 0, 40, -1)
    with pytest.raises(StateError):
        ours.cache.attention(0, 0)
    ours.n[0] = 40
    ours.decode(random_tokens(1))
    assert len(ours.cache.attention(0, 0)) == 41
    ours.decode(random_tokens(2))
    with pytest.raises(StateError, match="single watched token"):
        ours.cache.attention(0, 0)
    for layer, head in ((2, 0), (-1, 0), (0, 4), (0, -1)):
        with pytest.raises(UsageError):
            ours.cache.attention(layer, head)
    with pytest.raises(UsageError, match="no tokens"):
        ours.cache.attention(0, 0, sequence=1)
