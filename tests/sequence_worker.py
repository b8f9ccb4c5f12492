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

import llama_cpp.llama_cpp as llama  # noqa: E402

SILENT = llama.llama_log_callback(lambda level, text, data: None)
LENGTHS = (100, 300, 57)


def open_context():
    llama.llama_log_set(SILENT, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(MODEL.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_ubatch, params.n_seq_max, params.kv_unified = 4096, 256, 4, True
    params.n_threads = params.n_threads_batch = 1
    return llama.llama_init_from_model(model, params), llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))


CONTEXT, N_VOCAB = open_context()


def decode(items):
    """items: (token, position, sequence, wants logits). Returns the logits asked for."""
    batch = llama.llama_batch_init(len(items), 0, 1)
    batch.n_tokens = len(items)
    for i, (token, position, sequence, wants) in enumerate(items):
        batch.token[i], batch.pos[i] = int(token), position
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wants
    if llama.llama_decode(CONTEXT, batch) != 0:
        raise SystemExit("llama_decode failed")
    rows = [np.ctypeslib.as_array(llama.llama_get_logits_ith(CONTEXT, i), (N_VOCAB,)).copy()
            for i, item in enumerate(items) if item[3]]  # fmt: skip
    llama.llama_batch_free(batch)
    return rows


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
