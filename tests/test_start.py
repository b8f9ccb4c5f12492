"""The first half second of the program: Ctrl-C ends it quietly, during any import."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

# presses Ctrl-C at the beginning of the n-th import
PRESSING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background have it ignored
from pykvedge.__main__ import main
class Presses:
    left = int(sys.argv.pop(1))
    def find_spec(self, name, path=None, target=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presses())
main()
"""
FREE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pykvedge.__main__ import main
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, float(sys.argv.pop(1)))
main()
"""


def pressed(code, moment, *arguments):
    command = [sys.executable, "-c", code, str(moment), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr.strip()


@pytest.mark.parametrize("moment", [1, 2, 30, 100])
def test_while_a_module_is_imported(moment):
    assert pressed(PRESSING, moment, "chat", "--help") == (130, "", "")


@pytest.mark.parametrize("moment", [0.001, 0.05, 0.1, 0.2, 0.4])
def test_at_any_moment(tiny, moment):
    said = pressed(FREE, moment, "chat", *tiny("llama").arguments(), "--max-tokens", 3000, "--quiet", "Hello")
    assert (said[0], said[2]) == (130, "")


def test_python_dash_m(tiny):
    """Before kvedge's code runs, Python handles Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "pykvedge", "chat", *tiny("llama").arguments(), "Hello"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    said = []
    for line in process.stderr:
        said.append(line)
        if "click.core" in line:
            os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130 and not any("Traceback" in line for line in said)
