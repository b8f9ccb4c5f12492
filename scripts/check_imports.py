"""Finds imports, and attributes of imported modules, whose names do not exist in this tree, for example moved names.

    python3 scripts/dev.py lint        runs this after ruff

Reads the sources in scripts, tests and experiments without importing them. A module's names are those that its lines
outside functions and classes bind; a package also has its modules. Modules outside this tree are ignored. Prints one
line for each finding, in ruff's form.
"""

import argparse
import ast
import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("scripts", "tests", "experiments")
PACKAGES = (ROOT, *(ROOT / name for name in (*FOLDERS, "examples/desktop")))  # where modules are searched
ALWAYS = {"__doc__", "__file__", "__name__", "__path__"}  # names of every module
NAMING = (ast.Import, ast.ImportFrom, ast.Name, ast.Attribute, ast.arg)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Found = Iterator[tuple[int, str]]  # line, message


@functools.cache
def find(name: str, folder: Path) -> Path | None:
    """Returns the file or folder of the module `name`, imported by a file in `folder`. None: outside this tree."""
    for root in (folder, *PACKAGES):
        path = root.joinpath(*name.split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if path.is_dir() and any(path.glob("*.py")):
            return path
    return None


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Returns the nodes of a file that contain names."""
    return [node for node in ast.walk(tree(path)) if isinstance(node, NAMING)]


def outer(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields statements and targets outside functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, (*SCOPES, ast.expr)) or isinstance(node, (ast.Tuple, ast.List, ast.Starred)):
            yield from outer(ast.iter_child_nodes(node))


def called(alias: ast.alias, node: ast.AST) -> str:
    """Returns the name that an import binds."""
    return alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)


@functools.cache
def own_names(file: Path) -> frozenset[str]:
    """Returns the names that a module's code binds; the empty set if the file does not exist."""
    if not file.is_file():
        return frozenset()
    found = set(ALWAYS)
    for node in outer(tree(file).body):
        if isinstance(node, SCOPES):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {called(alias, node) for alias in node.names}
    return frozenset(found)


def lacks(module: Path, name: str) -> bool:
    if module.is_dir():
        return name not in own_names(module / "__init__.py") | ALWAYS and not find(name, module)
    return name not in own_names(module)


def missing_imports(node: ast.AST, folder: Path) -> Found:
    """Yields the names that an import takes from a module of this tree, and that the module does not have."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if find(alias.name.split(".")[0], folder) and not find(alias.name, folder):
                yield node.lineno, f"there is no module {alias.name}"
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        module = find(node.module, folder)
        if module:
            gone = [alias.name for alias in node.names if alias.name != "*" and lacks(module, alias.name)]
            yield from ((node.lineno, f"{node.module} has no name {name}") for name in gone)
        elif find(node.module.split(".")[0], folder):
            yield node.lineno, f"there is no module {node.module}"


def module_of(alias: ast.alias, node: ast.Import | ast.ImportFrom, folder: Path) -> Path | None:
    """Returns the module of this tree that an import binds to a name. None: the name is not such a module."""
    if isinstance(node, ast.Import):
        return find(alias.name if alias.asname else called(alias, node), folder)
    package = find(node.module, folder) if node.module and not node.level else None
    if not package or package.is_file() or alias.name in own_names(package / "__init__.py"):
        return None
    return find(f"{node.module}.{alias.name}", folder)


def missing_attributes(path: Path) -> Found:
    """Yields uses of `module.name` where the module is in this tree and does not have the name.

    Names that the file also binds to something else are ignored.
    """
    bound: dict[str, set[Path | None]] = {}
    for node in nodes(path):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                bound.setdefault(called(alias, node), set()).add(module_of(alias, node, path.parent))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.setdefault(node.id, set()).add(None)
        elif isinstance(node, ast.arg):
            bound.setdefault(node.arg, set()).add(None)
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            modules = bound.get(node.value.id, {None})
            if None not in modules and all(lacks(module, node.attr) for module in modules):
                yield node.lineno, f"{node.value.id} has no name {node.attr}"


def offences(path: Path) -> Iterator[str]:
    """Yields a line for each missing name in a file, with its line and column."""
    imports = [node for node in nodes(path) if isinstance(node, NAMING[:2])]
    found = {offence for node in imports for offence in missing_imports(node, path.parent)}
    for line, what in sorted(found | {*missing_attributes(path)}):
        yield f"{line}:1: {what}"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    gc.disable()  # syntax trees have many objects and no cycles, so garbage collection would only cost time
    sources = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path.relative_to(ROOT).as_posix()}:{offence}" for path in sources for offence in offences(path)]
    for offence in found:
        print(offence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
