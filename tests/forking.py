"""A program that has imported kvedge and waits: each request becomes a process of its own, without the imports' time.

As a script: reads requests from the socket whose number is its argument, until that is closed. A request is a JSON
object with "script", "arguments", "env" and "cwd", sent with the files that become stdin, stdout and stderr. The answer
is the id of the process, and then its exit code, a line each. A process ends without Python's own clearing up, which
would touch every page that it shares with this program.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

LARGEST = 1 << 20  # bytes of a request


class Programs:
    """Starts `kvedge`, or scripts of the tests, with other arguments again and again."""

    def __init__(self, environment) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._waiting = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])

    def run(self, arguments, stdin: bytes, timeout: float, script: str, env) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr. Raises subprocess.TimeoutExpired. env: what is other in the environment."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            asked = {"script": script, "arguments": list(map(str, arguments)), "env": env, "cwd": str(Path.cwd())}
            socket.send_fds(self._ours, [json.dumps(asked).encode()], [given.fileno(), out.fileno(), err.fileno()])
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


def serve(requests: socket.socket) -> str:
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
            os.environ.update(request["env"])
            sys.argv = [request["script"] or "kvedge", *request["arguments"]]
            return request["script"]
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def finished(script: str) -> int:
    """Runs the script, or kvedge, to its end, and returns its exit code."""
    from pykvedge.__main__ import main

    code = None
    if script:
        sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__") if script else main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else code is not None


def main() -> None:
    sys.path.remove(str(Path(__file__).parent))
    from pykvedge.cli.program import cli
    from pykvedge.library import libkvedge
    from pykvedge.native import libraries
    from pykvedge.plans.registry import STAGES, members

    libkvedge.lib(), libraries.llama(), [*cli.commands.values()], [members(stage) for stage in STAGES]
    gc.collect()
    gc.freeze()
    script = serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(finished(script))


if __name__ == "__main__":
    main()
