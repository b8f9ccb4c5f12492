"""Compresses a prompt on an RPC server whose memory limit grows from try to try until the compression succeeds.

stdin: one JSON object: the "server", its "pid", a "model", the number of "tokens" of the prompt, and a "plan"
(arguments of pykvedge.plan).
stdout: one JSON line for a server without a limit, then one for each try: "error" (or null); "pending" and "kept" after
an error; "after": the token indices that are kept in the end; "report": the compression's report.
"""

import json
import sys

import psutil
from attached import held

import pykvedge
from pykvedge.models.model import Model
from pykvedge.models.offload import Offload
from pykvedge.models.vision import TextPiece
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import ContextSize
from pykvedge.runtime.sequence import Sequence, device_work

MIB = 1 << 20
# bytes that the server may take beyond its size after the prompt; llama.cpp's working memory is freed before
ROOMS = [n * MIB for n in (-64, -32, -24, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64, 128, 512)]
UNBOUNDED = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)


def tried(model, server, plan, n_tokens, room):
    """Compresses on a server that may take `room` more bytes (None: no limit). Returns one line of output."""
    driver = Driver(model, None, ContextSize(n_tokens + 520, 512, "f16", n_tokens), 1)
    out = {"room": room, "error": None, "pending": 0, "kept": []}
    try:
        driver.take_over(plan)
        sequence = Sequence(driver)
        sequence.read([TextPiece([5 + i * i % 90 for i in range(n_tokens)])])
        driver.context.logits()
        if room is not None:
            most = server.memory_info().vms + room
            server.rlimit(psutil.RLIMIT_AS, (most, UNBOUNDED[1]))
        try:
            sequence.compress()
        except pykvedge.KvedgeError as error:
            out["error"] = f"{type(error).__name__}: {error}"
        server.rlimit(psutil.RLIMIT_AS, UNBOUNDED)
        if out["error"]:
            out["pending"], out["kept"] = driver.cache.stats().n_pending, driver.cache.lengths()
            sequence.compress()
        out["after"], out["report"] = held(driver.cache), vars(device_work(driver.cache))
        for token in range(5, 13):
            sequence.extend(token)
        return {**out, "device_bytes": driver.cache.stats().device_bytes}
    finally:
        driver.close()


job = json.load(sys.stdin)
model = Model(job["model"], Offload(-1, rpc=job["server"]))
server, plan = psutil.Process(job["pid"]), pykvedge.plan(**job["plan"])
for room in (None, *ROOMS):
    found = tried(model, server, plan, job["tokens"], room)
    print(json.dumps(found), flush=True)
    if room is not None and not found["error"] and found["report"]["compressed"]:
        break
model.close()
