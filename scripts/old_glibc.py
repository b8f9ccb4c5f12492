"""Lets this system's GCC link libraries that run with glibc 2.27 and the C++ library of GCC 7, as manylinux_2_27 asks.

    python3 scripts/old_glibc.py FOLDER COMPILER     # cmake/Portable.cmake calls it, and passes -LFOLDER to the linker

A library asks for each function in the newest version that the linker saw. glibc keeps the old versions. So the folder
gets stand-ins for libc, libm, libpthread, libdl and libstdc++ with the same names, but only with versions up to 2.27. A
later function comes from the static libstdc++ or from old_glibc.c; for any other the linker reports an error. Programs
still run the functions of the user's system; the stand-ins are not installed.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from llama_source import SourceError, ended

NEWEST = {"GLIBC": (2, 27), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
SYMBOL = re.compile(r"(FUNC|IFUNC|OBJECT)\s+(?:GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+\d+\s+([\w.$]+)(@@?)([A-Z]+)_([\d.]+)$")
Versions = dict[str, tuple[str, int, str, bool]]  # symbol: (type, size, version, whether glibc 2.34 moved it to libc)


def symbols(library: Path) -> Versions:
    """Returns the symbols of a library, each in the newest version that NEWEST allows."""
    found: dict[str, list[tuple[tuple[int, ...], str, str, int]]] = defaultdict(list)
    moved = set()
    for line in run(["readelf", "--dyn-syms", "-W", str(library)]).splitlines():
        if not (match := SYMBOL.search(line)):
            continue
        kind, name, mark, family, number = match.groups()
        version = tuple(map(int, number.split(".")))
        if version <= NEWEST.get(family, ()):
            size = int(line.split()[2], 0)
            found[name].append((version, f"{family}_{number}", kind, size))
        elif mark == "@@":
            moved.add(name)
    newest = {name: max(all_of) for name, all_of in found.items()}
    return {name: (kind, size, version, name in moved) for name, (_, version, kind, size) in newest.items()}


def stand_in(made: Path, soname: str, offered: Versions, compiler: str) -> None:
    """Links a library that has symbols and no code."""
    lines, script = [], []
    for name, (kind, size, _, _) in sorted(offered.items()):
        what = "object" if kind == "OBJECT" else "function"
        section = ".data" if kind == "OBJECT" else ".text"
        lines.append(
            f'{section}\n.globl "{name}"\n.type "{name}", %{what}\n.size "{name}", {size}\n"{name}": .zero 16\n'
        )
    for version in sorted({version for _, _, version, _ in offered.values()}):
        names = "".join(f' "{n}";' for n, (_, _, v, _) in sorted(offered.items()) if v == version)
        script.append(f"{version} {{ global:{names} }};\n")
    source, versions = made.with_suffix(".s"), made.with_suffix(".map")
    source.write_text("".join(lines), encoding="ascii")
    versions.write_text("".join(script), encoding="ascii")
    command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script={versions}"]
    run([*command, "-o", str(made), str(source)])


def path_of(compiler: str, name: str) -> Path:
    """Returns the compiler's path of a library, or only the name if the compiler has no path."""
    return Path(run([compiler, f"-print-file-name={name}"]).strip())


def where(compiler: str, name: str) -> Path:
    """Returns the path of a library. Raises SourceError if the compiler does not have it."""
    path = path_of(compiler, name)
    if not path.is_absolute():
        raise SourceError(f"{compiler} has no {name}; a portable build for Linux needs GCC and glibc")
    return path


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SourceError(f"{command[0]} failed: {(done.stderr.splitlines() or ['without a word'])[0]}")
    return done.stdout


def main() -> None:
    folder, compiler = Path(sys.argv[1]).resolve(), sys.argv[2]  # absolute: the linker script contains paths in it
    folder.mkdir(parents=True, exist_ok=True)
    libc = symbols(where(compiler, "libc.so.6"))
    threads: Callable[[str], bool] = re.compile(r"(__)?pthread_|sem_").match  # type: ignore[assignment]
    parts = {
        "pthread": {n: v for n, v in libc.items() if v[3] and threads(n)},
        "dl": {n: v for n, v in libc.items() if v[3] and n.startswith("dl")},
        "m": symbols(where(compiler, "libm.so.6")),
    }
    parts["c-old"] = {n: v for n, v in libc.items() if n not in parts["pthread"] and n not in parts["dl"]}
    parts["stdc++-old"] = symbols(where(compiler, "libstdc++.so.6"))
    sonames = {"pthread": "libpthread.so.0", "dl": "libdl.so.2", "m": "libm.so.6", "c-old": "libc.so.6",
               "stdc++-old": "libstdc++.so.6"}  # fmt: skip
    for name, offered in parts.items():
        stand_in(folder / f"lib{name}.so", sonames[name], offered, compiler)
    source = Path(__file__).with_name("old_glibc.c")
    run([compiler, "-x", "c", "-c", "-O2", "-fPIC", "-ffunction-sections", str(source), "-o", str(folder / "old.o")])
    (folder / "libnew.a").unlink(missing_ok=True)
    run(["ar", "rcsD", str(folder / "libnew.a"), str(folder / "old.o")])
    loader = next(p for p in ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1") if path_of(compiler, p).is_absolute())
    nonshared, start = where(compiler, "libc_nonshared.a"), where(compiler, loader)
    rest = f"{folder}/libnew.a {nonshared} AS_NEEDED({folder}/libpthread.so {folder}/libdl.so {start})"
    (folder / "libc.so").write_text(f"GROUP({folder}/libc-old.so {rest})\n", encoding="utf-8")
    static = where(compiler, "libstdc++.a")
    (folder / "libstdc++.so").write_text(f"INPUT({folder}/libstdc++-old.so {static})\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(ended(main))
