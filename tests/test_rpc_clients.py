"""Clients of an RPC server: several users of a device in one process, and programs that find it busy or too small.

KVEDGE_RPC_OPERATIONS: number of operations in each case of the first test, for example 1000.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from choosing import whole
from forking import Warm
from rpcserver import Server

from pykvedge.errors import DeviceError
from pykvedge.models import offload

WORKER = Path(__file__).with_name("crowd_worker.py")
OPERATIONS = int(os.environ.get("KVEDGE_RPC_OPERATIONS", "40"))
MIB = 1 << 20
TOO_LATE = """
from pykvedge.models import offload
offload._reach = lambda endpoint: None  # it was free
offload.CONNECT_S = 0.5
offload.Offload(rpc="{}").devices()
"""


@pytest.fixture(scope="module")
def server(environment):
    running = Server(environment)
    yield running
    running.close()


def crowd(case, rpc, tiny, kvedge):
    done = kvedge(case, OPERATIONS, rpc, tiny("llama").model, script=WORKER, timeout=3600)
    assert done.code == 0, done


@pytest.mark.parametrize("case", ["two_threads", "two_sequences", *whole("two_sessions")])
def test_memory_of_a_device_is_given_back_while_another_answers(native, tiny, kvedge, server, case):
    crowd(case, server.address, tiny, kvedge)


def test_memory_of_one_of_two_servers(native, tiny, kvedge, own_server, server):
    """Each server has half of the layers."""
    crowd("two_sessions", f"{server.address},{own_server.address}", tiny, kvedge)


def test_a_server_that_serves_another_program(native, kvedge, tiny, environment, server, monkeypatch):
    """A busy server refuses waiting programs in time, and serves the next program when the first has ended."""
    monkeypatch.setattr(offload, "CONNECT_S", 0.5)
    files = tiny("llama").arguments()
    command = [sys.executable, "-m", "pykvedge", "chat", *files, "--ctx", "16000", "--rpc", server.address]
    talking = Warm(
        [*command, "--max-tokens", "15000", "hello"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert talking.stdout.read(1)
    for _ in range(4):
        with pytest.raises(DeviceError, match="serves one program at a time"):
            offload.Offload(rpc=server.address).devices()
    late = kvedge(program=["-c", TOO_LATE.format(server.address)], timeout=60)
    assert late.code == 1 and "serves one program at a time" in late.err, late
    assert talking.stdout.read(1) and talking.poll() is None
    talking.kill()
    talking.communicate()
    assert kvedge("chat", *files, "--rpc", server.address, "--max-tokens", 3, "hello").code == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bounds the memory of another process")
@pytest.mark.parametrize(
    ("room", "words"),
    [
        (10 * MIB, ["too little memory for 22844416 bytes more", "RPC0", "--gpu-layers"]),
        (30 * MIB, ["closed the connection", "lacks memory"]),  # too little for a second copy of the largest weight
    ],
)
def test_a_server_without_the_memory_for_the_weights(native, kvedge, tiny, own_server, room, words):
    process = psutil.Process(own_server.process.pid)
    most = process.memory_info().vms + room
    process.rlimit(psutil.RLIMIT_AS, (most, most))
    files = tiny("llama", n_vocab=40000).arguments()
    kvedge("chat", *files, "--ctx", 500, "--rpc", own_server.address, "hello", timeout=60).failed(1, *words)
    assert own_server.process.poll() is None
