"""Compares the C ABI of libkvedge with the one that is stored in native/abi.

    python3 scripts/dev.py abi            # fails on a break
    python3 scripts/dev.py abi --store    # stores what is there now; refuses a break

A program that was built with the stored ABI must run with the new library. Functions, constants, and fields at the end
of structs that carry their size may come; anything else needs a new KVEDGE_ABI_VERSION (kvedge.h says what that means),
for which --store begins a new file. Needs a C compiler and libabigail (Debian: abigail-tools).

What is looked at are the headers: a library of empty functions is compiled from them, with debug information. The real
one cannot differ: its sources are compiled against the same headers, and tests/test_abi.py holds their exports against
what is declared.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from llama_source import ROOT, SourceError, ended, log

STORED = ROOT / "native" / "abi"
INCLUDE = ROOT / "native" / "include"
PLUGIN = "const kvedge_plugin * kvedge_plugin_v1(void)"  # what others export, and we call
FAILED, USAGE, CHANGED = 1, 2, 4  # abidiff's exit code is a sum of these


def headers() -> str:
    """Reads the text of all headers, without comments."""
    files = (path.read_text(encoding="utf-8") for path in sorted(INCLUDE.glob("*.h")))
    return "\n".join(re.sub(r"//.*", "", text) for text in files)


def abi_version() -> int:
    found = re.search(r"^#define KVEDGE_ABI_VERSION (\d+)", headers(), re.MULTILINE)
    if not found:
        raise SourceError("kvedge.h has no KVEDGE_ABI_VERSION")
    return int(found[1])


def tool(name: str, package: str) -> str:
    if found := shutil.which(name):
        return found
    raise SourceError(f"{name} is missing; Debian: apt install {package}")


def describe(folder: Path) -> Path:
    """Writes what the headers declare in libabigail's XML, without places, which differ between machines."""
    declared = [" ".join(text.split()) for text in re.findall(r"^KVEDGE_API ([^;]+);", headers(), re.MULTILINE)]
    source, library, out = folder / "exports.c", folder / "libkvedge.so", folder / "abi.xml"
    functions = "".join(f"{text} {{ __builtin_trap(); }}\n" for text in [*declared, PLUGIN])
    source.write_text(f'#include "kvedge.h"\n{functions}', encoding="utf-8")
    compiler = tool(os.environ.get("CC", "cc"), "gcc")
    flags = ["-std=c11", "-g", "-O0", "-fPIC", "-shared", f"-I{INCLUDE}", f"-fdebug-prefix-map={folder}=."]
    subprocess.run([compiler, *flags, "-o", library, source], stdout=sys.stderr, check=True)
    command = [tool("abidw", "abigail-tools"), "--no-comp-dir-path", "--no-corpus-path", "--no-show-locs"]
    command += ["--no-parameter-names", "--no-elf-needed", "--out-file", str(out), str(library)]
    subprocess.run(command, stdout=sys.stderr, check=True)
    return out


def same(stored: Path, now: Path) -> bool:
    """Tells whether programs of the stored ABI run; says on stderr what has changed."""
    command = [tool("abidiff", "abigail-tools"), "--no-added-syms", "--suppressions", str(STORED / "growth.ini")]
    done = subprocess.run([*command, str(stored), str(now)], stdout=sys.stderr, check=False)
    if done.returncode & (FAILED | USAGE):
        raise SourceError(f"abidiff ended with code {done.returncode}; its messages are above")
    return not done.returncode & CHANGED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="store the ABI that the headers have now")
    args = parser.parse_args()
    stored = STORED / f"libkvedge-{abi_version()}.xml"
    with tempfile.TemporaryDirectory(prefix="kvedge-abi-") as folder:
        now = describe(Path(folder))
        if stored.is_file() and not same(stored, now):
            log("error: programs built with the stored ABI would break: keep it, or raise KVEDGE_ABI_VERSION")
            return 1
        if not stored.is_file() and not args.store:
            log(f"error: no ABI is stored for version {abi_version()}: python3 scripts/dev.py abi --store")
            return 1
        if args.store:
            for old in STORED.glob("libkvedge-*.xml"):
                old.unlink()
            shutil.copy(now, stored)
    log(f"the ABI is that of {stored.relative_to(ROOT)}" + (", stored now" if args.store else ""))
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
