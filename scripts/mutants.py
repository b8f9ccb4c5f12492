"""Makes small random changes of the Python package, and reports the changes that no test notices.

    python3 scripts/dev.py python scripts/mutants.py --seed 1 --count 20
    python3 scripts/dev.py python scripts/mutants.py --seed 1 --count 60 --paths pykvedge/models

A change replaces a comparison, a number, a call, the order of two arguments, a boolean or a returned value. Each change
is tried with the nearest test files by imports and names (--files of them), one after the other, until a test fails
that passes without the change. No file is touched: programs that import the module get the changed text, so an
interrupted run leaves nothing behind. stdout: a patch for each unnoticed change; a reader must decide whether a test is
missing or the change has no effect. stderr: a line for each change.
"""

import argparse
import contextlib
import difflib
import functools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from llama_source import ROOT
from mutant_sites import KINDS, Site, compiles, sites

# Every Python that is started below imports this first: it replaces the text of one module by the changed text.
HOOK = '''
import importlib.machinery, os, sys
original, changed = os.environ["KVEDGE_MUTANT"].split(os.pathsep)

class Changed(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        with open(changed, "rb") as file:
            return compile(file.read(), self.path, "exec", dont_inherit=True)

class Finder:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname.partition(".")[0] not in ("pykvedge", "kvedge_lab"):
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not Finder else None
            if spec is not None:
                if spec.origin and os.path.realpath(spec.origin) == original:
                    spec.loader = Changed(fullname, spec.origin)
                return spec
        return None

def started(event, values):  # the package runs two of its files with -I, which hears of no hook
    if event == "subprocess.Popen" and "-I" in values[1]:
        values[1][:] = [word.replace(original, changed) for word in values[1] if word != "-I"]

sys.meta_path.insert(0, Finder)
sys.addaudithook(started)
'''


@dataclass
class Mutant:
    """A change of a file and its outcome: "killed", "hung" (by the time limit) or "alive"."""

    path: str
    kind: str
    line: int
    patch: str
    text: str = field(repr=False)
    inside: tuple[str, ...] = ()
    outcome: str = ""
    by: str = ""  # the failed test
    tried: list[str] = field(default_factory=list)
    seconds: float = 0.0


def made(path: str, source: str, site: Site) -> Mutant:
    text = site.applied(source)
    lines = difflib.unified_diff(source.splitlines(), text.splitlines(), f"a/{path}", f"b/{path}", lineterm="", n=1)
    return Mutant(path, site.kind, site.line, "\n".join(lines), text, site.inside)


def drawn(paths: list[Path], seed: int, count: int) -> list[Mutant]:
    """Draws distinct changes: first the kind, then a random place of that kind."""
    rng = random.Random(f"mutants {seed}")
    sources = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    of_kind: dict[str, list[tuple[str, Site]]] = {kind: [] for kind in KINDS}
    for path, source in sources.items():
        for site in sites(source):
            of_kind[site.kind].append((path, site))
    out: list[Mutant] = []
    while len(out) < count and any(of_kind.values()):
        group = of_kind[rng.choice([kind for kind in KINDS if of_kind[kind]])]
        path, site = group.pop(rng.randrange(len(group)))
        mutant = made(path, sources[path], site)
        if compiles(mutant.text):
            out.append(mutant)
    return out


@functools.cache
def _test_texts() -> dict[str, str]:
    """Returns {name: text} of the test files."""
    return {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}


def likely_tests(path: str, inside: Iterable[str]) -> list[str]:
    """Returns the test files that may notice a change of a file, the likeliest first.

    Such a test names the module, the changed function or the package. path: relative to the tree. inside: the functions
    and classes around the change.
    """
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, stem = module.rpartition(".")
    mine, room, texts = stem.replace("_", ""), package.rpartition(".")[2], _test_texts()
    names = [name for name in inside if not name.startswith("__") and len(name) > 3]
    words = [re.compile(rf"\b{re.escape(word)}\b") for word in (*names, stem, module)]
    naming = [{test for test, text in texts.items() if word.search(text)} for word in words]
    imported = f"from {package} import"

    def score(test: str) -> float:
        of, text = test.removeprefix("test_").removesuffix(".py").replace("_", ""), texts[test]
        alike = 6 if of in (mine, room + mine) else 3 if mine in of or of in mine or of == room else 0
        named = sum(len(tests) ** -0.5 for tests in naming if test in tests)  # a rare word says more
        return 5 * named + alike + (imported in text and stem in text)

    return [f"tests/{test}" for test in sorted(texts, key=lambda test: (-score(test), test)) if score(test)]


class Runner:
    """Runs tests with and without a change."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._changed = folder / "changed.py"
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        self._known: dict[str, str] = {}  # test or file -> its result without a change

    def _run(self, test: str, mutant: Mutant | None) -> str:
        """Returns the first failed test, "hung" or "passed"."""
        env = dict(os.environ)
        if mutant is not None:
            self._changed.write_text(mutant.text, encoding="utf-8")
            paths = [str(self._folder / "hook"), *filter(None, [env.get("PYTHONPATH")])]
            env |= {"PYTHONPATH": os.pathsep.join(paths)}
            env |= {"KVEDGE_MUTANT": os.pathsep.join([os.path.realpath(ROOT / mutant.path), str(self._changed)])}
        how = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-rfE", "--no-header", "--tb=no"]
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *how, test], cwd=ROOT, env=env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as running:  # fmt: skip
            try:
                said, _ = running.communicate(timeout=self._limit_s)
            except subprocess.TimeoutExpired:
                return "hung"
            finally:
                end(running)
        if running.returncode in (0, 5):  # 5: no tests remained
            return "passed"
        failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::.*?)?)(?: - .*)?$", said, re.MULTILINE)
        return failed[1] if failed else test

    def fails(self, test: str, mutant: Mutant) -> str:
        """Returns the test that fails because of the change; "" if no test does."""
        failed = self._run(test, mutant)
        if failed == "passed":
            return ""
        where = test if failed == "hung" else failed
        if where not in self._known:
            self._known[where] = self._run(where, None)
        return failed if self._known[where] == "passed" else ""


def end(running: subprocess.Popen[str]) -> None:
    """Ends a run of pytest and all its child processes."""
    with contextlib.suppress(ProcessLookupError):
        if os.name == "posix":
            os.killpg(running.pid, 9)
        else:
            running.kill()


def tried(mutant: Mutant, runner: Runner, tests: list[str]) -> None:
    """Sets the outcome of a mutant."""
    start = time.monotonic()
    mutant.outcome = "alive"
    for test in tests:
        mutant.tried.append(test)
        if failed := runner.fails(test, mutant):
            mutant.outcome, mutant.by = ("hung", test) if failed == "hung" else ("killed", failed)
            break
    mutant.seconds = round(time.monotonic() - start, 1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--seed", type=int, default=1, help="another seed, other changes (default %(default)s)")
    add("--count", type=int, default=20, help="of changes (default %(default)s)")
    add("--paths", nargs="+", type=Path, default=[Path("pykvedge"), Path("kvedge_lab")],
        help="files and folders to change")  # fmt: skip
    add("--files", type=int, default=8, help="test files for each change; 0: all that reach it (default %(default)s)")
    add("--limit", type=float, default=300.0, help="seconds for each test file (default %(default)s)")
    return made


def chosen(args: argparse.Namespace) -> list[Path]:
    """Returns the files that may be changed."""
    out = []
    for place in (ROOT / path for path in args.paths):
        out += [place] if place.is_file() else sorted(place.rglob("*.py"))
    return [path for path in dict.fromkeys(out) if not path.is_relative_to(ROOT / "pykvedge" / "bindings")]


def main() -> int:
    args = parser().parse_args()
    if not (paths := chosen(args)):
        parser().error(f"no Python files in {', '.join(map(str, args.paths))}")
    mutants = drawn(paths, args.seed, args.count)
    with tempfile.TemporaryDirectory(prefix="kvedge-mutants-") as folder:
        runner = Runner(Path(folder), args.limit)
        for i, mutant in enumerate(mutants):
            tests = likely_tests(mutant.path, mutant.inside)
            tests = tests[: args.files] if args.files else tests
            tried(mutant, runner, tests)
            by = mutant.by or f"{len(mutant.tried)} test files"
            place = f"{mutant.path}:{mutant.line} {mutant.kind}"
            print(f"{i + 1:3d} {mutant.outcome:7s}{place}: {by}, {mutant.seconds:.0f} s", file=sys.stderr, flush=True)
    alive = [mutant for mutant in mutants if mutant.outcome == "alive"]
    print("\n\n".join(f"{m.patch}\n# passed: {' '.join(m.tried)}" for m in alive))
    print(f"{len(mutants)} changes, {len(alive)} of them not noticed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
