"""Several sequences in one context, and the effects of llama.cpp's memory calls."""

import batches
import numpy as np
import pytest
from attached import held
from contexts import TinyContext, random_tokens

import pykvedge
from pykvedge.errors import PluginError, UsageError

PLANS = {  # sequence: (plan, length of its prompt)
    0: (pykvedge.plan("lookm", 0.2), 210),
    1: (pykvedge.plan("snapkv", 0.5), 150),
    2: (pykvedge.plan("adakv", 64), 300),
    3: (pykvedge.plan("full"), 90),
    4: (pykvedge.plan("h2o", 0.3, decode="heavy-hitter"), 170),
}


def send(context, items):
    """Sends one batch of (token, position, sequence, wants logits)."""
    tokens, positions, sequences, wants = zip(*items, strict=True)
    return batches.send(context.context, positions, tokens, sequences=sequences, wants=wants)


def converse(context, sequences):
    """Reads prompts in one batch, token by token in turn, then 20 batches with an answer token for each sequence."""
    items = [
        (random_tokens(PLANS[s][1], seed=s)[i], i, s, i == PLANS[s][1] - 1)
        for i in range(max(PLANS[s][1] for s in sequences)) for s in sequences if i < PLANS[s][1]
    ]  # fmt: skip
    assert send(context, items) == 0
    for step in range(20):
        assert send(context, [(40 + s, PLANS[s][1] + step, s, True) for s in sequences]) == 0
    return {s: held(context.cache, s) for s in sequences}


@pytest.fixture
def many(closing, tiny):
    return lambda plan: closing(TinyContext(tiny("qwen3").model, plan, n_seq=6))


def test_each_sequence_is_compressed_when_its_answer_begins(many):
    context, prompts = many(pykvedge.plan("h2o")), (100, 300, 57)
    items = [(500 + i + s, i, s, i == n - 1) for i in range(300) for s, n in enumerate(prompts) if i < n]
    assert send(context, items) == 0
    assert send(context, [(700, prompts[s], s, True) for s in (0, 2)]) == 0  # sequence 1 has no answer yet
    lengths = [set(np.ravel(context.cache.lengths(s))) for s in range(3)]
    assert lengths == [{20 + 1}, {300}, {11 + 1}]  # a fifth, and the first answer token
    before = context.cache.tokens(0, 0, 2)
    assert before == sorted(set(before)) and before[-1] == 57
    context.llama.llama_memory_seq_rm(context.memory, 2, 40, -1)  # a cut through compressed tokens
    assert context.cache.tokens(0, 0, 2) == [t for t in before if t < 40]
    assert [set(np.ravel(context.cache.lengths(s))) for s in range(2)] == lengths[:2]


def test_five_sequences_with_plans_of_their_own(many):
    """Each sequence keeps the same tokens as alone in a separate context with only its plan."""
    together = many(pykvedge.plan("full"))
    for sequence, (plan, _) in PLANS.items():
        together.cache.set_sequence_plan(sequence, plan)
    found = converse(together, list(PLANS))
    for sequence, (plan, length) in PLANS.items():
        assert found[sequence] == converse(many(plan), [sequence])[sequence], f"sequence {sequence}, {plan.method}"
        n_held = sum(len(head) for layer in found[sequence] for head in layer)
        heads = sum(map(len, found[sequence]))
        growth = 0 if plan.decode == "heavy-hitter" else 20
        assert n_held <= heads * (plan.count(length) + growth + 1)
    lengths = {s: len(kept[0][0]) for s, kept in found.items()}
    assert len(set(lengths.values())) == len(PLANS)


def test_a_plan_of_its_own_outlives_the_sequence_and_ends_with_none(many):
    context = many(pykvedge.plan("full"))
    context.cache.set_sequence_plan(1, pykvedge.plan("knorm", 0.1))
    for expected in (30, 30, 300):
        if expected == 300:
            context.cache.set_sequence_plan(1, None)
        assert send(context, [(7, i, 1, i == 299) for i in range(300)]) == 0
        context.cache.compress(1)
        assert set(np.ravel(context.cache.lengths(1))) == {expected}
        context.llama.llama_memory_clear(context.memory, True)


def test_a_plan_that_fails_is_told_to_its_own_sequence(many, forgotten):
    @pykvedge.scorer("only-sometimes")
    def only_sometimes(layer, settings):
        raise ValueError("not today")

    context = many(pykvedge.plan("full"))
    context.cache.set_sequence_plan(2, pykvedge.plan("knorm", 0.1, scorer="only-sometimes"))
    for sequence in (1, 2):
        assert send(context, [(7, i, sequence, i == 99) for i in range(100)]) == 0
    context.cache.compress(1)
    with pytest.raises(PluginError, match="not today"):
        context.cache.compress(2)
    with pytest.raises(UsageError):
        context.cache.set_sequence_plan(-1, pykvedge.plan("knorm"))


def test_a_batch_that_is_refused_counts_no_tokens(closing, tiny):
    """A token of two sequences makes the batch invalid: no token of the batch is read."""
    contexts = [closing(TinyContext(tiny("llama").model, pykvedge.plan("full"), kv_type="f32")) for _ in range(2)]
    refused, prompt = contexts[0], random_tokens(40)
    for context in contexts:
        context.decode(prompt, prompt[:20])
    before = [refused.cache.stats(sequence) for sequence in (0, 1)]
    llama = refused.llama
    batch = llama.llama_batch_init(3, 0, 2)
    for i, sequences in enumerate(([0], [0, 1], [1])):
        batch.token[i], batch.n_seq_id[i], batch.logits[i] = prompt[i], len(sequences), True
        batch.pos[i] = 20 if sequences == [1] else 40
        for j, sequence in enumerate(sequences):
            batch.seq_id[i][j] = sequence
    batch.n_tokens = 3
    assert llama.llama_decode(refused.context, batch) != 0
    llama.llama_batch_free(batch)
    for sequence in (0, 1):
        after = refused.cache.stats(sequence)
        assert (after.n_tokens, after.bytes) == (before[sequence].n_tokens, before[sequence].bytes)
    rows = []
    for context in contexts:
        context.decode(prompt[:5], prompt[5:9])
        rows.append(context.logits())
        assert [context.cache.stats(s).n_tokens for s in (0, 1)] == [45, 24]
    np.testing.assert_array_equal(*rows)
