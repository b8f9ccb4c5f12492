"""Checks that pyproject.toml, CHANGELOG.md, CITATION.cff and the release's tag state the same version."""

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path


def faults(root: Path, tag: str = "") -> Iterator[str]:
    """Yields one line for each disagreement. tag: the release's tag; empty between releases."""
    version = _found(root / "pyproject.toml", r'^version = "([^"]*)"')
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"pyproject.toml: version '{version}' is not of the form X.Y.Z"
    cited = _found(root / "CITATION.cff", r"^version: (\S+)")
    if cited != version:
        yield f"CITATION.cff: version {cited or 'is missing'}, pyproject.toml says {version}"
    sections = re.findall(r"^## (.*)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if not sections or sections[0] != "[Unreleased]":
        yield "CHANGELOG.md: its first section must be '## [Unreleased]'"
    dated = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", section) for section in sections[1:]]
    for section, match in zip(sections[1:], dated, strict=True):
        if not match or not _is_date(match[2]):
            yield f"CHANGELOG.md: '## {section}' must be '## [X.Y.Z] - YYYY-MM-DD'"
    numbers = [tuple(map(int, match[1].split("."))) for match in dated if match]
    if numbers != sorted(set(numbers), reverse=True):
        yield "CHANGELOG.md: the newest version comes first, each once"
    if tag:
        yield from _of_release(root, tag, version, next((match for match in dated if match), None))


def _of_release(root: Path, tag: str, version: str, newest: re.Match[str] | None) -> Iterator[str]:
    if tag != f"v{version}":
        yield f"the tag is {tag}, pyproject.toml says v{version}"
    if not newest or newest[1] != version:
        yield f"CHANGELOG.md: the newest version must be {version}, with the day of its release"
        return
    unreleased = (root / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1].partition("\n")[2]
    if unreleased.strip():
        yield "CHANGELOG.md: '[Unreleased]' must be empty; move its lines below the version"
    cited = _found(root / "CITATION.cff", r"^date-released: (\S+)")
    if cited != newest[2]:
        yield f"CITATION.cff: date-released {cited or 'is missing'}, CHANGELOG.md says {newest[2]}"


def _found(path: Path, pattern: str) -> str:
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].strip("\"'") if found else ""


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
