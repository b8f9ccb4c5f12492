"""Builds the unpatched libllama and ggml of the pin into build/stock/lib: the baseline of measurements and tests.

Of patches/, only the mends are applied (see patches/README.md): without them llama.cpp crashes on some machines. The
compilers, flags and backends are those of kvedge's build, so a difference between the two comes from the patches or
kvedge. Prints the folder; use it as LLAMA_CPP_LIB_PATH.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from llama_source import MENDS, ROOT, SHA256, SourceError, ended, file_sha256, log, prepare

STOCK = ROOT / "build" / "stock"
PATCHES = ROOT / "patches"


def find_build() -> Path:
    """Returns the newest build folder of kvedge. Ignores other build folders, for example of a single backend."""
    folders = [p.parent for p in (ROOT / "build").glob("*/CMakeCache.txt")]
    builds = [folder for folder in folders if (folder / "llama.cpp").is_dir() and ggml_libraries(folder)]
    if not builds:
        raise SourceError("kvedge is not built yet: run python3 scripts/dev.py build")
    return max(builds, key=lambda b: max(p.stat().st_mtime for p in ggml_libraries(b)))


def ggml_libraries(build: Path) -> list[Path]:
    suffixes = (".so", ".dylib", ".dll")
    return sorted(p for p in (build / "bin").glob("*ggml*") if p.suffix in suffixes and p.is_file())


def tool(name: str) -> str:
    """Returns the path of cmake or ninja: from this Python's environment, else from PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        raise SourceError(f"{name} is missing: python3 scripts/dev.py test brings it, or pip install {name}")
    return found


def state(build: Path) -> dict[str, object]:
    """Returns everything that the baseline depends on."""
    cache = (build / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    kinds = ("CMAKE_BUILD_TYPE", "CMAKE_C", "CMAKE_SHARED", "KVEDGE_PORT", "KVEDGE_AMX_USED", "GGML_")
    flags = sorted(line for line in cache if line.startswith(kinds))
    files = [Path(__file__), *sorted((ROOT / "cmake").glob("**/*.cmake")), ROOT / "cmake" / "stock" / "CMakeLists.txt"]
    mends = [file_sha256(p) for p in sorted(PATCHES.glob(MENDS))]
    return {"source": SHA256, "mends": mends, "flags": flags, "how": [f.read_text(encoding="utf-8") for f in files]}


def build_stock(build: Path) -> Path:
    lib, stamp = STOCK / "lib", STOCK / "stamp.json"
    want = state(build)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(stamp.read_text(encoding="utf-8")) == want and any(lib.iterdir()):
            return lib
    stamp.unlink(missing_ok=True)
    prepare(STOCK / "llama.cpp", None, PATCHES, MENDS)
    log("building the unpatched llama.cpp (the baseline)")
    work = STOCK / "work"
    options = {"KVEDGE_BUILD": build.as_posix(), "KVEDGE_LLAMA_DIR": (STOCK / "llama.cpp").as_posix()}
    cmake(ROOT / "cmake" / "stock", work, options)
    shutil.rmtree(lib, ignore_errors=True)
    lib.mkdir(parents=True)
    for library in (work / "bin").iterdir():
        if library.is_file():
            shutil.copy2(library, lib / library.name)
    stamp.write_text(json.dumps(want), encoding="utf-8")
    return lib


def cmake(source: Path, folder: Path, options: Mapping[str, str] | None, *targets: str) -> None:
    """Configures with CMake (options None: does not configure), and builds with Ninja.

    Raises SourceError when a tool is missing or a step fails.
    """
    given = {"CMAKE_MAKE_PROGRAM": tool("ninja"), **(options or {})}
    configure = [tool("cmake"), "-S", str(source), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-D{key}={value}" for key, value in given.items()]
    build = [tool("cmake"), "--build", str(folder), *(["--target", *targets] if targets else [])]
    for command in (build,) if options is None else (configure, build):
        # stdout is reserved for the result
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            raise SourceError(f"the build in {folder} failed; its messages are above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build", type=Path, metavar="DIR", help="kvedge's build folder (default: the newest in build/)"
    )
    args = parser.parse_args()
    print(build_stock((args.build or find_build()).resolve()))


if __name__ == "__main__":
    sys.exit(ended(main))
