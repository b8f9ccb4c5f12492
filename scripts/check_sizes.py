"""Finds files, functions and parameter lists that are too long.

    python3 scripts/dev.py lint        runs this after ruff

The limits: 600 lines for a source, 1,000 for a header or a test, 60 for a function; 7 parameters, not counting `self`,
`cls` and `err` (the kvedge_error at the end of functions in C). lizard measures C, C++ and Python. Prints one line for
each finding, in ruff's form.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pykvedge", "kvedge_lab", "native", "scripts", "tests", "examples")
SUFFIXES = (".py", ".c", ".cpp", ".h")
FOREIGN = ("pykvedge/bindings",)  # code of other projects, where it is installed

FILE_LINES, LONG_LINES, FUNCTION_LINES, PARAMETERS = 600, 1000, 60, 7


def sources() -> Iterator[Path]:
    """Yields the files that the limits apply to."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and not path.relative_to(ROOT).as_posix().startswith(FOREIGN):
                yield path


def parameters(function: Any) -> int:
    """Returns the number of values that a caller passes."""
    return sum(name.lstrip("*") not in ("self", "cls", "err", "") for name in function.parameters)


def most_lines(path: Path) -> int:
    """Returns the largest number of lines that a file may have."""
    is_test = "tests" in path.relative_to(ROOT).parts
    return LONG_LINES if is_test or path.suffix == ".h" else FILE_LINES


def offences(path: Path) -> Iterator[str]:
    """Yields one line for each limit that a file exceeds, with the place."""
    import lizard

    name = path.relative_to(ROOT).as_posix()
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > most_lines(path):
        yield f"{name}:{most_lines(path) + 1}:1: the file has {lines} lines, {most_lines(path)} at most"
    for function in lizard.analyze_file(str(path)).function_list:
        place = f"{name}:{function.start_line}:1: {function.name}"
        if function.length > FUNCTION_LINES:
            yield f"{place} has {function.length} lines, {FUNCTION_LINES} at most"
        if parameters(function) > PARAMETERS:
            yield f"{place} takes {parameters(function)} parameters, {PARAMETERS} at most"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = [offence for path in sources() for offence in offences(path)]
    for offence in found:
        print(offence)
    if found:
        print("error: split by idea, not by length; docs/dev/design.md says where things belong", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
