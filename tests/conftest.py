"""Fixtures that many tests share: tiny models, pictures, the program as a subprocess."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

# NumPy reads this variable at import. The threads of OpenBLAS wait for each other when tests use every core: attention
# over 200 tokens then takes twenty times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]
QUICK_BENCH = ROOT / "tests" / "quick_bench.py"  # runs kvedge, but `bench` samples memory only briefly
DEVELOPMENT_LIBRARIES = ROOT / "build" / "dev" / "bin"
# hundreds of processes import the package: without a bytecode cache, each would compile the package again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["KVEDGE_CONFIG"] = os.devnull + "/none"  # the developer's settings must not change tests

try:
    import pykvedge
except ImportError:  # not installed: use the sources of this tree
    sys.path.insert(0, str(ROOT))
    import pykvedge
from pykvedge.native import carried, libraries  # noqa: E402
from pykvedge.system.files import DATA  # noqa: E402

if libraries.library_dir() is None and DEVELOPMENT_LIBRARIES.is_dir():
    os.environ["KVEDGE_LIB_DIR"] = str(DEVELOPMENT_LIBRARIES)
    libraries.library_dir.cache_clear()
    carried.prepare()

WHOLE = "whole: repeats what other cases hold, or takes long; run with --all"


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run cases, too, that repeat what others hold or take long")


def pytest_xdist_auto_num_workers(config):
    """Starts two workers per core: 40 % of a test's time is waiting for a server, a signal, a terminal or a process."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else 2 * (os.cpu_count() or 1)


def pytest_configure(config):
    config.addinivalue_line("markers", WHOLE)


def pytest_collection_modifyitems(config, items):
    """Leaves out the cases marked `whole`, except with --all or when the command line names a case."""
    if config.getoption("all") or any("[" in arg for arg in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("whole")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("whole")]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """Writes the time of each test function, with all its cases and fixtures, to build/durations.txt."""
    taken: dict[str, list[float]] = {}
    for report in (report for kind in terminalreporter.stats.values() for report in kind):
        if hasattr(report, "duration") and hasattr(report, "when"):
            taken.setdefault(report.nodeid.partition("[")[0], []).append(report.duration)
    if taken and (ROOT / "build").is_dir():
        rows = sorted(((sum(seconds), name) for name, seconds in taken.items()), reverse=True)
        rows.insert(0, (sum(seconds for seconds, _ in rows), "all"))
        lines = "".join(f"{seconds:9.2f} {name}\n" for seconds, name in rows)
        (ROOT / "build" / "durations.txt").write_text(lines, encoding="utf-8")


THREADS = 1  # tiny models are not faster with more threads


@pytest.fixture(scope="session")
def native():
    """Returns libkvedge. Without the library, tests that need it fail; they are not skipped."""
    from pykvedge.library import libkvedge

    libkvedge.lib()
    return libkvedge


@pytest.fixture(scope="session")
def stock_dir():
    """Returns the folder of an unpatched libllama, made by scripts/build_stock.py."""
    where = Path(os.environ.get("KVEDGE_STOCK_DIR", ROOT / "build" / "stock" / "lib"))
    if not any(where.glob("*llama*")):
        pytest.fail(f"{where} holds no libllama; run scripts/build_stock.py, or set KVEDGE_STOCK_DIR")
    return where


@pytest.fixture(scope="session")
def stock_env(stock_dir):
    """Returns the changes of the environment for a process with unpatched libraries. None: remove the variable."""
    return {"KVEDGE_LIB_DIR": None, "LLAMA_CPP_LIB_PATH": str(stock_dir)}


@dataclass(frozen=True)
class TinyModel:
    """The files of a model: a tiny model with random weights, or the packaged model."""

    model: Path
    mmproj: Path | None

    def arguments(self) -> list[str]:
        """Returns the options of `kvedge chat` that choose this model."""
        image = ["--mmproj", str(self.mmproj)] if self.mmproj else []
        return ["--model", str(self.model), *image, "--threads", str(THREADS)]

    def session(self, plan=None, **settings):
        """Opens a Session with this model. Default plan: full."""
        settings = {"threads": THREADS, **settings}
        return pykvedge.Session(self.model, self.mmproj, plan or pykvedge.plan("full"), **settings)


DEMO = TinyModel(DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(kind, **shape) -> TinyModel. Files of the same kind and shape are written once."""
    from modelgen.tiny import default_spec, write_tiny

    made: dict[tuple, TinyModel] = {}

    def make(kind: str, **shape) -> TinyModel:
        from dataclasses import replace

        key = (kind, *sorted(shape.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[key] = TinyModel(*write_tiny(kind, folder, spec=replace(default_spec(kind), **shape)))
        return made[key]

    return make


@pytest.fixture
def session(tiny, native):
    """A session with a tiny model and the plan `full`."""
    with tiny("llama").session() as opened:
        yield opened


@pytest.fixture(scope="session")
def profile_file(tmp_path_factory):
    """profile_file(model, kind) -> the file of a profile for that GGUF file; a few heads or layers are strong."""
    from profilefiles import write_profile

    folder = tmp_path_factory.mktemp("profiles")
    return lambda model, kind: write_profile(model, kind, folder)


@pytest.fixture
def attached_llama(tiny, native, profile_file):
    """attached_llama(method, **options) -> a context manager that yields (llm, attachment)."""

    from attached import llama, profiles

    def make(method, kind="llama", **options):
        files = tiny(kind)
        budget = None if method == "full" else 0.4
        return llama(files, method, budget, profile=profiles(profile_file, files, method), **options)

    return make


@pytest.fixture(scope="session")
def picture_file(tmp_path_factory):
    """picture_file(name, width, height, mode, **save options) -> path of a picture with a pattern."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")

    def make(name: str = "a.png", width: int = 80, height: int = 60, mode: str = "RGB", **options) -> Path:
        path = folder / f"{width}x{height}{mode}" / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
            image.paste((200, 30, 30), (0, 0, width // 3, height // 3))
            image.convert(mode).save(path, **options)
        return path

    return make


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run of the program."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        """Returns the one JSON object that stdout must be."""
        return json.loads(self.out)

    def failed(self, code: int, *words: str) -> None:
        """Checks the exit code, an empty stdout, and one error line on stderr that contains all the words."""
        assert self.code == code, self
        assert self.out == "", self
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("kvedge: error: "), self
        for word in words:
            assert word in lines[0], f"{word!r} is not in: {lines[0]}"


@pytest.fixture(scope="session")
def environment():
    """Returns the environment of a subprocess that uses the pykvedge and the libraries of this process."""
    package = str(Path(pykvedge.__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUTF8": "1"}


@pytest.fixture(scope="session")
def started(environment):
    """started(*arguments, stdin, env, program) -> Outcome of a new process. program: what Python runs.

    A variable of env whose value is None is removed.
    """

    def run(*arguments, stdin="", env=None, timeout: float = 300, program=("-m", "pykvedge"), **options) -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        command = [sys.executable, *program, *map(str, arguments)]
        variables = {name: value for name, value in {**environment, **(env or {})}.items() if value is not None}
        done = subprocess.run(
            command, input=data, capture_output=True, env=variables, timeout=timeout, check=False, **options
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture(scope="session")
def kvedge(environment, started):
    """As `started`, but faster: forks a process that has imported kvedge. Tests of the program's start use `started`.

    script: a file to run instead of kvedge. program=("-c", CODE): code. These calls start a new process: with other
    options, outside the main thread, or with variables that Python or the dynamic loader reads at its start.
    """
    from forking import AT_START, Programs

    forks = hasattr(os, "fork")
    if forks:
        programs = Programs(environment)

    def run(*arguments, stdin="", timeout: float = 300, script: Path | str = "", env=None, **options) -> Outcome:
        if options.keys() == {"program"} and options["program"][0] == "-c":
            script, *code = options.pop("program")
            arguments = *code, *arguments
        whole = options or not forks or any(name.startswith(AT_START) for name in env or ())
        # calls from other threads must run at the same time
        if whole or threading.current_thread() is not threading.main_thread():
            if script:
                options["program"] = (script,)
            return started(*arguments, stdin=stdin, timeout=timeout, env=env, **options)
        given = stdin.encode() if isinstance(stdin, str) else stdin
        code, out, err = programs.run(arguments, given, timeout, str(script), env or {})
        return Outcome(code, out.decode(), err.decode())

    yield run
    if forks:
        programs.close()


@pytest.fixture
def refused(capsys):
    """refused(*arguments) -> Outcome, run in this process: for requests that end before a model is loaded."""
    from pykvedge.cli import program

    def run(*arguments) -> Outcome:
        try:
            code = program.cli.main([str(a) for a in arguments], prog_name="kvedge", standalone_mode=False)
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = program._explain(error)
        return Outcome(code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def demo_model(native):
    """The packaged model with its image encoder, loaded once."""
    with pykvedge.load(DEMO.model, DEMO.mmproj, threads=1) as model:
        yield model


@pytest.fixture
def closing():
    """closing(thing) -> the thing. Its close() is called after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


@pytest.fixture
def scheduled(demo_model, closing):
    """scheduled(park, **limits) -> a Scheduler with the packaged model, closed after the test."""
    from pykvedge.serve.job import Limits
    from pykvedge.serve.parked import Park
    from pykvedge.serve.scheduler import Scheduler

    def make(park=None, **limits):
        limits = {"slots": 2, "n_ctx": 1024, "memory": 64 << 20, **limits}
        return closing(Scheduler(demo_model, Limits(**limits), Park(None) if park is None else park))

    return make


@pytest.fixture(scope="session")
def worker(kvedge):
    """worker(name, job, *arguments) -> the JSON lines that tests/NAME prints for a job. Fails with the worker."""

    def run(name: str, job: object = None, *arguments: object, env=None) -> list:
        script = Path(__file__).with_name(name)
        done = kvedge(*arguments, script=script, stdin=json.dumps(job), env=env, timeout=600)
        assert done.code == 0, (done.code, done.out[-200:], done.err[-2000:])
        return [json.loads(line) for line in done.out.splitlines()]

    return run


@pytest.fixture(scope="session")
def file_results(kvedge):
    """file_results(*arguments, files) -> one line of tests/file_worker.py for each file. Fails with the worker."""

    def run(*arguments, files) -> list[str]:
        done = kvedge(*arguments, *files, script=Path(__file__).with_name("file_worker.py"), timeout=600)
        lines = done.out.splitlines()
        at = files[min(len(lines), len(files) - 1)]
        assert done.code == 0 and len(lines) == len(files), (done.code, at, done.err[-2000:])
        return lines

    return run


@pytest.fixture(autouse=True)
def forgotten():
    """Removes the stages that a test registered."""
    from pykvedge.plans.plugins import table

    before = table.snapshot()
    yield
    table.restore(before)


@pytest.fixture(scope="module")
def driver():
    """A browser for all tests of one file."""
    from browser import browsing

    with browsing() as one:
        yield one


@pytest.fixture(scope="module")
def server(environment, request):
    """A running `kvedge serve` for all tests of one file, with the options in the file's SERVED."""
    from server import serving

    with serving(environment, *request.module.SERVED) as one:
        yield one


@pytest.fixture
def own_server(environment, closing):
    """An RPC server on loopback, for one test."""
    from rpcserver import Server

    return closing(Server(environment))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The folder where profiles are saved and found. The folder does not exist at first."""
    from pykvedge.models import profiles

    folder = tmp_path / "own"
    monkeypatch.setattr(profiles, "folder", lambda: folder)
    return folder


@pytest.fixture
def write(tmp_path):
    """write(code, name) -> path of a new plugin file."""

    def make(code: str, name: str = "my_method.py") -> Path:
        (tmp_path / name).write_text(code)
        return tmp_path / name

    return make


@pytest.fixture
def saved(tiny, picture_file, native, tmp_path):
    """A model, and a session file of a compressed conversation about an image."""
    from conversations import a_plan, say

    model, file = tiny("llava"), tmp_path / "s.kvs"
    with model.session(a_plan("merged")) as session:
        say(session, "What is this?", [picture_file()])
        assert session.save(file) == file.stat().st_size
    return model, file


class Children:
    """Lists the running child processes that a test has started."""

    def __init__(self):
        self._before = psutil.Process().children()  # an earlier test may have left a child process

    def __call__(self):
        return [child for child in psutil.Process().children() if child not in self._before]


@pytest.fixture
def children():
    return Children()
