"""Thousands of generated tokens: memory stays within the limit of the decode policy, also in the system's figures."""

import sys

import pytest
from choosing import few, whole
from contexts import TinyContext, random_tokens

import pykvedge
from pykvedge.plans.registry import members
from pykvedge.system.memory import own_bytes

PROMPT, WARM, LONGEST = 1500, 2_000, 10_000
SHAPE = {"n_heads": 2, "n_heads_kv": 2, "head_size": 64, "n_vocab": 384, "n_ctx_train": 16384, "weight": "f32"}
ROW = 2 * 64 * 2  # bytes of a key and a value
MIB = 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("generated", [5000, *whole(LONGEST)])
@pytest.mark.parametrize("decode", few(("heavy-hitter", "ratio"), [d for d in members("decode") if d != "keep-all"]))
def test_memory_stays_within_the_bound(native, tiny, decode, generated):
    plan = pykvedge.plan("h2o", 0.2, decode=decode, allocator="prefix", sinks=1)  # layers keep different shares
    with TinyContext(tiny("llama", **SHAPE).model, plan, n_ctx=LONGEST + PROMPT + 16) as context:
        context.decode([t % 300 + 5 for t in random_tokens(PROMPT)])
        context.cache.compress()
        constant = decode in ("sliding", "heavy-hitter")
        kept = [n for heads in context.cache.lengths() for n in heads]
        sizes, scores, rss = [], [], 0
        for step, token in enumerate(random_tokens(generated)):
            context.decode([token % 300 + 5])
            if step % 20 == 0:
                stats = context.cache.stats()
                held = [n for heads in context.cache.lengths() for n in heads]
                # a block is at least four fifths full, or packed within 32 tokens; one block has a quarter of free rows
                room = 2 * 32 + max(32, max(held) // 4)
                assert stats.bytes <= (1.25 * sum(held) + 4 * room) * ROW + 2 * 2 * 4096
                assert held == [n + 1 for n in kept] if constant and step else True
                sizes.append(stats.bytes)
                scores.append(stats.score_bytes)
                assert stats.index_bytes < 5 * 1.25 * context.n[0] + 3 * 4 * (sum(held) + 4 * 256)
            if step == WARM:
                rss = own_bytes()
        warm = WARM // 20
        if constant:
            assert max(sizes[2 * warm :]) <= max(sizes[warm : 2 * warm])
            assert max(scores[2 * warm :]) <= max(scores[warm : 2 * warm])
        else:  # the share of all tokens; a head drops at most one row per token
            assert sum(held) <= 0.2 * (PROMPT + generated) * 4 + 2 * 4
        growth = max(0, sizes[-1] - sizes[warm]) + 5 * 1.25 * generated
        assert own_bytes() - rss <= growth + MIB
