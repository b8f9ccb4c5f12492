"""The native tests under the address, undefined-behaviour and thread sanitizers.

    python3 scripts/dev.py sanitize [address,undefined] [thread]

Each is a build of its own of native/ without llama.cpp (build/native/SANITIZER), about a minute on two cores. Tests
that need llama.cpp are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from llama_source import SourceError, log
from native_build import build_native

SANITIZERS = ("address,undefined", "thread")  # the first two get on with each other in one build


def run_tests(sanitizer: str) -> list[str]:
    """Builds and runs the tests; names of those that failed. Raises SourceError when the build fails."""
    options = {"KVEDGE_SANITIZE": sanitizer, "CMAKE_BUILD_TYPE": "RelWithDebInfo"}
    programs = build_native(sanitizer.replace(",", "-"), ["kvedge-tests"], **options)
    tests = sorted(p for p in Path(programs).glob("test_*") if p.is_file() and p.suffix in ("", ".exe"))
    if not tests:
        raise SourceError(f"{programs} holds no tests")
    failed = []
    for test in tests:
        log(f"{sanitizer}: {test.name}")
        if subprocess.run([test], stdout=sys.stderr, check=False).returncode != 0:
            failed.append(f"{test.stem} under the {sanitizer} sanitizer")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizer", nargs="*", metavar="SANITIZER", help=f"{' or '.join(SANITIZERS)} (default: both)")
    args = parser.parse_args()
    for name in args.sanitizer:
        if name not in SANITIZERS:
            parser.error(f"there is no {name}: {' or '.join(SANITIZERS)}")
    try:
        failed = [test for name in args.sanitizer or SANITIZERS for test in run_tests(name)]
    except (SourceError, OSError) as error:
        log(f"error: {error}")
        return 1
    for test in failed:
        log(f"error: {test} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
