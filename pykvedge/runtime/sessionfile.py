"""Reads and writes the note of a session file: the conversation and the state of the context, beside the KV cache.

libkvedge writes the file (layout: docs/dev/formats.txt). The note is one JSON object.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pykvedge.errors import KvedgeError, SessionFileError, UsageError
from pykvedge.library import libkvedge
from pykvedge.models.gguf import Header
from pykvedge.models.images import Picture
from pykvedge.models.prompt import Message
from pykvedge.plans.plan import Plan
from pykvedge.runtime.settings import MAX_CTX
from pykvedge.runtime.snapshot import ImageSpan
from pykvedge.system.files import require_file

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_FRAME, _CHECKSUM, _BLOCK = struct.Struct("<8sIIQQ"), struct.Struct("<I"), 1 << 20


@dataclass
class Note:
    """A saved conversation without its KV cache."""

    plan: Plan
    kv_type: str
    n_ctx: int
    n_ubatch: int
    n_past: int  # position of the next token
    n_cells: int  # tokens in the cache
    held: float  # KV pairs per head after the last compression, averaged over heads and layers
    pending: list[int] = field(default_factory=list)  # tokens generated, but not yet in the cache
    messages: list[Message] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # tokens of the answer, to be read again over whole rows
    images: list[ImageSpan] = field(default_factory=list)  # images in the cache, and the limit of each
    answer: list[int] = field(default_factory=list)  # tokens in the cache that a second pass must read again
    whole: bool = field(default=False, compare=False)  # whether the file holds whole rows; not part of the note

    def encode(self) -> bytes:
        """Returns the note's bytes in the file. Writes only the name and size of pictures."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "whole"}
        # older versions ignore `unread`: several pending tokens make them refuse the file
        data["pending"], data["unread"] = [*self.unread, *self.pending], len(self.unread)
        for name in ("unread", "images", "answer"):
            if not data[name]:
                del data[name]
        data["plan"] = self.plan.to_json()
        data["messages"] = [
            {"role": m.role, "text": m.text, "pictures": [_told(p) for p in m.pictures]} for m in self.messages
        ]
        return json.dumps(data).encode()

    @classmethod
    def decode(cls, data: bytes) -> Note:
        """Reads a note. Raises ValueError for invalid data."""
        try:
            given = json.loads(data)
            messages = [_message(m) for m in given["messages"]]
            tokens, n_unread = [_count(t) for t in given["pending"]], _count(given.get("unread", 0))
            note = cls(
                Plan.from_json(_of(str, given["plan"])),
                _of(str, given["kv_type"]),
                **{name: _count(given[name]) for name in ("n_ctx", "n_ubatch", "n_past", "n_cells")},
                held=_share(given["held"]),
                pending=tokens[n_unread:],
                messages=messages,
                unread=tokens[:n_unread],
                images=[ImageSpan.of(one) for one in given.get("images", ())],
                answer=[_count(t) for t in given.get("answer", ())],
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, KvedgeError) as error:
            raise ValueError(str(error)) from None
        if len(note.pending) > 1 or not note.messages:
            raise ValueError("its messages and pending tokens are inconsistent")
        return note


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if not 0 <= _of(int, value) <= MAX_CTX:
        raise ValueError(f"the count {value} is out of range")
    return value


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_CTX:
        raise ValueError(f"{value!r} KV pairs per KV head are out of range")
    return float(value)


def _message(data: Any) -> Message:
    role = _of(str, data["role"])
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"the role '{role}' is unknown")
    return Message(role, _of(str, data["text"]), [_picture(p) for p in data["pictures"]])


def _picture(data: Any) -> Picture:
    page, document = _count(data.get("page", 0)), _of(str, data.get("document", ""))
    return Picture(_of(str, data["name"]), _count(data["width"]), _count(data["height"]), b"", page, document)


def _told(picture: Picture) -> dict[str, Any]:
    page = {"page": picture.page, "document": picture.document} if picture.page else {}
    return {"name": picture.name, "width": picture.width, "height": picture.height, **page}


def encoded(path: str | os.PathLike[str]) -> bytes:
    """Returns the path for libkvedge. Raises UsageError, or SessionFileError for no regular file."""
    try:
        name = os.fsencode(path)
    except TypeError:
        raise UsageError(f"the name of a session file must be a path, not {path!r:.40}") from None
    if b"\0" in name or not name:
        raise UsageError("the path of a session file is empty or contains a zero byte")
    try:
        require_file(name)
    except OSError as error:
        if error.errno == errno.EINVAL:  # libkvedge reports other errors better
            raise SessionFileError(f"{os.fsdecode(name)} cannot be used: {error.strerror}") from None
    return name


def read_note(path: str | os.PathLike[str], model: str) -> Note:
    """Returns a file's note. model: fingerprint, which must match the file. Raises SessionFileError."""
    found, data, whole = libkvedge.read_saved(encoded(path))
    if found != model:
        raise SessionFileError(
            f"{os.fsdecode(path)} was saved with another model; load the model that saved it, or use another session "
            f"file"
        )
    try:
        return replace(Note.decode(data), whole=whole)
    except ValueError as error:
        raise SessionFileError(f"{os.fsdecode(path)} holds no conversation that can be continued: {error}") from None


def check_payload(path: str | os.PathLike[str]) -> None:
    """Checks the checksum of the data behind the note. Raises SessionFileError. Call `read_note` first."""
    checksum = 0
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - bytes are a path, too
            *_, n_model, n_note, left = _FRAME.unpack(file.read(_FRAME.size))
            file.seek(n_model + n_note + _CHECKSUM.size, os.SEEK_CUR)
            while left and (block := file.read(min(left, _BLOCK))):
                checksum, left = zlib.crc32(block, checksum), left - len(block)
            whole = not left and file.read() == _CHECKSUM.pack(checksum)
    except OSError as error:
        raise SessionFileError(f"{os.fsdecode(path)} cannot be read: {error.strerror or error}") from None
    if not whole:
        raise SessionFileError(f"{os.fsdecode(path)} is damaged or truncated; use another session file")


def saved_plan(path: str | os.PathLike[str]) -> Plan | None:
    """Returns the plan of a session file of any model, or None if the file cannot be read."""
    try:
        return Note.decode(libkvedge.read_saved(encoded(path))[1]).plan
    except (KvedgeError, ValueError):
        return None


def fingerprint(header: Header) -> str:
    """Returns a hash that identifies a model file: of its size, its first MiB, and 64 samples of 4 KiB across the file.

    A hash of a whole 4 GB file would take longer than loading the model.
    """
    digest = hashlib.sha256(str(header.file_size).encode())
    with header.path.open("rb") as file:
        digest.update(file.read(1 << 20))
        for i in range(1, _SAMPLES + 1):
            file.seek(max(0, header.file_size * i // _SAMPLES - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
