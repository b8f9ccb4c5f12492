"""Makes .venv and installs kvedge there from this clone, with plain pip. Uses only the standard library.

The install is editable: Python files are used in place, the libraries are built in build/<platform> and copied into
.venv. Nothing is done while no input has changed; after a change, only the changed parts are built again.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from llama_source import ROOT, SourceError, log

VENV = ROOT / ".venv"
BUILD = ROOT / "build"
STATE = VENV / "kvedge-install.json"
LOG = BUILD / "install.log"

# files that a build reads
SOURCES = ("pyproject.toml", "CMakeLists.txt", "cmake/**/*", "native/**/*", "patches/**/*.patch",
           "scripts/llama_source.py")  # fmt: skip
VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS", "CMAKE_GENERATOR", "LLAMA_CPP_SOURCE_DIR",
             "CUDACXX", "CUDAARCHS", "MACOSX_DEPLOYMENT_TARGET")  # fmt: skip


def venv_program(name: str) -> str:
    if os.name == "nt":
        return str(VENV / "Scripts" / f"{name}.exe")
    return str(VENV / "bin" / name)


def ensure_venv() -> None:
    """Makes .venv if no usable .venv exists."""
    if _usable_venv():
        if any(_site_packages("pip")):
            return
        # uv makes environments without pip
        done = subprocess.run([venv_program("python"), "-m", "ensurepip"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    if VENV.exists():
        log("replacing .venv: its Python is gone, older than 3.10 or without pip")
        shutil.rmtree(VENV)
    done = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        if "ensurepip" in done.stdout + done.stderr:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise SourceError(
                f"Python's venv module is incomplete; on Debian or Ubuntu: apt install python{version}-venv"
            )
        raise SourceError(f"cannot make {VENV}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def _usable_venv() -> bool:
    if not Path(venv_program("python")).exists():
        return False
    try:
        config = (VENV / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return False
    version = re.search(r"^version(?:_info)? *= *(\d+)\.(\d+)", config, re.MULTILINE)
    return version is not None and (int(version[1]), int(version[2])) >= (3, 10)


def _site_packages(pattern: str) -> Iterator[Path]:
    for site in ("lib/python3.*/site-packages", "Lib/site-packages"):
        yield from VENV.glob(f"{site}/{pattern}")


def ensure_tools(names: list[str]) -> None:
    """Installs packages that kvedge's build does not need."""
    missing = [n for n in names if not any(_site_packages(f"{n}-*.dist-info"))]
    if missing:
        _pip("installing " + ", ".join(missing), "install", *missing)


def ensure_package(extra: str = "", options: list[str] | None = None, force: bool = False) -> None:
    """Installs kvedge if its sources, its options or the environment changed since the last install.

    extra: an optional group of pyproject.toml to install too. options: CMake settings NAME=VALUE; None keeps the last.
    """
    ensure_venv()
    state = _read_state()
    if options is None:
        options = state.get("options", [])
    extras = sorted({*state.get("extras", []), extra} - {""})
    want = {"key": _key(), "options": options, "extras": extras}
    done = state == want and Path(venv_program("kvedge")).exists()
    if done and not force and not os.environ.get("LLAMA_CPP_SOURCE_DIR"):
        return
    BUILD.mkdir(exist_ok=True)
    LOG.write_bytes(b"")
    STATE.unlink(missing_ok=True)
    _pip("installing build tools", "install", *_build_requirements())
    target = str(ROOT) + (f"[{','.join(extras)}]" if extras else "")
    settings = [f"--config-settings=cmake.define.{o}" for o in options]
    how = ["install", "-v", "--no-build-isolation", *settings, "-e", target]
    _pip("building kvedge (minutes the first time)", *how)
    STATE.write_text(json.dumps(want), encoding="utf-8")


def _build_requirements() -> list[str]:
    # tomllib needs Python 3.11
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^requires = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise SourceError("pyproject.toml has no build requirements")
    return list(ast.literal_eval(found[1]))


def _pip(what: str, *args: str) -> None:
    run_logged([venv_program("python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *args], what)


def _read_state() -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        state = json.loads(STATE.read_text(encoding="utf-8"))
        if isinstance(state, dict):
            return state
    return {}


def _key() -> str:
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    digest.update(json.dumps([os.environ.get(name) for name in VARIABLES]).encode())
    # an editable install maps modules to files, so a module that became a folder needs a new install
    found = [path for name in ("pykvedge", "kvedge_lab") for path in ROOT.glob(f"{name}/**/__init__.py")]
    digest.update(json.dumps(sorted(str(path.relative_to(ROOT).parent) for path in found)).encode())
    return digest.hexdigest()


def run_logged(command: list[str], what: str) -> None:
    """Runs a command, with output in the log and progress on stderr. Raises SourceError when the command fails."""
    BUILD.mkdir(exist_ok=True)
    # pip settings that only make sense outside a virtual environment
    full = {**os.environ, "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
    progress = Progress(what)
    lines: list[str] = []
    with LOG.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=full, encoding="utf-8",
                              errors="replace") as child:  # fmt: skip
            assert child.stdout is not None
            for line in child.stdout:
                out.write(line)
                out.flush()
                lines.append(line.rstrip())
                progress.see(line)
    progress.end(child.returncode == 0)
    if child.returncode != 0:
        raise SourceError(f"{what.split(' (')[0]} failed: {_cause(lines)} (all of it: {LOG.relative_to(ROOT)})")


def _cause(lines: list[str]) -> str:
    """Returns the line of a failed command's output that most likely names the cause."""
    patterns = (r"\berror: (?!subprocess|metadata|legacy)", r"\bFAILED\b", r"^\s*ERROR: |^CMake Error|\*\*\*")
    for pattern in patterns:
        for line in lines:
            if re.search(pattern, line):
                hint = "; is the package index reachable?" if "from versions: none" in line else ""
                return re.sub(r"^(error|ERROR): ", "", line.strip()) + hint
    return next((line for line in reversed(lines) if line.strip()), "no output").strip()


class Progress:
    """Shows one line for each step on stderr: a moving counter on a terminal, an occasional line in a log."""

    _STEP = re.compile(r"\[(\d+)/(\d+)\]")

    def __init__(self, what: str) -> None:
        self.what = what
        self.terminal = sys.stderr.isatty()
        self.shown = 0
        self._draw("") if self.terminal else log(f"{what} ...")

    def see(self, line: str) -> None:
        found = self._STEP.search(line)
        if not found or int(found[2]) < 10:
            return
        if self.terminal:
            self._draw(f" {found[1]}/{found[2]}")
        elif int(found[1]) * 10 // int(found[2]) > self.shown:
            self.shown = int(found[1]) * 10 // int(found[2])
            log(f"  {found[1]}/{found[2]}")

    def end(self, good: bool) -> None:
        if self.terminal:
            self._draw(" done\n" if good else " failed\n")

    def _draw(self, text: str) -> None:
        print(f"\r\033[K{self.what} ...{text}", end="", file=sys.stderr, flush=True)
