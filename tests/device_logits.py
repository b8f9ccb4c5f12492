"""llama.cpp alone and with kvedge on the same devices: how far their logits are apart, and how they split their graphs.

stdin: one JSON object with a "model", "plans", a "kv_type", f32 or f16, and what backends.prepare takes. All layers lie
on the devices that there are; where there are none, on the processor, through ggml's graph.
stdout: a line of JSON for each plan: "kl", the largest divergence of kvedge from llama.cpp after a prompt or a token,
"splits" of the graphs that ran, {"stock": {"prompt": [...], "token": [...]}, "kvedge": ...}, and "device_bytes".
"""

from __future__ import annotations

import json
import os
import sys

os.environ["GGML_SCHED_DEBUG"] = "1"  # the scheduler says how it splits; read when a context is made

import backends
import numpy as np
from contexts import TinyContext

from pykvedge.lab.eval.metrics import divergence, log_softmax
from pykvedge.native.abi import DEVICES_ALL
from pykvedge.plans.plan import Plan
from pykvedge.runtime import libkvedge

PROMPT, ANSWER = 300, 20
MARK = "## SPLIT #"


class OnDevices(TinyContext):
    def __init__(self, model, plan, kv_type):
        self.kv_type = kv_type
        super().__init__(model, None)
        if plan is not None:
            self.cache = libkvedge.Cache(self.context, plan, kv_type, devices=DEVICES_ALL)
        self.splits = []
        self._log = self.llama.llama_log_callback(self._heard)
        self.llama.llama_log_set(self._log, None)

    def _watch_stock(self, params):
        """Weights are not looked at: they lie elsewhere."""

    def _adjust(self, params):
        if self.kv_type == "f16":  # llama.cpp's default
            params.flash_attn_type = self.llama.LLAMA_FLASH_ATTN_TYPE_AUTO
            params.type_k = params.type_v = self.llama.GGML_TYPE_F16

    def _heard(self, _level, text, _data):
        line = text.decode("utf-8", "replace")
        if MARK in line:
            number = int(line.partition(MARK)[2].partition(":")[0])
            self.splits[number:] = [number]

    def n_vocab(self):
        return self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.model))

    def read(self, tokens):
        """(log probabilities of the next token, into how many parts the graph was split; 0: used again)."""
        self.splits = []
        self.decode(tokens)
        row = self.llama.llama_get_logits_ith(self.context, -1)
        return log_softmax(np.ctypeslib.as_array(row, (self.n_vocab(),))), len(self.splits)


def run(model, plan, kv_type):
    context = OnDevices(model, plan, kv_type)
    splits = {"prompt": set(), "token": set()}
    rows = []
    drawn = np.random.default_rng(0).integers(5, context.n_vocab(), PROMPT + ANSWER).tolist()
    for step in (drawn[:PROMPT], *([token] for token in drawn[PROMPT:])):
        logits, n = context.read(step)
        rows.append(logits)
        if n:
            splits["token" if len(step) == 1 else "prompt"].add(n)
    held = context.cache.stats().device_bytes if context.cache else 0
    context.close()
    return rows, {name: sorted(found) for name, found in splits.items()}, held


def main():
    job = json.load(sys.stdin)
    backends.prepare(job)
    stock, stock_splits, _ = run(job["model"], None, job["kv_type"])
    for text in job["plans"]:
        ours, splits, held = run(job["model"], Plan.from_json(text), job["kv_type"])
        kl = max(divergence(p, q) for p, q in zip(stock, ours, strict=True))
        line = {"kl": kl, "splits": {"stock": stock_splits, "kvedge": splits}, "device_bytes": held}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
