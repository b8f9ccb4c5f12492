"""Runs conversations on devices, in a separate process: devices of an RPC server stay until the process ends.

stdin: one JSON object with "settings" of sessions and "cases": a model, an mmproj, a plan, a profile and the messages.
"module": a backend that ggml loads first.
stdout: a JSON line for each case: the tokens of each head after every message, the answers, the devices of the rows.
"""

import functools
import json
import sys

import backends
from attached import held

import pykvedge
from pykvedge.native.calls import lib
from pykvedge.plans.plan import Plan
from pykvedge.runtime import loaded


def talk(case, settings):
    plan = Plan.from_json(case["plan"])
    given = {"threads": 1, "kv_type": "f32", "n_ctx": 2048, "profile": case["profile"], **settings}
    out = {"held": [], "answers": [], "device_bytes": [], "devices": []}
    with pykvedge.Session(case["model"], case["mmproj"], plan, **given) as session:
        for text, images in case["messages"]:
            out["answers"].append(session.ask(text, images, pykvedge.Sampling(max_tokens=12)).read())
            out["held"].append(held(session.engine.cache))
            out["device_bytes"].append(session.engine.cache.stats().device_bytes)
        cache = session.engine.cache
        names = {lib().kvedge_layer_device(cache.handle, i) for i in range(len(cache.lengths()))}
        out["devices"] = sorted(name.decode() if name else "host" for name in names)
    return out


# an encoder on a server does not pack its weights; packed weights round differently
loaded.Encoder = functools.partial(loaded.Encoder, packed=False)
job = json.load(sys.stdin)
backends.prepare(job)
for case in job["cases"]:
    print(json.dumps(talk(case, job["settings"])), flush=True)
