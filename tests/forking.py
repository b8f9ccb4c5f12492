"""A program that has imported kvedge and waits: each request becomes a process of its own, without the imports' time.

As a script: reads requests from the socket whose number is its argument, until that is closed. A request is a JSON
object with "arguments" and "cwd", sent with the files that become stdin, stdout and stderr. Answered by the process's
id, and then by its exit code, a line each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

LARGEST = 1 << 20  # bytes of a request


class Programs:
    """Starts `kvedge` with other arguments again and again."""

    def __init__(self, environment) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._waiting = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])

    def run(self, arguments, stdin: bytes, timeout: float) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr. Raises subprocess.TimeoutExpired."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            request = json.dumps({"arguments": list(map(str, arguments)), "cwd": str(Path.cwd())})
            socket.send_fds(self._ours, [request.encode()], [given.fileno(), out.fileno(), err.fileno()])
            pid = int(self._ours.recv(100))
            self._ours.settimeout(timeout)
            try:
                code = int(self._ours.recv(100))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._ours.settimeout(None)
                self._ours.recv(100)
                raise subprocess.TimeoutExpired(["kvedge", *arguments], timeout) from None
            finally:
                self._ours.settimeout(None)
            out.seek(0), err.seek(0)
            return code, out.read(), err.read()

    def close(self) -> None:
        self._ours.close()
        self._waiting.wait()


def serve(requests: socket.socket) -> None:
    """Forks for each request; returns in the child, with its arguments in sys.argv, and at the end of requests."""
    while True:
        data, files, *_ = socket.recv_fds(requests, LARGEST, 3)
        if not data:
            sys.exit()
        request = json.loads(data)
        pid = os.fork()
        if not pid:
            requests.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            os.chdir(request["cwd"])
            sys.argv = ["kvedge", *request["arguments"]]
            return
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def main() -> None:
    sys.path.remove(str(Path(__file__).parent))
    import pykvedge.chat.session
    import pykvedge.cli.program
    from pykvedge.library import libkvedge
    from pykvedge.native import libraries

    libkvedge.lib(), libraries.llama()
    serve(socket.socket(fileno=int(sys.argv[1])))
    pykvedge.cli.program.main()


if __name__ == "__main__":
    main()
