"""Writes the logits before and after tokens are removed and the later tokens move up.

Arguments: model, out.npy, and a side. "stock": the library in LLAMA_CPP_LIB_PATH, with llama_memory_seq_add. "full":
kvedge_renumber. "graph": as "full", with the rows in ggml's operations, as on a device. "whole": as "full", with a
budget of a tenth and whole rows, and then messages of two tokens.
"""

import sys

import numpy as np

MODEL, OUT, SIDE = sys.argv[1:4]
if SIDE != "stock":
    import pykvedge

import batches  # noqa: E402
from batches import llama  # noqa: E402

N, FROM, TO = 300, 20, 170  # tokens of the prompt; range of the removed tokens


def decode(context, tokens, at):
    batches.decode(context, range(at, at + len(tokens)), tokens)
    return batches.logits(context)


def main():
    context = batches.open_context(batches.open_model(MODEL), n_ctx=1024)
    memory, cache = llama.llama_get_memory(context), None
    if SIDE != "stock":
        from pykvedge.library import libkvedge
        from pykvedge.native.abi import DEVICES_ALL, DEVICES_AUTO

        devices = DEVICES_ALL if SIDE == "graph" else DEVICES_AUTO
        plan = pykvedge.plan("snapkv", 0.1) if SIDE == "whole" else pykvedge.plan("full")
        cache = libkvedge.Cache(context, plan, "f16", devices=devices)
        if (libkvedge.lib().kvedge_layer_device(cache.handle, 0) is not None) != (SIDE == "graph"):
            raise SystemExit("the rows lie elsewhere")
    tokens = np.random.default_rng(0).integers(500, 1000, N + 8)
    if SIDE == "whole":
        cache.keep("ram")
    decode(context, tokens[:N], 0)
    if SIDE == "whole":
        cache.compress()
    llama.llama_memory_seq_rm(memory, 0, FROM, TO)
    out = [decode(context, tokens[N:][:1], N)]
    llama.llama_memory_seq_rm(memory, 0, N, -1)
    at = N - (TO - FROM)
    if cache is None:
        llama.llama_memory_seq_add(memory, 0, TO, -1, FROM - TO)
    elif cache.renumber(N, at) != at:
        raise SystemExit("the next token comes elsewhere")
    step = 2 if SIDE == "whole" else 1
    for i in range(N, len(tokens), step):
        if llama.llama_memory_seq_pos_max(memory, 0) != at - 1:
            raise SystemExit("llama.cpp is elsewhere")
        out.append(decode(context, tokens[i : i + step], at))
        at += step
        if SIDE == "whole":
            cache.compress()
            if max(map(max, cache.lengths())) > 40 or cache.stats().whole_bytes == 0:
                raise SystemExit("nothing was compressed, or no whole rows are there")
    np.save(OUT, np.array(out))


if __name__ == "__main__":
    main()
