"""Strict reading and applying of unified diffs: exact context, no fuzz, all or nothing.

A hunk may sit at another line than the one it names (an earlier patch moved it), but every one of its context and
removed lines must be there as they are. Nothing is written here: the result is a map of new file contents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_UNSUPPORTED = (
    "GIT binary patch",
    "Binary files ",
    "rename from ",
    "rename to ",
    "copy from ",
    "copy to ",
    "old mode ",
)


class PatchError(Exception):
    """A patch that cannot be read or does not fit; the message is one line and names patch, file and hunk."""


@dataclass(frozen=True)
class Hunk:
    header: str
    old_start: int  # 1-based, as in the header
    new_start: int
    old: tuple[str, ...]  # context and removed lines, each with its line end
    new: tuple[str, ...]  # context and added lines

    def reversed(self) -> Hunk:
        return Hunk(self.header, self.new_start, self.old_start, self.new, self.old)


@dataclass(frozen=True)
class FilePatch:
    old_path: str | None  # None: the patch creates the file
    new_path: str | None  # None: the patch removes it
    hunks: tuple[Hunk, ...]

    @property
    def path(self) -> str:
        return self.new_path or self.old_path or ""

    def reversed(self) -> FilePatch:
        return FilePatch(self.new_path, self.old_path, tuple(h.reversed() for h in self.hunks))


@dataclass(frozen=True)
class Patch:
    name: str  # file name
    subject: str
    body: str  # the reason, without the subject
    files: tuple[FilePatch, ...]
    added: int  # lines
    removed: int

    def reversed(self) -> Patch:
        return Patch(
            self.name,
            self.subject,
            self.body,
            tuple(f.reversed() for f in self.files),
            self.removed,
            self.added,
        )


@dataclass
class _Cursor:
    name: str
    lines: list[str]
    at: int = 0
    added: int = 0
    removed: int = 0
    files: list[FilePatch] = field(default_factory=list)

    def fail(self, why: str) -> PatchError:
        return PatchError(f"{self.name}: line {self.at + 1}: {why}")


def parse(name: str, text: str) -> Patch:
    """Reads one patch: a header with an optional 'Subject:' and reason, then file diffs with a/ and b/ paths."""
    cur = _Cursor(name, text.split("\n"))
    subject, body = _parse_header(cur)
    while cur.at < len(cur.lines):
        line = cur.lines[cur.at]
        if line.startswith(_UNSUPPORTED):
            raise cur.fail(f"not supported: {line.strip()}")
        if line.startswith("--- ") and cur.at + 1 < len(cur.lines) and cur.lines[cur.at + 1].startswith("+++ "):
            cur.files.append(_parse_file(cur))
        else:
            cur.at += 1
    if not cur.files:
        raise PatchError(f"{name}: holds no file diff")
    return Patch(name, subject, body, tuple(cur.files), cur.added, cur.removed)


def _parse_header(cur: _Cursor) -> tuple[str, str]:
    subject, body = "", []
    while cur.at < len(cur.lines) and not cur.lines[cur.at].startswith(("diff --git ", "--- a/", "--- /dev/null")):
        line = cur.lines[cur.at]
        if line.startswith("Subject:") and not subject:
            subject = line[len("Subject:") :]
            while cur.at + 1 < len(cur.lines) and cur.lines[cur.at + 1].startswith(" "):  # folded
                cur.at += 1
                subject += cur.lines[cur.at]
            subject = re.sub(r"^\s*\[PATCH[^]]*\]\s*", "", subject).strip()
        elif subject:
            body.append(line)
        cur.at += 1
    text = "\n".join(body)
    text = re.split(r"^---\s*$", text, maxsplit=1, flags=re.MULTILINE)[0]  # a diffstat may follow the rule
    return subject or Path(cur.name).stem, text.strip("\n")


def _parse_file(cur: _Cursor) -> FilePatch:
    old_path = _path(cur, cur.lines[cur.at][4:], "a/")
    new_path = _path(cur, cur.lines[cur.at + 1][4:], "b/")
    if old_path is None and new_path is None:
        raise cur.fail("a diff from /dev/null to /dev/null")
    if old_path and new_path and old_path != new_path:
        raise cur.fail(f"renaming {old_path} to {new_path} is not supported")
    cur.at += 2
    hunks = []
    while cur.at < len(cur.lines) and cur.lines[cur.at].startswith("@@ "):
        hunks.append(_parse_hunk(cur))
    if not hunks:
        raise cur.fail(f"no hunk for {new_path or old_path}")
    # "-- " is the signature that git ends a mail with
    left = cur.lines[cur.at] if cur.at < len(cur.lines) else ""
    if left.startswith((" ", "+", "-")) and not left.startswith(("-- ", "--- ")):
        raise cur.fail("a line outside any hunk: the hunk before it counts fewer")
    return FilePatch(old_path, new_path, tuple(hunks))


def _path(cur: _Cursor, text: str, prefix: str) -> str | None:
    text = text.split("\t")[0].rstrip("\r")
    if text == "/dev/null":
        return None
    path = PurePosixPath(text.removeprefix(prefix))
    if not text.startswith(prefix) or path.is_absolute() or ".." in path.parts or "\\" in text or not path.parts:
        raise cur.fail(f"not a path below {prefix}: {text}")
    return str(path)


def _parse_hunk(cur: _Cursor) -> Hunk:
    header = cur.lines[cur.at]
    match = _HUNK.match(header)
    if not match:
        raise cur.fail(f"not a hunk header: {header}")
    old_start, new_start = int(match[1]), int(match[3])
    want_old, want_new = int(match[2] or 1), int(match[4] or 1)
    old: list[str] = []
    new: list[str] = []
    cur.at += 1
    while len(old) < want_old or len(new) < want_new:
        # a context line that is empty may have lost its leading space on the way
        line = (cur.lines[cur.at] or " ") if cur.at < len(cur.lines) - 1 else ""
        tag, content = line[:1], line[1:] + "\n"
        if tag not in (" ", "-", "+") or not tag:
            raise cur.fail(f"hunk {header[: header.rindex('@@') + 2]} ends early")
        if tag in " -":
            old.append(content)
        if tag in " +":
            new.append(content)
        cur.added += tag == "+"
        cur.removed += tag == "-"
        cur.at += 1
        if cur.at < len(cur.lines) and cur.lines[cur.at].startswith("\\"):
            for side in [s for s, t in ((old, " -"), (new, " +")) if tag in t]:
                side[-1] = side[-1].removesuffix("\n")
            cur.at += 1
    if len(old) != want_old or len(new) != want_new:
        raise cur.fail(f"hunk {header} does not hold the lines it counts")
    return Hunk(header[: header.index("@@", 2) + 2], old_start, new_start, tuple(old), tuple(new))


def apply(patches: list[Patch], root: Path) -> dict[str, bytes | None]:
    """New content of every file the series changes (None: removed), read from the tree at root. Writes nothing."""
    result: dict[str, bytes | None] = {}
    for patch in patches:
        for change in patch.files:
            where = f"{patch.name}: {change.path}"
            before = _read(root, change.path, result)
            if (change.old_path is None) != (before is None):
                raise PatchError(
                    f"{where}: " + ("no such file" if before is None else "the patch creates it, but it exists")
                )
            after = _apply_hunks(where, change, (before or b"").decode("utf-8", "surrogateescape"))
            if change.new_path is None and after:
                raise PatchError(f"{where}: the patch removes the file, but it holds more than the patch knows")
            result[change.path] = None if change.new_path is None else after.encode("utf-8", "surrogateescape")
    return result


def _read(root: Path, path: str, changed: dict[str, bytes | None]) -> bytes | None:
    if path in changed:
        return changed[path]
    file = root / path
    return file.read_bytes() if file.is_file() else None


def _apply_hunks(where: str, change: FilePatch, text: str) -> str:
    lines = text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    out: list[str] = []
    done, shift = 0, 0
    for number, hunk in enumerate(change.hunks, 1):
        # a hunk without old lines names the line that it follows
        expected = hunk.old_start - (1 if hunk.old else 0) + shift
        at = _locate(lines, hunk.old, expected, done)
        if at is None:
            raise PatchError(
                f"{where}: hunk {number} ({hunk.header}) does not match: {_mismatch(lines, hunk.old, expected)}"
            )
        shift += at - expected
        out += lines[done:at]
        out += hunk.new
        done = at + len(hunk.old)
    return "".join(out + lines[done:])


def _locate(lines: list[str], old: tuple[str, ...], expected: int, first: int) -> int | None:
    """The place nearest to the expected one, not before `first`, where every old line stands."""
    last = len(lines) - len(old)
    places = range(first, last + 1) if old else [expected] if first <= expected <= last else []
    matches = [i for i in places if tuple(lines[i : i + len(old)]) == old]
    return min(matches, key=lambda i: (abs(i - expected), i), default=None)


def _mismatch(lines: list[str], old: tuple[str, ...], expected: int) -> str:
    for i, line in enumerate(old, max(expected, 0)):
        found = lines[i] if i < len(lines) else None
        if found != line:
            text = "the end of the file" if found is None else repr(found.strip())
            return f"at line {i + 1} it wants {line.strip()!r}, the file has {text}"
    return "its lines overlap the hunk before it"
