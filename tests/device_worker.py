"""Conversations on devices, in a process of its own: the devices of an RPC server stay until the process ends.

stdin: one JSON object with "settings" of sessions and "cases": a model, an mmproj, a plan, a profile and the messages.
stdout: a line of JSON for each case: what each head holds after every message, the answers, and where the rows lay.
"""

from __future__ import annotations

import json
import sys

from attached import held

import pykvedge
from pykvedge.plans.plan import Plan


def talk(case, settings):
    plan = Plan.from_json(case["plan"])
    given = {"threads": 1, "kv_type": "f32", "n_ctx": 2048, "profile": case["profile"], **settings}
    out = {"held": [], "answers": [], "device_bytes": []}
    with pykvedge.Session(case["model"], case["mmproj"], plan, **given) as session:
        for text, images in case["messages"]:
            out["answers"].append(session.ask(text, images, pykvedge.Sampling(max_tokens=12)).read())
            out["held"].append(held(session.engine.cache))
            out["device_bytes"].append(session.engine.cache.stats().device_bytes)
    return out


job = json.load(sys.stdin)
for case in job["cases"]:
    print(json.dumps(talk(case, job["settings"])), flush=True)
