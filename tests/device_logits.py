"""Compares llama.cpp with and without kvedge on the same devices: distance of the logits, splits of the graphs.

stdin: one JSON object with a "model", "plans", a "kv_type" and the keys of backends.prepare. All layers are on the
devices; without a device, ggml's graph runs on the CPU. "prompt": number of prompt tokens. "later": numbers of tokens
of later messages; they are not compressed, and one answer token follows each. "alone": run only kvedge, compare
nothing.
stdout: a JSON line for each plan: "kl", the largest divergence from llama.cpp after a prompt or a token; "from_host",
the same from kvedge with rows on the host, with "later"; "splits", {"stock": {"prompt": [...], "token": [...]},
"kvedge": ...}; "device_bytes" at the end, and "later" after each message.
"""

import json
import os
import sys

os.environ["GGML_SCHED_DEBUG"] = "1"  # makes the scheduler log its splits; read when a context is made

import backends
import numpy as np
from contexts import TinyContext

from kvedge_lab.eval.metrics import divergence, log_softmax
from pykvedge.library import libkvedge
from pykvedge.native.abi import DEVICES_ALL, DEVICES_NONE
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType

ANSWER = 20
MARK = "## SPLIT #"


class OnDevices(TinyContext):
    def __init__(self, model, plan, kv_type, devices):
        self.kv_type = kv_type
        super().__init__(model, None)
        if plan is not None:
            self.cache = libkvedge.Cache(self.context, plan, KvType.parse(kv_type, "off"), devices=devices)
        self.splits = []
        self._log = self.llama.llama_log_callback(self._heard)
        self.llama.llama_log_set(self._log, None)

    def _watch_stock(self, params):
        """Does nothing: the weights are on a device, where this process cannot read them."""

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
        """Returns (log probabilities of the next token, number of graph splits). 0 splits: a graph was reused."""
        self.splits = []
        self.decode(tokens)
        return log_softmax(self.logits()), len(self.splits)


def run(job, plan, devices=DEVICES_ALL):
    context = OnDevices(job["model"], plan, job["kv_type"], devices)
    splits = {"prompt": set(), "token": set()}
    rows, away = [], []

    def read(tokens):
        logits, n = context.read(tokens)
        rows.append(logits)
        if n:
            splits["token" if len(tokens) == 1 else "prompt"].add(n)

    def held():
        return context.cache.stats().device_bytes if context.cache else 0

    rng = np.random.default_rng(0)
    read(rng.integers(5, context.n_vocab(), job["prompt"]).tolist())
    for token in rng.integers(5, context.n_vocab(), ANSWER).tolist():
        read([token])
    if context.cache:
        context.cache.set_auto_compress(False)
    for n_tokens in job.get("later", ()):
        read(rng.integers(5, context.n_vocab(), n_tokens).tolist())
        away.append(held())
        read([5])
    at_last = held()
    context.close()
    return rows, {"splits": {name: sorted(found) for name, found in splits.items()}, "held": at_last, "later": away}


def apart(a, b):
    return max(divergence(p, q) for p, q in zip(a, b, strict=True))


def main():
    job = json.load(sys.stdin)
    backends.prepare(job)
    alone = job.get("alone")
    stock, known = ([], None) if alone else run(job, None)
    for text in job["plans"]:
        plan = Plan.from_json(text)
        ours, found = run(job, plan)
        if alone:
            print(json.dumps(found))
            continue
        host = run(job, plan, DEVICES_NONE)[0] if "later" in job else ours
        line = {
            "kl": apart(stock, ours),
            "from_host": apart(host, ours),
            "splits": {"stock": known["splits"], "kvedge": found["splits"]},
            "device_bytes": found["held"],
            "later": found["later"],
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
