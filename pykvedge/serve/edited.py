"""A conversation is known again where pictures of it were dropped, or replaced by text: it goes on from its rows.

Programs that send many pictures leave old ones out later, so that a request is no longer what was read. Of what was
said hashes of lines are kept, under a key of the process, in memory, as long as it runs.
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
_MOST = 1 << 18  # lines and pictures of all conversations that are known: some 20 MiB
_MOST_LINES = 64  # of text in the place of a picture

Outline: TypeAlias = tuple[bytes | str, ...]  # of a message: a hash for each line of text, the key of each picture
_Known: TypeAlias = tuple[str, list[Outline]]  # of a conversation: the frame, and the messages


def outline(text: str, pictures: Sequence[str]) -> Outline:
    """Makes the outline of a message. The name of a page, in the line of its picture, belongs to the picture."""
    out, left = list[bytes | str](), list(pictures)
    if text.count(IMAGE) < len(left):
        out, left = [*left], []  # without places they come first
    for line in text.split("\n"):
        shown = [left.pop(0) for found in PLACE.findall(line) if found == IMAGE and left]
        out += shown or [hashlib.blake2b(line.encode("utf-8", "replace"), digest_size=8, key=_KEY).digest()]
    return tuple(out)


def dropped(known: Outline, edited: Outline) -> list[bool] | None:
    """Tells of each picture of a message whether it was dropped or replaced; None: more than that was changed."""
    dead = set[tuple[int, int]]()  # from where there is no way on

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
        for end in range(j, min(j + _MOST_LINES, len(edited)) + 1):
            if end > j and isinstance(edited[end - 1], str):
                break
            if (found := rest(i + 1, end)) is not None:
                return [True, *found]
        dead.add((i, j))
        return None

    return rest(0, 0)


class KnownConversations:
    """Knows conversations with pictures by what was said. Any thread may call it."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, _Known] = OrderedDict()  # by name
        self._lock, self._n = threading.Lock(), 0  # lines and pictures

    def add(self, name: str, about: Sequence[Any], said: Sequence[Any]) -> None:
        """Notes what was said (parked.said_in) in a conversation. about: all else that its rows depend on."""
        if not any(pictures for *_, pictures in said):
            return
        with self._lock:
            self._n -= _size(self._all.pop(name, None))
            self._all[name] = found = _frame(about, said), _outlines(said)
            self._n += _size(found)
            while self._n > _MOST:
                self._n -= _size(self._all.popitem(last=False)[1])

    def find(self, about: Sequence[Any], said: Sequence[Any]) -> list[tuple[str, list[bool]]]:
        """Lists conversations of which pictures were dropped, the newest first: the name, and which pictures were."""
        frame, outlines, out = _frame(about, said), _outlines(said), []
        with self._lock:
            known = [(name, found) for name, (of, found) in reversed(self._all.items()) if of == frame]
        for name, messages in known:
            each = [dropped(*both) for both in zip(messages, outlines, strict=True)]
            if None not in each:
                out.append((name, [one for found in each for one in found or []]))
        return out


def _size(known: _Known | None) -> int:
    return sum(map(len, known[1])) if known is not None else 0


def _frame(about: Sequence[Any], said: Sequence[Any]) -> str:
    """Hashes all that has to be equal: who said something, and what was said by nobody who shows pictures."""
    same = [[role, fields, "" if role in ("user", "tool") else text] for role, text, fields, _ in said]
    text = json.dumps([*about, same], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), key=_KEY).hexdigest()


def _outlines(said: Sequence[Any]) -> list[Outline]:
    return [outline(text, pictures) for _, text, _, pictures in said]
