"""An RPC server on loopback (a device in another process), and a counter of the bytes that it exchanges."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
from forking import Warm


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A process that runs `kvedge rpc-server`."""

    def __init__(self, environment) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "pykvedge", "rpc-server", "--port", self.address.rpartition(":")[2]]
        self.process = Warm([*command, "--threads", "1"], env=environment, stderr=subprocess.DEVNULL)
        for _ in range(600):  # 60 seconds, for a busy machine
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(command[-1]))) == 0:
                    return
            time.sleep(0.1)
        self.close()
        pytest.fail("the RPC server does not answer")

    def memory(self) -> int:
        return psutil.Process(self.process.pid).memory_full_info().uss

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Counting:
    """A proxy between a client and a server. Counts the bytes sent to the server and received from the server.

    most: hangs up on both when the server has sent more bytes.
    """

    def __init__(self, address: str, most: int | None = None) -> None:
        self._most = most
        self.target = address.partition(":")[0], int(address.partition(":")[2])
        self.sent = self.received = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def bytes(self) -> int:
        return self.sent + self.received

    def settled(self) -> tuple[int, int]:
        """Returns (sent, received) when the counts stand still: a client does not wait for the end of its sending."""
        known = None
        while known != (known := (self.sent, self.received)):
            time.sleep(0.05)
        return known

    def _listen(self) -> None:
        while True:
            here = self._socket.accept()[0]
            there = socket.create_connection(self.target)
            for end in (here, there):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # ggml's sockets set this option too
            for pair in ((here, there, "sent"), (there, here, "received")):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, count: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, count, getattr(self, count) + len(data))
                if self._most is not None and self.received > self._most:
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the other thread
