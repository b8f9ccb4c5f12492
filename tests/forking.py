"""A program that has imported kvedge and forks for each request, so that a process starts without the imports' time.

As a script: reads requests from the socket whose number is its first argument, until the socket is closed. A request is
a JSON object with "script", "arguments", "env" and "cwd", sent with the files that become stdin, stdout and stderr.
script: a file, or -c for code that is the first argument. The answer has two messages: the process id, and the exit
code. With "away" the new process is an orphan: a requester that collects orphans becomes its parent, and the exit code
0 is sent at once. With "terminal" the process leads a session at the terminal that is its stdin. A process ends without
Python's cleanup, because that would write to every shared memory page. Further arguments: modules to import.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path

with suppress(ImportError):  # not on Windows
    import fcntl
    import termios

LARGEST = 1 << 20  # bytes of a request
AT_START = ("PYTHON", "KVEDGE_LIB_DIR", "LLAMA_CPP", "LD_")  # prefixes of variables that are read at the start
WANTS_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


class Programs:
    """Runs `kvedge` or scripts of the tests, by forks of one waiting process."""

    def __init__(self, environment, *modules: str) -> None:
        self.environment = environment
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *modules]
            # stdout must be a pipe: Python caches that it cannot seek, and a fork has another stdout
            options = {"pass_fds": [theirs.fileno()], "stdout": subprocess.PIPE}
            self._waiting = subprocess.Popen(command, env=environment, **options)

    def run(self, arguments, stdin: bytes, timeout: float, script: str, env) -> tuple[int, bytes, bytes]:
        """Returns (exit code, stdout, stderr). Raises subprocess.TimeoutExpired. env: changes of the environment."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            pid = self._ask(arguments, [given.fileno(), out.fileno(), err.fileno()], script=script, env=env)
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

    def _ask(self, arguments, files: list[int], **more) -> int:
        asked = {"script": "", "arguments": list(map(str, arguments)), "cwd": str(Path.cwd()), **more}
        socket.send_fds(self._ours, [json.dumps(asked).encode()], files)
        return int(self._ours.recv(100))

    def child(self, arguments, files: list[int], env, **more) -> int:
        """Starts `kvedge` as a child of this process and returns the process id. Linux only."""
        prctl = ctypes.CDLL(None).prctl
        prctl(WANTS_ORPHANS, 1, 0, 0, 0)
        pid = self._ask(arguments, files, env=env, away=True, **more)
        self._ours.recv(100)
        prctl(WANTS_ORPHANS, 0, 0, 0, 0)
        return pid

    def close(self) -> None:
        self._ours.close()
        self._waiting.communicate()


_shared: list[Programs] = []  # of Warm and at_terminal


def forked(env, arguments, files: list[int], **more) -> int:
    """Starts `kvedge` by a fork of a process that has imported the modules of servers and terminals.

    Returns the process id; 0 if variables differ that Python or the loader reads at its start: a new process is needed.
    """
    if not _shared and sys.platform.startswith("linux"):
        _shared.append(Programs(dict(env), "pykvedge.serve.server", "prompt_toolkit"))
        atexit.register(_shared[0].close)
    known = _shared[0].environment if _shared else {}
    other = {name: env.get(name) for name in known.keys() | env.keys() if known.get(name) != env.get(name)}
    if not known or any(name.startswith(AT_START) for name in other):
        return 0
    return _shared[0].child(arguments, files, other, **more)


def lead() -> None:
    """Makes this process the leader of a session at the terminal that is its stdin."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def at_terminal(arguments, env, rows: int, columns: int) -> tuple[int, int]:
    """Starts `kvedge` at a new terminal of this size. Returns (process id, our end of the terminal)."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    pid = forked(env, arguments, [theirs] * 3, terminal=True)
    if not pid and not (pid := os.fork()):
        for number in range(3):
            os.dup2(theirs, number)
        lead()
        os.execve(sys.executable, [sys.executable, "-m", "pykvedge", *map(str, arguments)], env)
    os.close(theirs)
    return pid, ours


class Warm(subprocess.Popen):
    """Popen of Python with "-m pykvedge", a script or "-c" and code, that forks if it can: see `forked`."""

    def _execute_child(self, *given):
        args, env = given[0], given[6]
        pipes = given[10:16]  # (read, write) ends of the pipes for stdin, stdout, stderr; -1: the child inherits ours
        files = [max(pipe, number) for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        script = "" if args[1] == "-m" else str(args[1])
        self.pid = forked(env, args[2:] if script else args[3:], files, script=script)
        if not self.pid:
            super()._execute_child(*given)
            return
        self._child_created = True
        self._close_pipe_fds(*pipes)


def serve(requests: socket.socket) -> str:
    """Forks for each request. Returns the script in the child, with its arguments in sys.argv. Exits after the last."""
    while True:
        data, files, *_ = socket.recv_fds(requests, LARGEST, 3)
        if not data:
            sys.exit()
        request = json.loads(data)
        pid, away = os.fork(), request.get("away")
        if not pid and away and (other := os.fork()):
            requests.send(str(other).encode())
            os._exit(0)
        if not pid:
            requests.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            if request.get("terminal"):
                lead()
            if os.isatty(1):
                sys.stdout.reconfigure(line_buffering=True)  # as at the start of Python
            os.chdir(request["cwd"])
            for name, value in request["env"].items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            sys.argv = [request["script"] or "kvedge", *request["arguments"]]
            return request["script"]
        for file in files:
            os.close(file)
        if not away:
            requests.send(str(pid).encode())
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def finished(script: str) -> int:
    """Runs the script, or kvedge without a script, to its end. Returns the exit code."""
    from pykvedge.__main__ import main

    code = None
    if script == "-c":
        main = functools.partial(exec, sys.argv.pop(1), {"__name__": "__main__"})
    elif script:
        sys.path.insert(0, str(Path(script).parent))
        main = functools.partial(runpy.run_path, script, run_name="__main__")
    try:
        main()
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

    for name in sys.argv[2:]:
        importlib.import_module(name)
    libkvedge.lib(), libraries.llama(), [*cli.commands.values()], [members(stage) for stage in STAGES]
    gc.collect()
    gc.freeze()
    script = serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(finished(script))


if __name__ == "__main__":
    main()
