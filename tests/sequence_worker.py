"""Several sequences in one context, copied, cut and cleared: the logits along the way.

Arguments: model, out.npy, "full" (libkvedge owns the KV memory, nothing is compressed), "stock" (whatever
LLAMA_CPP_LIB_PATH names) or a compressing method, for which it prints the lengths of all heads instead.
"""

import json
import sys

import numpy as np

MODEL, OUT, METHOD = sys.argv[1:4]
if METHOD != "stock":
    import pykvedge

import batches  # noqa: E402
from batches import llama  # noqa: E402

LENGTHS = (100, 300, 57)
CONTEXT = batches.open_context(batches.open_model(MODEL), n_ctx=4096, n_ubatch=256, n_seq_max=4, kv_unified=True)


def decode(items):
    """items: (token, position, sequence, wants logits). Returns the logits asked for."""
    tokens, positions, sequences, wants = zip(*items, strict=True)
    batches.decode(CONTEXT, positions, tokens, sequences=sequences, wants=wants)
    return [batches.logits(CONTEXT, i) for i, wanted in enumerate(wants) if wanted]


def prompts():
    """Three prompts of different lengths, their tokens interleaved."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(500, 1000, n) for n in LENGTHS]
    return [
        (tokens[s][i], i, s, i == LENGTHS[s] - 1)
        for i in range(max(LENGTHS)) for s in range(3) if i < LENGTHS[s]
    ]  # fmt: skip


def walk(memory):
    """Every operation that llama.cpp tells a provider of."""
    rows = decode(prompts())
    for step in range(3):
        rows += decode([(700 + 3 * step + s, LENGTHS[s] + step, s, True) for s in range(3)])
    llama.llama_memory_seq_cp(memory, 1, 3, -1, -1)
    rows += decode([(600, 303, 1, True), (800, 303, 3, True)])
    llama.llama_memory_seq_rm(memory, 1, 200, -1)  # the end, and other tokens in its place
    rows += decode([(600 + i, 200 + i, 1, i == 29) for i in range(30)])
    llama.llama_memory_seq_rm(memory, 0, 20, 40)  # the middle
    rows += decode([(555, 103, 0, True)])
    llama.llama_memory_seq_keep(memory, 1)
    rows += decode([(556, 230, 1, True), (556, 0, 0, True)])
    llama.llama_memory_clear(memory, True)
    return rows + decode([(600 + i % 7, i, 2, i == 299) for i in range(300)])


def main():
    memory = llama.llama_get_memory(CONTEXT)
    if METHOD == "stock":
        np.save(OUT, np.array(walk(memory)))
        return
    from pykvedge.library import libkvedge

    plan = pykvedge.plan(METHOD)
    cache = libkvedge.Cache(CONTEXT, plan, "f16", auto_compress=True)
    if METHOD == "full":
        np.save(OUT, np.array(walk(memory)))
        return
    decode(prompts())
    decode([(700, LENGTHS[s], s, True) for s in (0, 2)])  # sequence 1 has not begun to answer
    print(json.dumps({"lengths": [cache.lengths(s) for s in range(3)], "tokens": cache.tokens(0, 0, 2)}))
    llama.llama_memory_seq_rm(memory, 2, 40, -1)  # a cut through compressed tokens
    print(json.dumps({"lengths": [cache.lengths(s) for s in range(3)], "tokens": cache.tokens(0, 0, 2)}))
    cache.detach()
    decode(prompts())  # llama.cpp owns the memory again


if __name__ == "__main__":
    main()
