"""Errors during a compression on a device: one line, and an unchanged sequence."""

import sys

import pytest
from attached import differing
from choosing import whole
from rpcserver import Counting

TOKENS = 2000
SHAPE = {"head_size": 64, "n_heads": 2, "n_heads_kv": 2, "n_layers": 4}
NEAR_TIES = 0.02  # nearly equal scores in half precision: either pair may stay


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bounds the memory of another process")
@pytest.mark.parametrize("method", ["snapkv", *whole("keydiff", "h2o")])  # keydiff: its measures; h2o: smaller buffers
def test_a_device_whose_memory_ends_leaves_the_sequence_as_it_was(native, tiny, worker, own_server, method):
    """Wherever the memory ends: the host compresses and the report has the reason, or the next try works."""
    job = {
        "server": own_server.address,
        "pid": own_server.process.pid,
        "model": str(tiny("llama", **SHAPE).model),
        "tokens": TOKENS,
        "plan": {"method": method, "budget": 0.2},
    }
    whole, *tries = worker("device_failures_worker.py", job)
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
