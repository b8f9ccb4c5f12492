"""Compares the structs of llama.cpp that the Python bindings mirror: the pin against another source.

The C++ compiler tells sizes and offsets for both sets of headers. The fields are those that the bindings list.
"""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import llama_source as pinned
from llama_source import BINDINGS, LLAMA, Part, SourceError

# module of the bindings: headers that it mirrors
MODULES = {"llama_cpp.py": ("llama.h",), "mtmd_cpp.py": ("mtmd.h", "mtmd-helper.h")}


def mirrored(path: Path) -> dict[str, list[str]]:
    """Returns {struct: fields} of a module of the bindings."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if isinstance(item, ast.Assign) and getattr(item.targets[0], "id", "") == "_fields_":
                pairs = getattr(item.value, "elts", [])
                found[node.name] = [ast.literal_eval(pair.elts[0]) for pair in pairs]
    return found


def layout(tree: Path, bindings: Path, work: Path) -> dict[str, str]:
    """Returns {struct: size, struct.field: offset and size}, or "not in the header" for a missing one."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if not compiler:
        raise SourceError("a C++ compiler is missing: it says the sizes of structs")
    found: dict[str, str] = {}
    for module, headers in MODULES.items():
        wanted = []
        for struct, fields in mirrored(bindings / "llama_cpp" / module).items():
            wanted.append((struct, f"sizeof({struct})", "0"))
            wanted += [(f"{struct}.{f}", f"sizeof((({struct} *) 0)->{f})", f"offsetof({struct}, {f})") for f in fields]
        lines = ["#include <cstddef>", "#include <cstdio>", *(f'#include "{name}"' for name in headers), "int main() {"]
        lines += [f'printf("%s %zu %zu\\n", "{name}", (size_t) {size}, (size_t) {at});' for name, size, at in wanted]
        lines += ["}"]
        source, program = work / "structs.cpp", work / "structs"
        folders = [f"-I{tree / folder}" for folder in ("include", "ggml/include", "tools/mtmd")]
        for _ in range(2):  # the second round leaves out the lines that the compiler refused
            source.write_text("\n".join(lines) + "\n", encoding="utf-8")
            done = subprocess.run([compiler, "-w", "-fmax-errors=0", *folders, str(source), "-o", str(program)],
                                  capture_output=True, text=True, errors="replace", check=False)  # fmt: skip
            for number in {int(n) for n in re.findall(r"structs\.cpp:(\d+):\d+: error", done.stderr)}:
                found[lines[number - 1].split('"')[3]] = "not in the header"
                lines[number - 1] = ""
        if done.returncode:
            raise SourceError(f"{headers[0]} of {tree} cannot be compiled: {done.stderr.strip().splitlines()[0]}")
        for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
            name, size, at = line.split()
            found[name] = f"at {at}, {size} bytes" if "." in name else f"{size} bytes"
    return found


def struct_changes(work: Path, sdist: Path, llama: Part, bindings: Part) -> list[str]:
    """Compares the pin with another source. Returns a line for each struct or field that differs."""
    layouts = []
    for name, archive, parts in (("old", pinned.fetch(), (LLAMA, BINDINGS)), ("new", sdist, (llama, bindings))):
        place = work / f"structs-{name}"
        shutil.rmtree(place, ignore_errors=True)
        for part in parts:
            pinned.unpack(archive, place / part.name, part)
        layouts.append(layout(place / LLAMA.name, place / BINDINGS.name, place))
        shutil.rmtree(place)
    old, new = layouts
    return [
        f"{name}: {old.get(name, 'not there')} -> {new.get(name, 'not there')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
