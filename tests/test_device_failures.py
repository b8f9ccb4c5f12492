"""Errors during a compression on a device: one line, and an unchanged sequence."""

import json
import sys
from pathlib import Path

import pytest
from attached import differing
from choosing import whole
from rpcserver import Counting, Server

TOKENS = 2000
SHAPE = {"head_size": 64, "n_heads": 2, "n_heads_kv": 2, "n_layers": 4}
NEAR_TIES = 0.02  # nearly equal scores in half precision: either pair may stay


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bounds the memory of another process")
@pytest.mark.parametrize("method", ["snapkv", *whole("keydiff", "h2o")])  # keydiff: its measures; h2o: smaller buffers
def test_a_device_whose_memory_ends_leaves_the_sequence_as_it_was(native, tiny, kvedge, environment, closing, method):
    """Wherever the memory ends: the host compresses and the report has the reason, or the next try works."""
    job = {"model": str(tiny("llama", **SHAPE).model), "tokens": TOKENS, "plan": {"method": method, "budget": 0.2}}
    for _ in range(5):  # llama.cpp's server ends if its memory ends during a message: try another server
        server = closing(Server(environment))
        asked = json.dumps({**job, "server": server.address, "pid": server.process.pid})
        done = kvedge(script=Path(__file__).with_name("device_failures_worker.py"), stdin=asked, timeout=600)
        if "RPC server crashed" not in done.err:
            break
    assert done.code == 0, (done.code, done.out[-200:], done.err[-2000:])
    whole, *tries = [json.loads(line) for line in done.out.splitlines()]
    assert whole["report"]["compressed"] and not whole["error"]
    short = [found for found in tries if found["error"] or not found["report"]["compressed"]]
    print(f"{method}: {len(short)} of {len(tries)} tries had too little memory")
    assert len(short) > 2 and tries[-1] not in short
    for found in tries:
        said = found["error"] or found["report"]["problem"]
        assert (found in short) == bool(said) and (not said or ("RPC0" in said and "memory" in said)), found
        assert not found["error"] or (found["pending"], found["kept"]) == (TOKENS, [[TOKENS] * 2] * 4)
        assert differing(found["after"], whole["after"]) <= NEAR_TIES and found["device_bytes"] > 0


@pytest.mark.parametrize("method", ["kvedge", *whole("snapkv")])
def test_a_server_that_hangs_up_meanwhile_is_one_line(native, tiny, kvedge, own_server, method):
    """The server hangs up after different shares of the bytes that it sends for a compression."""

    def chat(wire, name):
        options = ["--rpc", wire.address, "--method", name, "--max-tokens", "1", "--json"]
        return kvedge("chat", *tiny("llama", **SHAPE).arguments(), *options, "word " * 500)

    sent = []
    for name in ("full", method):
        wire = Counting(own_server.address)
        done = chat(wire, name)
        assert done.code == 0, done
        sent.append(wire.settled()[1])
    for share in (0.1, 0.9):
        most = round(sent[0] + share * (sent[1] - sent[0]))
        done = chat(Counting(own_server.address, most), method)
        assert done.code == 1 and done.out == ""
        assert [line for line in done.err.splitlines() if "error" in line] == done.err.splitlines()[-1:]
        assert "llama.cpp had to stop" in done.err
    assert chat(Counting(own_server.address), method).code == 0  # the server is still usable
