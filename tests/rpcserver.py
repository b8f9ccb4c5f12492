"""An RPC server on loopback: a device whose memory is not ours."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import psutil
import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """kvedge rpc-server, a process of its own."""

    def __init__(self, environment) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "pykvedge", "rpc-server", "--port", self.address.rpartition(":")[2]]
        self.process = subprocess.Popen([*command, "--threads", "1"], env=environment, stderr=subprocess.DEVNULL)
        for _ in range(600):  # 60 seconds on a machine that is busy
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(command[-1]))) == 0:
                    return
            time.sleep(0.1)
        self.stop()
        pytest.fail("the RPC server does not answer")

    def memory(self) -> int:
        return psutil.Process(self.process.pid).memory_full_info().uss

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
