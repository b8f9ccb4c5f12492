"""examples/desktop: the worker without a display, the window under Xvfb, and `kvedge serve` beside a program."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import ImageGrab
from server import DEMO, ENDLESS

import pykvedge

ROOT = Path(__file__).resolve().parents[1]
DESKTOP = ROOT / "examples" / "desktop"
SCENE = ROOT / "examples" / "scene-1.png"
FILES = DEMO / "demo-model.gguf", DEMO / "demo-mmproj.gguf"
DRIVER = Path(__file__).with_name("desktop_driver.py")
SOURCES = sorted(DESKTOP.glob("*.py"))
RED = "#b91c1c"
LIMIT_S = 120  # for what takes a few seconds


@pytest.fixture(scope="module")
def screen(environment):
    """Environment of a program with a screen of its own, which nobody sees."""
    if importlib.util.find_spec("_tkinter") is None:
        pytest.skip("this Python has no tkinter (Debian: python3-tk)")
    if shutil.which("Xvfb") is None:
        pytest.skip("Xvfb is missing (Debian: xvfb)")
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


@pytest.fixture(scope="module")
def driven(screen, native):
    """driven(case, *files) -> what tests/desktop_driver.py saw of a window. Nothing went to stderr."""

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, DRIVER, *map(str, arguments)],
            env=screen, text=True, capture_output=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A picture that ends in the middle."""
    path = tmp_path_factory.mktemp("broken") / "broken.png"
    path.write_bytes(SCENE.read_bytes()[:800])
    return path


@pytest.fixture(scope="module")
def talk(driven, broken):
    return driven("talk", *FILES, SCENE, broken)


@pytest.fixture(scope="module")
def expected(native):
    """(text, report) of the questions that the window is asked, of a session of its own."""
    answers = []
    with pykvedge.Session(*FILES, pykvedge.plan("mixkv", 0.5), threads=1) as session:
        for question, pictures in (("What is the code?", SCENE), ("How many triangles are there?", ())):
            answer = session.ask(question, pictures)
            answers.append((answer.read().strip(), answer.report))
        session.clear()
        session.set_plan(pykvedge.plan("full"))
        answer = session.ask("What is the code?", SCENE)
        answers.append((answer.read().strip(), answer.report))
    return answers


def test_it_answers_as_a_session_does(talk, expected):
    assert talk["answers"] == [text for text, _ in expected]
    assert talk["answers"][0] == "64UM3"  # examples/scenes.md


def test_the_memory_is_that_of_the_report(talk, expected):
    for shown, (_, report) in zip(talk["memory"], expected, strict=True):
        kept, full = report.kv.kept_bytes, report.kv.full_bytes
        assert shown["kept"] == f"{kept / 1024:.1f} KiB of {full / 1024:.1f} KiB"
        assert shown["share"] == pytest.approx(kept / full)
        assert shown["prompt"].split()[0] == str(report.tokens.prompt)
    assert [shown["share"] < 1 for shown in talk["memory"]] == [True, True, False]
    shown, measured = talk["private"]
    assert shown.endswith(" MiB") and float(shown.split()[0]) * 2**20 == pytest.approx(measured, rel=0.05)


def test_buttons_can_be_pressed_when_they_do_something(talk):
    assert talk["loading"] == {"open": False, "send": False, "stop": False}
    assert talk["ready"] == {"open": True, "send": True, "stop": False}
    assert talk["answering"] == {"open": False, "send": False, "stop": True}


def test_an_answer_is_stopped_and_the_next_one_comes(talk):
    said, note = talk["stopped"].splitlines()
    assert note == "stopped" and set(said) == {"a"} and 3 < len(said) < 4000
    assert talk["after a stop"] and "stopped" not in talk["after a stop"]
    assert talk["cleared"] == ["", "-"]  # and the answer after it is the right one


def test_trouble_is_a_line_in_the_window(talk, broken):
    line, colour = talk["broken"]
    assert line.startswith(str(broken)) and colour == RED
    line, colour, words_left, in_chat = talk["too long"]
    assert "context" in line and colour == RED and in_chat.endswith(line)
    assert words_left == 5000  # to be made shorter
    assert talk["ended"]


def test_an_answer_that_fills_the_context(driven):
    told = driven("full", FILES[0])
    said, note = told["said"]
    assert set(said) == {"a"} and "context is full" in note and told["line"] == "ready" and told["ended"]


def test_a_model_that_cannot_be_had(driven, tmp_path):
    told = driven("lines", tmp_path / "nowhere.gguf", SCENE)
    assert told["lines"] == [[f"{tmp_path / 'nowhere.gguf'} does not exist", RED]] * 2
    assert not told["loaded"] and told["ended"]


def test_a_model_without_an_encoder(driven):
    told = driven("lines", FILES[0], SCENE)
    assert told["lines"][0][0] == "ready" and told["loaded"] and told["ended"]
    assert "--mmproj" in told["lines"][1][0] and told["lines"][1][1] == RED


def test_closing_in_the_middle_of_an_answer_frees_the_model(driven):
    assert driven("close", *FILES, SCENE) == {"seen": 1, "alive": False, "in memory": False}


def test_the_keyboard_and_the_size(driven):
    told = driven("keys", *FILES)
    # the stop button cannot be reached while nothing is to be stopped
    assert told["order"] == ["entry", "send_button", "open_button", "new_button", "method", "budget"]
    assert told["asked"] == 1 and told["grew"] == [True, True] and told["ended"]


def wait_for_a_window(display):
    end = time.monotonic() + LIMIT_S
    while ImageGrab.grab(xdisplay=display).getbbox() is None:  # all black
        assert time.monotonic() < end, "no window came"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_starts_and_ends_by_a_signal(screen, native, number):
    command = [sys.executable, DESKTOP, "--threads", "1"]
    program = subprocess.Popen(command, env=screen, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        wait_for_a_window(screen["DISPLAY"])
        program.send_signal(number)
        assert program.communicate(timeout=LIMIT_S) == ("", "")
        assert program.returncode == 0
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--method", "lookn"], "did you mean 'lookm'"), (["--budget", "3.5"], "budget"), (["--method", "full", "--budget",
      "0.5"], "keeps everything")],
)  # fmt: skip
def test_wrong_options_are_refused(environment, arguments, words):
    done = subprocess.run([sys.executable, DESKTOP, *arguments], env=environment, text=True, capture_output=True)
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_without_a_screen_it_says_so(environment):
    without = {k: v for k, v in environment.items() if k != "DISPLAY"}
    done = subprocess.run([sys.executable, DESKTOP], env=without, text=True, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")


# ------------------------------------------------------------------------------------------------------------
# The thread, without any window


@pytest.fixture(scope="module")
def worker_module(native):
    spec = importlib.util.spec_from_file_location("desktop_worker", DESKTOP / "worker.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def worker(worker_module):
    """A started worker whose model is loaded. It ends after the test."""
    worker = worker_module.Worker(*FILES, threads=1)
    worker.start()
    first = events(worker)
    assert isinstance(first[-1], worker_module.Ready) and first[-1].sees_images
    assert first[0].what == "loading the model"
    yield worker
    worker.quit()
    worker.join(LIMIT_S)
    assert not worker.is_alive() and isinstance(events(worker)[-1], worker_module.Ended)


def events(worker):
    """All up to the one that ends a job."""
    found = []
    while not found or type(found[-1]).__name__ in ("Progress", "Compressed", "Piece"):
        found.append(worker.events.get(timeout=LIMIT_S))
    return found


def test_the_worker_needs_no_display(environment):
    code = "import sys, worker; assert not [name for name in sys.modules if 'tkinter' in name]"
    path = os.pathsep.join([str(DESKTOP), environment["PYTHONPATH"]])
    subprocess.run([sys.executable, "-c", code], env={**environment, "PYTHONPATH": path}, check=True)


def test_the_worker_tells_what_happens_in_order(worker, worker_module, expected):
    worker.open(SCENE)
    (opened,) = events(worker)
    assert (opened.picture.width, opened.preview.size) == (240, (240, 240))
    worker.ask("What is the code?", [opened.picture], pykvedge.plan("mixkv", 0.5))
    told = events(worker)
    kinds = [type(event).__name__ for event in told]
    assert kinds == sorted(kinds, key=["Progress", "Compressed", "Piece", "Done"].index)
    assert "".join(e.text for e in told if isinstance(e, worker_module.Piece)).strip() == expected[0][0]
    assert "reading the prompt" in {e.what for e in told if isinstance(e, worker_module.Progress)}
    assert told[-1].finish == "end" and told[-1].tokens_per_s > 0
    figures = next(e for e in told if isinstance(e, worker_module.Compressed))
    report = expected[0][1]
    assert (figures.kept_bytes, figures.full_bytes) == (report.kv.kept_bytes, report.kv.full_bytes)
    assert (figures.prompt, figures.image) == (report.tokens.prompt, report.tokens.image)


def test_no_stop_is_lost(worker):
    """Also one that comes before the thread has looked at the job."""
    worker.sampling = pykvedge.Sampling(grammar=ENDLESS, max_tokens=4000)
    for _ in range(5):
        worker.ask("What is the code?", [], pykvedge.plan("full"))
        worker.stop()
        end = events(worker)[-1]
        assert getattr(end, "stopped", False) or end.finish == "cancelled"
    worker.sampling = None
    worker.clear()
    events(worker)
    worker.ask("What is the code?", [pykvedge.load_picture(SCENE)], pykvedge.plan("full"))
    assert "".join(getattr(event, "text", "") for event in events(worker)).strip() == "64UM3"


def test_the_worker_can_be_told_to_quit_before_it_has_begun(worker_module):
    worker = worker_module.Worker(*FILES, threads=1)
    worker.quit()
    worker.start()
    worker.join(LIMIT_S)
    assert not worker.is_alive()


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_only_public_names_are_used(source):
    tree = ast.parse(source.read_text("utf-8"))
    public = {*pykvedge.__all__, "__file__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("pykvedge")
        elif isinstance(node, ast.Import):
            assert all(not alias.name.startswith("pykvedge.") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pykvedge":
            assert node.attr in public, node.attr


def test_a_server_beside_a_program(environment, native):
    pytest.importorskip("uvicorn")
    done = subprocess.run(
        [sys.executable, DESKTOP / "sidecar.py", SCENE, "What is the code?", "--threads", "1", "--quiet"],
        env=environment, text=True, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "64UM3"


def test_a_server_that_cannot_start(environment, tmp_path):
    done = subprocess.run(
        [sys.executable, DESKTOP / "sidecar.py", SCENE, "?", "--model", tmp_path / "nowhere.gguf"],
        env=environment, text=True, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "nowhere.gguf does not exist" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
