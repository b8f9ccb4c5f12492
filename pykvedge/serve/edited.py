"""Recognises a conversation whose pictures were dropped or replaced by text, so that it continues from its rows.

Programs that send many pictures drop old pictures later, so their request differs from the tokens that were read. This
module keeps hashes of text lines in memory, with a random key per process.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

from pykvedge.models.prompt import IMAGE, PLACE

_KEY = os.urandom(32)
_MOST = 1 << 18  # most lines and pictures of all known conversations: about 20 MiB
_MAX_LINES = 64  # most lines of text that replace a picture

Outline: TypeAlias = tuple[bytes | str, ...]  # of a message: a hash per line of text, and the key of each picture
_Known: TypeAlias = tuple[str, list[Outline]]  # of a conversation: hash of its frame, and outlines of its messages


def outline(text: str, pictures: Sequence[str]) -> Outline:
    """Returns the outline of a message. A page label in a picture's line belongs to the picture."""
    out, left = list[bytes | str](), list(pictures)
    if text.count(IMAGE) < len(left):
        out, left = [*left], []  # pictures without a place in the text come first
    for line in text.split("\n"):
        shown = [left.pop(0) for found in PLACE.findall(line) if found == IMAGE and left]
        out += shown or [hashlib.blake2b(line.encode("utf-8", "replace"), digest_size=8, key=_KEY).digest()]
    return tuple(out)


def dropped(known: Outline, edited: Outline) -> list[bool] | None:
    """Returns for each picture whether the edit dropped or replaced it, or None if more than pictures changed."""
    dead = set[tuple[int, int]]()  # pairs (i, j) without a match behind them

    def rest(i: int, j: int) -> list[bool] | None:
        start = i
        while i < len(known) and isinstance(known[i], bytes):
            i += 1
        if known[start:i] != edited[j : j + i - start]:
            return None
        j += i - start
        if i == len(known):
            return [] if j == len(edited) else None
        if (i, j) in dead:
            return None
        if j < len(edited) and edited[j] == known[i] and (found := rest(i + 1, j + 1)) is not None:
            return [False, *found]
        for end in range(j, min(j + _MAX_LINES, len(edited)) + 1):
            if end > j and isinstance(edited[end - 1], str):
                break
            if (found := rest(i + 1, end)) is not None:
                return [True, *found]
        dead.add((i, j))
        return None

    return rest(0, 0)


class KnownConversations:
    """Known conversations with pictures. Any thread may call the methods."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, _Known] = OrderedDict()  # by name
        self._lock, self._n = threading.Lock(), 0  # lines and pictures of all known conversations

    def add(self, name: str, about: Sequence[Any], keys: Sequence[Any]) -> None:
        """Adds a conversation. keys: of parked.message_keys. about: everything else that decides its rows."""
        if not any(pictures for *_, pictures in keys):
            return
        with self._lock:
            self._n -= _size(self._all.pop(name, None))
            self._all[name] = found = _frame(about, keys), _outlines(keys)
            self._n += _size(found)
            while self._n > _MOST:
                self._n -= _size(self._all.popitem(last=False)[1])

    def find(self, about: Sequence[Any], keys: Sequence[Any]) -> list[tuple[str, list[bool]]]:
        """Returns known conversations that equal `keys` except dropped pictures, newest first: name, dropped."""
        frame, outlines, out = _frame(about, keys), _outlines(keys), []
        with self._lock:
            known = [(name, found) for name, (of, found) in reversed(self._all.items()) if of == frame]
        for name, messages in known:
            each = [dropped(*both) for both in zip(messages, outlines, strict=True)]
            if None not in each:
                out.append((name, [one for found in each for one in found or []]))
        return out


def _size(known: _Known | None) -> int:
    return sum(map(len, known[1])) if known is not None else 0


def _frame(about: Sequence[Any], keys: Sequence[Any]) -> str:
    """Returns a hash of everything that must be equal: roles, fields, and texts of roles without pictures."""
    same = [[role, fields, "" if role in ("user", "tool") else text] for role, text, fields, _ in keys]
    text = json.dumps([*about, same], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), key=_KEY).hexdigest()


def _outlines(keys: Sequence[Any]) -> list[Outline]:
    return [outline(text, pictures) for _, text, _, pictures in keys]
