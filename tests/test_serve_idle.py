"""A server tunes its model while it is idle, and stops for a request."""

import signal
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
from server import DEMO, serving
from test_tune import certify
from waits import until

from pykvedge import plan
from pykvedge.models import profiles, tuned
from pykvedge.serve import idle

SOON = "from pykvedge.serve import idle; idle._IDLE_S = 0.3; from pykvedge.__main__ import main; main()"
AS_OTHERS = SOON.replace("0.3;", "0.3; idle._NICE = 0;")  # with niceness, it would wait for minutes beside other tests
OPTIONS = ("serve", "--port", "0", "--threads", "1", "--tune", "30")
QUESTION = [{"role": "user", "content": "Hello"}]


def tuner(server):
    """Returns the tuning process when it measures; None before."""
    return next((one for one in psutil.Process(server.process.pid).children() if "tune" in one.cmdline()), None)


def test_it_gives_way_to_a_request_and_goes_on_afterwards(environment, tmp_path):
    name = f"kvedge/profiles/{tuned.place(profiles.hash_of(DEMO / 'demo-model.gguf')).stem}.run.jsonl"
    figures = tmp_path / name
    with serving({**environment, "XDG_CONFIG_HOME": str(tmp_path)}, program=("-c", AS_OTHERS, *OPTIONS)) as server:
        first = until(lambda: tuner(server))
        until(lambda: figures.is_file() and figures.read_bytes().count(b"\n") > 2)
        assert server.chat(QUESTION).status_code == 200
        until(lambda: not first.is_running())
        measured = figures.read_bytes()
        assert measured.endswith(b"\n")
        second = until(lambda: tuner(server))
        until(lambda: figures.stat().st_size > len(measured))
        assert figures.read_bytes().startswith(measured)
        code, _, said = server.end(signal.SIGINT)
        assert code == 0 and not second.is_running()
        assert said.count("tunes the model after 0.3 s without a request") == 1 and "Traceback" not in said


def test_it_ends_with_a_server_that_is_killed(environment, tmp_path):
    with serving({**environment, "XDG_CONFIG_HOME": str(tmp_path)}, program=("-c", AS_OTHERS, *OPTIONS)) as server:
        child = until(lambda: tuner(server))
        server.process.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_it_has_the_least_priority(environment, tmp_path):
    with serving({**environment, "XDG_CONFIG_HOME": str(tmp_path)}, program=("-c", SOON, *OPTIONS)) as server:
        child = until(lambda: tuner(server))
        until(lambda: child.nice() == 19)
        child.kill()
        assert server.end()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--list"], "tuning is complete; the server uses the plan after its next start (kvedge tune --show)"),
        (["--model", "none.gguf"], "error: kvedge tune needs the image encoder"),
    ],
)
def test_its_end_is_told_once(arguments, told, monkeypatch):
    monkeypatch.setattr(idle, "_IDLE_S", 0.1)
    monkeypatch.setattr(idle, "_NICE", 0)
    said, nothing = [], SimpleNamespace(busy=0, waiting=0, counts=SimpleNamespace(finished=Counter()))
    with idle.tuning(nothing, arguments, said.append):
        until(lambda: len(said) == 2)
        time.sleep(0.5)
    assert len(said) == 2 and said[1].startswith(told)


def test_a_tuned_model_is_left_alone(environment, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    certify(plan("snapkv", 0.25))
    with serving({**environment, "XDG_CONFIG_HOME": str(tmp_path)}, program=("-c", SOON, *OPTIONS)) as server:
        time.sleep(1)
        assert tuner(server) is None
        assert "--tune has no effect: demo-model.gguf is already tuned" in server.end()[2]


def test_models_that_cannot_be_tuned_are_refused(kvedge, tiny):
    done = kvedge("serve", "--model", tiny("llama").model, "--tune", "5")
    done.failed(2, "--tune needs the image encoder")
