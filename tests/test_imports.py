"""Layers of the package and of native/src: no file imports or includes a file of a higher layer, no import cycles.

Counts imports inside functions and for type checkers, and names of modules in strings, as importlib takes them. The
sources are read, not imported.
"""

import ast
import functools
import re

import check_imports
from conftest import ROOT

# from the bottom up; the longest matching name decides a module's layer
FLOORS = (
    "pykvedge.errors",
    "pykvedge.system",
    "pykvedge.native",
    "pykvedge.reference.kvtypes",
    "pykvedge.reference.storage",
    "pykvedge.reference.stages",
    "pykvedge.plans.plugins",
    "pykvedge.plans",
    "pykvedge.reference",
    "pykvedge.library",
    "pykvedge.reference.checks",
    "pykvedge.caches",
    "pykvedge.grammars",
    "pykvedge.models",
    "pykvedge.runtime",
    "pykvedge.chat",
    "pykvedge.serve",
    "pykvedge",
    "pykvedge.fit",
    "pykvedge.doctor",
    "pykvedge.cli",
    "kvedge_lab",
    "pykvedge.cli.program",
    "pykvedge.__main__",
)
NATIVE = ROOT / "native" / "src"
# folders of native/src from the bottom up
ROOMS = ("system", "rows", "kernels", "observe", "store", "sequence", "plan", "attention", "primitives", "members",
         "compress", "device", "glue", "api")  # fmt: skip
INCLUDE = re.compile(r'^#include "([\w./-]+)"', re.MULTILINE)
NAME = re.compile(r"(pykvedge|kvedge_lab)(\.\w+)*")


def modules():
    """Returns {name: source file} of every module. The module of a package has the package's name."""
    found = {}
    for path in sorted(p for package in ("pykvedge", "kvedge_lab") for p in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "bindings" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source, known):
    """Yields (module, line) of everything of the package that the code imports or names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            wanted = [name if name in known else node.module for name in inner]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            wanted = [node.value] if "." in node.value else []
        else:
            continue
        yield from ((name, node.lineno) for name in wanted if name in known)


def floor(module):
    fitting = [name for name in FLOORS if module == name or module.startswith(f"{name}.")]
    return FLOORS.index(max(fitting, key=len))


def graph(sources):
    return {name: dict(imports(source, sources)) for name, source in sources.items()}


def going_up(edges):
    """Returns lines about imports from a higher layer."""
    return [
        f"{module}:{line} imports {name}, from above"
        for module, found in edges.items()
        for name, line in found.items()
        if floor(name) > floor(module)
    ]


def circles(edges):
    """Returns import cycles; each cycle once."""
    found, done = [], set()

    def visit(module, path):
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
            return
        if module in done:
            return
        for name in edges[module]:
            visit(name, [*path, module])
        done.add(module)

    for module in edges:
        visit(module, [])
    return found


@functools.cache
def package():
    return graph({name: path.read_text("utf-8") for name, path in modules().items()})


def test_no_module_imports_what_lies_above_it():
    assert going_up(package()) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circles(package()) == []


def test_the_top_level_has_at_most_twenty_entries():
    entries = {path.name for path in (ROOT / "pykvedge").iterdir()} - {"__pycache__", "bindings", "lib", "include"}
    assert len(entries) <= 20, entries


def test_what_this_test_would_find():
    sources = {
        "pykvedge.models.a": "def f():\n    from pykvedge.models import b\n",
        "pykvedge.models.b": "import importlib\nimportlib.import_module('pykvedge.models.c')\n",
        "pykvedge.models.c": "if TYPE_CHECKING:\n    from pykvedge.models.a import f\n",
        "pykvedge.native.d": "from pykvedge import models\nimport pykvedge.models.a\n",
    }
    edges = graph(sources)
    assert circles(edges) == ["pykvedge.models.a -> pykvedge.models.b -> pykvedge.models.c -> pykvedge.models.a"]
    assert going_up(edges) == ["pykvedge.native.d:2 imports pykvedge.models.a, from above"]


def including_up(sources):
    """Returns lines about includes from a higher folder. sources: {name below native/src: text}."""
    rooms = {name: ROOMS.index(name.split("/")[0]) for name in sources}
    return [
        f"{name} includes {other}, from above"
        for name, text in sources.items()
        for other in INCLUDE.findall(text)
        if rooms.get(other, -1) > rooms[name]
    ]


def test_no_native_file_includes_what_lies_above_it():
    found = [path for path in sorted(NATIVE.rglob("*")) if path.suffix in (".h", ".cpp", ".cu")]
    assert including_up({path.relative_to(NATIVE).as_posix(): path.read_text("utf-8") for path in found}) == []


def test_what_the_test_of_includes_would_find():
    sources = {"store/a.h": '#include "plan/b.h"\n#include "system/c.h"\n', "plan/b.h": "", "system/c.h": ""}
    assert including_up(sources) == ["store/a.h includes plan/b.h, from above"]


def test_lint_finds_names_that_are_gone(tmp_path):
    """Also in functions, and in attributes of modules. Modules of other projects are ignored."""
    (tmp_path / "helper.py").write_text("if True:\n    here, [there] = 1, [2]\ndef f():\n    inner = 3\n")
    (tmp_path / "user.py").write_text(
        "from helper import here, inner, there\nimport helper, numpy\nfrom pykvedge import errors, gone\n"
        "def g(numpy):\n    from pykvedge.moved import x\n    helper.f, helper.h, numpy.no, errors.NoError\n"
    )
    assert [*check_imports.offences(tmp_path / "user.py")] == [
        "1:1: helper has no name inner",
        "3:1: pykvedge has no name gone",
        "5:1: there is no module pykvedge.moved",
        "6:1: errors has no name NoError",
        "6:1: helper has no name h",
    ]
