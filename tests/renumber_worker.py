"""Tokens are removed from a sequence, and those behind them move up: the logits before and after.

Arguments: model, out.npy, and "stock" (whatever LLAMA_CPP_LIB_PATH names, with llama_memory_seq_add), "full"
(kvedge_renumber) or "graph" (likewise, with the rows in ggml's operations, as on a device).
"""

import sys

import numpy as np

MODEL, OUT, SIDE = sys.argv[1:4]
if SIDE != "stock":
    import pykvedge

import llama_cpp.llama_cpp as llama  # noqa: E402

SILENT = llama.llama_log_callback(lambda level, text, data: None)
N, FROM, TO = 300, 20, 170  # tokens of the prompt, and those that are removed


def decode(context, tokens, at):
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = int(token), at + i, 1, 0
        batch.logits[i] = i == len(tokens) - 1
    if llama.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")
    llama.llama_batch_free(batch)
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(llama.llama_get_model(context)))
    return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (n_vocab,)).copy()


def main():
    llama.llama_log_set(SILENT, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(MODEL.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 1024, 1, 1
    context = llama.llama_init_from_model(model, params)
    memory, cache = llama.llama_get_memory(context), None
    if SIDE != "stock":
        from pykvedge.library import libkvedge
        from pykvedge.native.abi import DEVICES_ALL, DEVICES_AUTO

        devices = DEVICES_ALL if SIDE == "graph" else DEVICES_AUTO
        cache = libkvedge.Cache(context, pykvedge.plan("full"), "f16", devices=devices)
        if (libkvedge.lib().kvedge_layer_device(cache.handle, 0) is not None) != (SIDE == "graph"):
            raise SystemExit("the rows lie elsewhere")
    tokens = np.random.default_rng(0).integers(500, 1000, N + 8)
    decode(context, tokens[:N], 0)
    llama.llama_memory_seq_rm(memory, 0, FROM, TO)
    out = [decode(context, tokens[N:][:1], N)]
    llama.llama_memory_seq_rm(memory, 0, N, -1)
    at = N - (TO - FROM)
    if cache is None:
        llama.llama_memory_seq_add(memory, 0, TO, -1, FROM - TO)
    elif cache.renumber(N, at) != at:
        raise SystemExit("the next token comes elsewhere")
    for token in tokens[N:]:
        if llama.llama_memory_seq_pos_max(memory, 0) != at - 1:
            raise SystemExit("llama.cpp is elsewhere")
        out.append(decode(context, [token], at))
        at += 1
    np.save(OUT, np.array(out))


if __name__ == "__main__":
    main()
