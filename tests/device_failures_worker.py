"""A prompt is compressed on an RPC server that has more and more memory for it, until it has enough.

stdin: one JSON object: the "server", its "pid", a "model", "tokens" of the prompt, and a "plan" (arguments of
pykvedge.plan).
stdout: a line of JSON for a server without bounds and for each try: the "error", or null; what is "pending" and "kept"
behind it; "after": token indices that are kept in the end, and the "report" of that compression.
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
# beyond what the server has after the prompt; llama.cpp's working memory is given back before the compression
ROOMS = [n * MIB for n in (-64, -32, -24, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64, 128, 512)]
UNBOUNDED = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)


def tried(model, server, plan, n_tokens, room):
    """room: bytes that the server may take for the compression, or None."""
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
