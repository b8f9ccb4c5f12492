"""Reads prompts into a model, in a separate process because a process can hold only one llama.cpp.

stdin: one JSON object {"sides": [side, ...], "out": path, "jobs": [{"model": path, "cases": [case, ...]}, ...]}. On
side "provider", libkvedge owns the KV memory; on every other side llama.cpp does. Side "exact": f32 keys and values, no
flash attention. KVEDGE_WORKER=ours in the environment chooses kvedge's patched llama.cpp; otherwise the library in
LLAMA_CPP_LIB_PATH runs. A case is {"segments": [...], "then": [tokens], "n_batch": n, "n_ubatch": n}. A segment is
{"tokens": [...]}, or {"image": [height, width, seed]} for random embeddings.
out: an .npz file. Its arrays SIDE.JOB.CASE (numbers from 0) hold logits [1 + len(then), n_vocab]: after the prompt, and
after each token of `then`.
"""

import json
import os
import sys

import numpy as np

if os.environ.get("KVEDGE_WORKER") == "ours":
    import pykvedge  # noqa: F401 - points llama_cpp at kvedge's libraries

import batches
from batches import llama

N_EMBD_SCALE = 0.5


class Reader:
    """One context that reads the segments of a case in order."""

    def __init__(self, model, case, provider, exact):
        n_tokens = sum(len(s.get("tokens", ())) or s["image"][0] * s["image"][1] for s in case["segments"])
        self.n_past, self.n_batch = 0, case.get("n_batch", 2048)
        self.context = batches.open_context(
            model, n_ctx=n_tokens + len(case["then"]) + 8, n_batch=self.n_batch, n_ubatch=case.get("n_ubatch", 512),
            **(batches.EXACT if exact else {}),
        )  # fmt: skip
        self.n_embd = llama.llama_model_n_embd_inp(model)
        self.m_rope = llama.llama_model_rope_type(model) in (llama.LLAMA_ROPE_TYPE_MROPE, llama.LLAMA_ROPE_TYPE_IMROPE)
        self.cache = None
        if provider:
            from pykvedge import plan
            from pykvedge.library import libkvedge

            self.cache = libkvedge.Cache(self.context, plan("full"), auto_compress=False)

    def decode(self, positions, tokens=(), rows=None):
        """positions: one for each token, or four for each row of an image in an M-RoPE model."""
        status = batches.send(self.context, positions, tokens, rows)
        if status != 0:
            if self.cache is not None:
                self.cache.check()
            raise SystemExit(f"llama_decode returned {status}")

    def read_tokens(self, tokens):
        for i in range(0, len(tokens), self.n_batch):
            part = tokens[i : i + self.n_batch]
            self.decode(range(self.n_past, self.n_past + len(part)), part)
            self.n_past += len(part)

    def read_image(self, height, width, seed):
        n = height * width
        rng = np.random.default_rng(seed)
        embeddings = (rng.standard_normal((n, self.n_embd)) * N_EMBD_SCALE).astype(np.float32)
        row, column = np.divmod(np.arange(n), width)
        for i in range(0, n, self.n_batch):
            part = slice(i, min(i + self.n_batch, n))
            if self.m_rope:
                zero = np.zeros(n, dtype=int)[part]
                positions = np.concatenate(
                    [zero + self.n_past, row[part] + self.n_past, column[part] + self.n_past, zero]
                )
            else:
                positions = np.arange(n)[part] + self.n_past
            self.decode(positions, rows=embeddings[part])
        self.n_past += max(height, width) if self.m_rope else n

    def run(self, case):
        for segment in case["segments"]:
            if "image" in segment:
                self.read_image(*segment["image"])
            else:
                self.read_tokens(segment["tokens"])
        if self.cache is not None:
            self.cache.compress()
        out = [batches.logits(self.context)]
        for token in case["then"]:
            self.read_tokens([token])
            out.append(batches.logits(self.context))
        if self.cache is not None:
            self.cache.detach()
        llama.llama_free(self.context)
        return np.stack(out)


def main():
    request = json.load(sys.stdin)
    results = {}
    for number, job in enumerate(request["jobs"]):
        model = batches.open_model(job["model"])
        for side in request["sides"]:
            for i, case in enumerate(job["cases"]):
                results[f"{side}.{number}.{i}"] = Reader(model, case, side == "provider", side == "exact").run(case)
        llama.llama_model_free(model)
    np.savez(request["out"], **results)


if __name__ == "__main__":
    main()
