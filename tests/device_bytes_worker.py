"""Counts the bytes between this process and an RPC server: reading a prompt, compression, the next token.

stdin: one JSON object: the "server", a "model", the number of "tokens" of the prompt, "plans" (arguments of
pykvedge.plan), and "plugin" (a file to load, or null).
stdout: one JSON line for each plan: bytes [sent, received] of each step, and kvedge's report of the compression.
"""

import json
import sys
from pathlib import Path

from rpcserver import Counting

import pykvedge
from pykvedge.models.model import Model
from pykvedge.models.offload import Offload
from pykvedge.models.vision import TextPiece
from pykvedge.plans.plugin_files import load_file
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import ContextSize
from pykvedge.runtime.sequence import Sequence, device_work


def measure(model, wire, plan, n_tokens):
    # one pass for the whole prompt: a ubatch of n_tokens
    size = ContextSize(-(-(n_tokens + 8) // 256) * 256, n_tokens, "f16", n_tokens)
    driver = Driver(model, None, size, 1)
    try:
        driver.take_over(plan)
        sequence = Sequence(driver)
        steps = {
            "read": lambda: sequence.read([TextPiece([5 + i % 90 for i in range(n_tokens)])]),
            "compress": sequence.compress,
            "token": lambda: sequence.extend(7),
        }
        out, before = {}, wire.settled()
        for name, step in steps.items():
            if name == "compress":
                out["rows"] = driver.cache.rows_on_devices(driver.cache.stats().n_pending)
            step()
            driver.context.logits()
            now = wire.settled()
            out[name] = [now[0] - before[0], now[1] - before[1]]
            before = now
            if name == "compress":
                work = device_work(driver.cache)
                out["report"] = vars(work) if work else None
        return {**out, "device_bytes": driver.cache.stats().device_bytes}
    finally:
        driver.close()


job = json.load(sys.stdin)
if job["plugin"]:
    load_file(Path(job["plugin"]))
wire = Counting(job["server"])
model = Model(job["model"], Offload(-1, rpc=wire.address))
for plan in job["plans"]:
    print(json.dumps(measure(model, wire, pykvedge.plan(**plan), job["tokens"])), flush=True)
model.close()
