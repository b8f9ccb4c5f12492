"""Which test files are likely to notice a change of a module: those that are near it by imports and by name.

A test file is near a module that it imports, and less near what that imports in turn. `pykvedge.Session` counts as an
import of the module that defines Session, a word like "calibrate" that is a command as one of the command's module.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

FAR = 9  # steps, of a module that a test file does not reach
SHARED = ("conftest",)  # what every test file uses says nothing


def module_of(path: Path, root: Path) -> str:
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return name.removesuffix(".__init__")


class LikelyTests:
    """Ranks the test files of a tree."""

    def __init__(self, root: Path) -> None:
        self._tests = root / "tests"
        paths = [path for name in ("pykvedge", "kvedge_lab") for path in sorted((root / name).rglob("*.py"))]
        self._sources = {module_of(path, root): path for path in paths}
        self._trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self._sources.items()}
        self._texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(self._tests.glob("*.py"))}
        self.files = [name for name in self._texts if name.startswith("test_")]

    @cached_property
    def _definers(self) -> dict[str, set[str]]:
        """Name of a function or class -> the modules that define it."""
        found: dict[str, set[str]] = defaultdict(set)
        for module, tree in self._trees.items():
            for node in tree.body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    found[node.name].add(module)
        return found

    @cached_property
    def _graph(self) -> dict[str, set[str]]:
        """Module -> the modules that it imports; what nobody imports is looked for by those that load by name."""
        found = {module: self._imported(tree) - {module} for module, tree in self._trees.items()}
        alone = self._trees.keys() - set().union(*found.values())
        for module, path in self._sources.items():
            if "import_module(" in path.read_text(encoding="utf-8"):
                found[module] |= alone - {module}
        return found

    def _imported(self, tree: ast.AST) -> set[str]:
        """Modules of the package that a file imports; of `from package import name` the module that it is, or has."""
        out = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                out |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                out |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        return (out & self._sources.keys()) - {"pykvedge"}

    @cached_property
    def _direct(self) -> dict[str, set[str]]:
        """Test file -> the modules that it uses by itself, or through helpers among the tests."""
        own = {name: self._used(text) for name, text in self._texts.items()}
        imports = re.compile(r"^from (\w+) import", re.MULTILINE)
        helpers = {name: set(imports.findall(text)) for name, text in self._texts.items()}
        out = {}
        for name in self.files:
            out[name] = set(own[name])
            for helper in (helpers[name] & self._texts.keys()) - set(SHARED):
                out[name] |= own[helper]
        return out

    def _used(self, text: str) -> set[str]:
        used = self._imported(ast.parse(text))
        for name in re.findall(r"\bpykvedge\.(\w+)", text):
            used |= self._definers.get(name, set())
        if "kvedge(" in text or "CliRunner" in text:
            words = set(re.findall(r"[\"']([a-z][a-z-]+)[\"']", text))
            names = [word.replace("-", "_") for word in words]
            commands = {f"{package}.{name}" for package in ("pykvedge.cli", "kvedge_lab.commands") for name in names}
            used |= {"pykvedge.cli.program", *commands} & self._sources.keys()
        return used

    def _steps(self, test: str) -> dict[str, int]:
        """Module -> how many imports it is away from a test file."""
        reached = dict.fromkeys(self._direct[test], 1)
        border = list(reached)
        while border:
            border_next = []
            for module in border:
                for other in self._graph[module] - reached.keys():
                    reached[other] = reached[module] + 1
                    border_next.append(other)
            border = border_next
        return reached

    @cached_property
    def _reached(self) -> dict[str, dict[str, int]]:
        return {test: self._steps(test) for test in self.files}

    def of(self, path: str, inside: Iterable[str]) -> list[str]:
        """Ranks test files for a change in a file of the package, the likeliest first; those out of reach are left out.

        path: relative to the tree. inside: the functions and classes around the change.
        """
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        package, _, stem = module.rpartition(".")
        room, names = package.rpartition(".")[2], [n for n in inside if not n.startswith("__") and len(n) > 3]

        words = [re.compile(rf"\b{re.escape(name)}\b") for name in names]
        naming = [{test for test in self.files if word.search(self._texts[test])} for word in words]

        def score(test: str) -> float:
            text, steps = self._texts[test], self._reached[test].get(module, FAR)
            named = sum(len(tests) ** -0.5 for tests in naming if test in tests)  # what few name says more
            of, mine = test.removeprefix("test_").replace("_", ""), stem.replace("_", "")
            alike = 6 if of == mine else 3 if mine in of or of in mine or of == room else 0
            return 5 * named + alike + (stem in text) - steps - 0.02 * len(self._direct[test])

        near = [test for test in self.files if module in self._reached[test] or score(test) > 0]
        return [f"tests/{test}.py" for test in sorted(near, key=score, reverse=True)]
