"""What goes wrong while rows are compressed on a device: one line, and a sequence as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from attached import differing
from rpcserver import Counting, Server

TOKENS = 3000
SHAPE = {"head_size": 64, "n_heads": 2, "n_heads_kv": 2, "n_layers": 4}
NEAR_TIES = 0.02  # of pairs that score alike in half precision either may stay


@pytest.fixture
def server(environment):
    running = Server(environment)
    yield running
    running.stop()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bounds the memory of another process")
@pytest.mark.parametrize("method", ["snapkv", "keydiff", "h2o"])  # its measures, or its smaller buffers
def test_a_device_whose_memory_ends_leaves_the_sequence_as_it_was(native, tiny, environment, server, method):
    """In whatever step it ends: the host compresses and the report says why, or the next try, with memory, does."""
    job = {
        "server": server.address,
        "pid": server.process.pid,
        "model": str(tiny("llama", **SHAPE).model),
        "tokens": TOKENS,
        "plan": {"method": method, "budget": 0.2},
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("device_failures_worker.py")],
        input=json.dumps(job), capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    whole, *tries = [json.loads(line) for line in done.stdout.splitlines()]
    assert whole["report"]["compressed"] and not whole["error"]
    short = [found for found in tries if found["error"] or not found["report"]["compressed"]]
    print(f"{method}: {len(short)} of {len(tries)} tries had too little memory")
    assert len(short) > 2 and tries[-1] not in short
    for found in tries:
        said = found["error"] or found["report"]["problem"]
        assert (found in short) == bool(said) and (not said or ("RPC0" in said and "memory" in said)), found
        assert not found["error"] or (found["pending"], found["kept"]) == (TOKENS, [[TOKENS] * 2] * 4)
        assert differing(found["after"], whole["after"]) <= NEAR_TIES and found["device_bytes"] > 0


@pytest.mark.parametrize("method", ["snapkv", "kvedge"])
def test_a_server_that_hangs_up_meanwhile_is_one_line(native, tiny, environment, server, method):
    """After several shares of what it sends for a compression."""

    def chat(wire, name):
        command = [sys.executable, "-m", "pykvedge", "chat", *tiny("llama", **SHAPE).arguments(), "--rpc", wire.address,
                   "--method", name, "--max-tokens", "1", "--json", "word " * 500]  # fmt: skip
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    sent = []
    for name in ("full", method):
        wire = Counting(server.address)
        done = chat(wire, name)
        assert done.returncode == 0, done.stderr
        sent.append(wire.settled()[1])
    for share in (0.1, 0.9):
        most = round(sent[0] + share * (sent[1] - sent[0]))
        done = chat(Counting(server.address, most), method)
        assert done.returncode == 1 and done.stdout == ""
        assert [line for line in done.stderr.splitlines() if "error" in line] == done.stderr.splitlines()[-1:]
        assert "llama.cpp had to stop" in done.stderr
    assert chat(Counting(server.address), method).returncode == 0  # the server goes on
