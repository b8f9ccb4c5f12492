"""examples/desktop: the worker without a display, the window under Xvfb, and `kvedge serve` beside a program.

As a program, `test_desktop.py SCENE BROKEN PICTURE` uses the window as a person would, prints the results, and takes a
picture of the window. KVEDGE_PICTURES=docs/images keeps the picture.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from choosing import whole
from conftest import ROOT
from PIL import Image, ImageGrab
from server import DEMO, ENDLESS
from waits import until

import pykvedge

DESKTOP = ROOT / "examples" / "desktop"
SCENE = ROOT / "examples" / "scene-1.png"
FILES = DEMO / "demo-model.gguf", DEMO / "demo-mmproj.gguf"
QUESTION, ANSWER = "What is the code?", "64UM3"  # examples/scenes.md
LONG = pykvedge.Sampling(grammar=ENDLESS, max_tokens=4000)
LIMIT_S = 60  # limit for steps of a few seconds


def loaded(name):
    """Returns a module of the example."""
    sys.path.insert(0, str(DESKTOP))
    try:
        spec = importlib.util.spec_from_file_location(f"desktop{name}", DESKTOP / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DESKTOP))
    return module


def drop(window, *paths):
    """Drops files into the window, through the binding that tkdnd uses."""
    files = " ".join(f"{{{path}}}" for path in paths)
    script = window.tk.call("bind", ".", "<<Drop>>")
    window.tk.eval(re.sub(r"\{?%(\w+)\}?", lambda found: f"{{{files if found[1] == 'D' else ''}}}", script))


def drawn(window, picture):
    """Draws the dark window into a file. Returns the brightness of each theme."""
    bright = {}
    for dark in (False, True):
        window.dark.set(dark)
        window._use_theme()
        window.update()
        bright["dark" if dark else "light"] = sum(window.winfo_rgb(window.chat["background"]))
    time.sleep(0.5)  # time for the screen to show the window
    window.update()
    corner = window.winfo_rootx(), window.winfo_rooty()
    ImageGrab.grab((*corner, corner[0] + window.winfo_width(), corner[1] + window.winfo_height())).save(picture)
    return bright


def used(scene, broken, picture):
    """Talks, stops, opens a broken picture, asks a too long question, and closes the window during an answer."""
    sessions, told = [], {}

    class Noted(pykvedge.Session):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            sessions.append(self)

    pykvedge.Session, program = Noted, loaded("__main__")
    worker = program.Worker(*FILES, threads=1)
    window = program.Window(worker, pykvedge.default_plan())
    worker.start()

    def wait(until=lambda: not window.busy):
        end = time.monotonic() + LIMIT_S / 2
        while not until():
            assert time.monotonic() < end, window.status["text"]
            window.update()
            time.sleep(0.005)

    def said():
        return window.chat.get("1.0", "end").splitlines()[-2 if not window.busy else -1].strip()

    def ask(question, until=lambda: not window.busy):
        window.entry.insert(0, question)
        window.ask()
        assert window.busy
        wait(until)

    def states():
        return [not window.buttons[name].instate(["disabled"]) for name in ("Open…", "Send", "Stop")]

    told["loading"] = states()
    wait()
    told["ready"], told["hint"] = states(), window.chat.get("1.0", "end")
    drop(window, scene)
    wait()
    ask(QUESTION)
    told["answer"] = [window.chat.get("1.0", "end").split("\n", 1)[1].strip(), window.memory["text"]]
    ask("How many circles are there?")
    ask("Where is the red circle?")
    told |= drawn(window, picture)
    drop(window, broken)
    wait()
    told["broken"] = window.status["text"]
    ask("word " * 5000)
    told["too long"] = [window.status["text"], len(window.entry.get().split())]
    window.entry.delete(0, "end")
    worker.sampling = LONG
    ask(QUESTION, lambda: said().startswith("aaa"))
    told["answering"] = states()
    window.entry.focus_force()
    window.entry.event_generate("<Escape>")
    wait()
    told["stopped"] = window.status["text"]
    ask(QUESTION, lambda: said().startswith("aaa"))
    window.tk.call(window.protocol("WM_DELETE_WINDOW"))
    worker.join(LIMIT_S)
    return told | {"ended": [worker.is_alive(), bool(sessions[0].model.handle)]}


@pytest.fixture(scope="module")
def screen(environment):
    """The environment of a program with an invisible screen of its own."""
    if importlib.util.find_spec("_tkinter") is None or shutil.which("Xvfb") is None:
        pytest.skip("this Python has no tkinter, or Xvfb is missing (Debian: python3-tk, xvfb)")
    for module in ("sv_ttk", "tkinterdnd2"):
        pytest.importorskip(module)
    reading, writing = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writing), "-screen", "0", "1280x900x24", "-nolisten", "tcp", "-noreset", "-br"],
        pass_fds=[writing], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(writing)
    try:
        with os.fdopen(reading) as file:
            number = file.readline().strip()
        assert number, "Xvfb did not start"
        yield {**environment, "DISPLAY": f":{number}"}
    finally:
        server.kill()
        server.wait()


def run(environment, *command):
    return subprocess.run([sys.executable, *command], env=environment, text=True, capture_output=True, timeout=LIMIT_S)


def test_what_a_person_sees(screen, native, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(SCENE.read_bytes()[:800])
    picture = Path(os.environ.get("KVEDGE_PICTURES", tmp_path)).resolve() / "desktop.png"
    done = run(screen, __file__, SCENE, broken, picture)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
    told = json.loads(done.stdout)
    with pykvedge.Session(*FILES, threads=1) as session:
        answer = session.ask(QUESTION, SCENE)
        text, kv = answer.read().strip(), answer.report.kv
    assert "Add a picture" in told["hint"] and told["answer"][0] == text == ANSWER
    assert told["dark"] < told["light"] / 2 and Image.open(picture).width > 700
    assert f"{kv.kept_bytes / 1024:.1f} of {kv.full_bytes / 1024:.1f} KiB" in told["answer"][1]
    states = [told[when] for when in ("loading", "ready", "answering")]  # states of the buttons open, send and stop
    assert states == [[False] * 3, [True, True, False], [False, False, True]]
    assert told["broken"].startswith(str(broken)) and "cancelled" in told["stopped"]
    assert "context" in told["too long"][0] and told["too long"][1] == 5000  # the message stays, to be shortened
    assert told["ended"] == [False, False]  # whether the thread and the model are still alive


@pytest.mark.parametrize("number", [signal.SIGTERM, *whole(signal.SIGINT)])
def test_the_program_starts_and_ends_by_a_signal(screen, native, number):
    program = subprocess.Popen([sys.executable, DESKTOP], env=screen, text=True, stderr=-1, stdout=-1)
    try:
        until(lambda: ImageGrab.grab(xdisplay=screen["DISPLAY"]).getbbox())  # None: the screen is black
        program.send_signal(number)
        assert program.communicate(timeout=LIMIT_S) == ("", "") and program.returncode == 0
    finally:
        program.kill()
        program.wait()


def test_what_cannot_be_is_one_line(screen, native):
    for arguments, words in (["--method", "lookn"], "did you mean 'lookm'"), (["--budget", "3.5"], "budget"):
        done = run(screen, DESKTOP, *arguments)
        assert done.returncode == 2 and words in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    done = run({k: v for k, v in screen.items() if k != "DISPLAY"}, DESKTOP)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")


# the thread without a window


@pytest.fixture
def worker(native):
    """A worker with a loaded model, which ends after the test."""
    worker = loaded("worker").Worker(*FILES, threads=1)
    worker.start()
    assert events(worker)[-1] == ("ready",)
    yield worker
    worker.quit()
    worker.join(LIMIT_S)
    assert not worker.is_alive() and events(worker)[-1] == ("ended",)


def events(worker):
    """Returns the events up to the event that ends a job."""
    found = []
    while not found or found[-1][0] in ("progress", "compressed", "piece"):
        found.append(worker.events.get(timeout=LIMIT_S))
    return found


def test_no_stop_is_lost_and_events_come_in_order(worker):
    """Even a stop that comes before the thread looks at the job must work."""
    worker.sampling = LONG
    for _ in range(5):
        worker.ask(QUESTION, [], pykvedge.plan("full"))
        worker.stop()
        assert events(worker)[-1] in (("done", "cancelled"), ("failed", "the operation was cancelled"))
    worker.sampling = None
    worker.clear()
    assert events(worker) == [("cleared",)]
    worker.ask(QUESTION, [pykvedge.load_picture(SCENE)], pykvedge.plan("full"))
    told = events(worker)
    kinds = [event[0] for event in told]
    assert kinds == sorted(kinds, key=["progress", "compressed", "piece", "done"].index) and told[-1] == ("done", "end")
    assert "".join(event[1] for event in told if event[0] == "piece").strip() == ANSWER


def test_the_worker_can_be_told_to_quit_before_it_has_begun(native):
    worker = loaded("worker").Worker(*FILES)
    worker.quit()
    worker.start()
    worker.join(LIMIT_S)
    assert not worker.is_alive()


def test_a_model_without_an_encoder_and_one_that_is_missing(native, tmp_path):
    for model, words in ((FILES[0], "--mmproj"), (tmp_path / "nowhere.gguf", "nowhere.gguf does not exist")):
        worker = loaded("worker").Worker(model, None)
        worker.start()
        if (end := events(worker)[-1]) == ("ready",):
            worker.open([SCENE])
            end = events(worker)[-1]
        worker.quit()
        worker.join(LIMIT_S)
        assert end[0] == "failed" and words in end[1], end


@pytest.mark.parametrize("source", sorted(DESKTOP.glob("*.py")), ids=lambda path: path.name)
def test_only_public_names_are_used_and_the_worker_needs_no_display(source):
    tree = ast.parse(source.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("pykvedge")
        elif isinstance(node, ast.Import):
            assert all(not alias.name.startswith("pykvedge.") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pykvedge":
            assert node.attr in {*pykvedge.__all__, "__file__"}, node.attr
    assert source.stem == "__main__" or "tkinter" not in source.read_text("utf-8")


def test_a_server_beside_a_program(environment, native, tmp_path):
    pytest.importorskip("uvicorn")
    done = run(environment, DESKTOP / "sidecar.py", SCENE, QUESTION, "--threads", "1", "--quiet")
    assert done.returncode == 0 and done.stdout.strip() == ANSWER, done.stderr
    done = run(environment, DESKTOP / "sidecar.py", SCENE, "?", "--model", tmp_path / "nowhere.gguf")
    assert done.returncode == 1 and "nowhere.gguf does not exist" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr


if __name__ == "__main__":
    try:
        print(json.dumps(used(*sys.argv[1:])), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the model's thread
