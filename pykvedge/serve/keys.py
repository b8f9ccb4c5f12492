"""The keys that requests show, and whose conversations each of them opens."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pykvedge.errors import UsageError

_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_MOST = 4096


@dataclass(frozen=True)
class Key:
    """secret: what is shown. owner: 32 hexadecimal digits that stand for whoever has it; equal after a restart."""

    secret: str
    owner: str


def owner_of(given: str, keys: Sequence[Key]) -> str | None:
    """Returns the owner of a key that was shown, None of one that is not known; in the same time for all."""
    found = None
    for key in keys:
        if hmac.compare_digest(given.encode("utf-8", "replace"), key.secret.encode()):
            found = key.owner
    return found


def read_keys(path: Path) -> tuple[Key, ...]:
    """Reads a file with a key a line, and the name of its owner behind it where there is one. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--key-file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    keys, names = dict[str, Key](), set[str]()
    for number, line in enumerate(lines, 1):
        secret, *name = line.split() or [""]
        if not secret or secret.startswith("#"):
            continue
        where = f"--key-file {path} line {number}"
        if not 16 <= len(secret) <= 1024 or not secret.isascii() or not secret.isprintable():
            raise UsageError(f"{where}: a key has 16 to 1024 letters, digits and signs")
        if len(name) > 1 or not all(_NAME.fullmatch(one) for one in name):
            raise UsageError(f"{where}: behind a key stands a name of letters, digits and .-_@, or nothing")
        if secret in keys or names & set(name):
            raise UsageError(f"{where}: this key or its name was there before")
        names.update(name)
        owner = f"name {name[0]}" if name else f"key {secret}"
        keys[secret] = Key(secret, hashlib.sha256(f"kvedge {owner}".encode()).hexdigest()[:32])
    if not 1 <= len(keys) <= _MOST:
        raise UsageError(f"--key-file {path} must hold 1 to {_MOST} keys, each on a line of its own")
    return tuple(keys.values())
