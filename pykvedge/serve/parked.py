"""Conversations that wait for their next message: their compressed rows, in memory under a bound, then in a folder.

One is found again by what was said in it, so that clients which send the whole conversation each time - as the wire
formats want it - go on from its rows. Its name is the owner's (guarding.Key) and a hash; neither text nor pictures
are kept.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pykvedge.caches.folder import CacheFolder
from pykvedge.errors import UsageError
from pykvedge.models.prompt import Message
from pykvedge.plans.plan import Plan
from pykvedge.runtime.snapshot import Snapshot

KIND = "conversations"
_VERSION = 3
_HASH = 64  # hexadecimal digits


def said_in(messages: Iterable[Message]) -> list[Any]:
    """Lists what was said, with hashes in the place of pictures."""
    return [[m.role, m.text, dict(m.fields), [p.key for p in m.pictures]] for m in messages]


def name_of(about: Sequence[str], plan: Plan, values: Mapping[str, Any], said: Sequence[Any], owner: str = "") -> str:
    """Makes a name that is equal for conversations of an owner whose rows are equal. about: what else decides them."""
    text = json.dumps([_VERSION, *about, plan.to_json(), values, said], sort_keys=True, default=str)
    return owner + hashlib.sha256(text.encode()).hexdigest()


def is_owned(name: str, owner: str) -> bool:
    """Tells whether a conversation's name is one of an owner's; those without a key have names without an owner."""
    return len(name) == len(owner) + _HASH and name.startswith(owner)


class Park:
    """Keeps conversations that were parked; the one used longest ago leaves memory for the folder first.

    Prompts that were read are kept beside them, for whoever asks the same again; only as long as there is memory.
    Any thread may call it. With the folder, a bound of memory loses nothing but time.
    """

    def __init__(self, folder: CacheFolder | None, say: Callable[[str], None] | None = None) -> None:
        """folder: bounded itself; None: what leaves memory is gone. say: called with what goes wrong in it."""
        self._folder, self._say = folder, say
        self._held: OrderedDict[str, Snapshot] = OrderedDict()
        self._read: OrderedDict[str, Snapshot] = OrderedDict()
        self._led_to: dict[str, set[str]] = {}  # names of the conversations that a prompt's answers made
        self._leaving: OrderedDict[str, Snapshot] = OrderedDict()  # of those in memory, as soon as they are written
        self._lock = threading.Lock()
        self.n_bytes = 0  # in memory

    def __len__(self) -> int:
        return len(self._held)

    @property
    def folder_bytes(self) -> int:
        return self._folder.total_bytes() if self._folder is not None else 0

    @property
    def leaving(self) -> int:
        """So many conversations wait to be moved to the folder, however much memory there is."""
        return len(self._leaving)

    def put(self, name: str, parked: Snapshot, prompt: str = "", to_folder: bool = False) -> None:
        """Keeps a conversation in memory, in place of one of the same name. prompt: name of the one that led to it.

        to_folder: it is in memory only until `move_leaving` has moved it to the folder, where there is one.
        """
        with self._lock:
            self._drop(name)
            self._held[name] = parked
            if to_folder and self._folder is not None:
                self._leaving[name] = parked
            self.n_bytes += len(parked)
            if prompt in self._read:
                self._led_to.setdefault(prompt, set()).add(name)

    def get(self, name: str) -> Snapshot | None:
        """Returns a conversation, which stays: its last message may be put in other words."""
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
                return self._held[name]
        data = self._folder.get(KIND, name) if self._folder is not None else None
        try:
            return Snapshot.decode(data) if data is not None else None
        except ValueError:
            return None

    def room_for_read(self, n_bytes: int, limit: int) -> bool:
        """Drops prompts until one of so many bytes fits beside all else into `limit`; False: it never does."""
        with self._lock:
            while self._read and self.n_bytes + n_bytes > limit:
                self._drop_read(next(iter(self._read)))
            return self.n_bytes + n_bytes <= limit

    def put_read(self, name: str, read: Snapshot) -> None:
        """Keeps a prompt, in place of one of the same name."""
        with self._lock:
            self._drop_read(name)
            self._read[name] = read
            self.n_bytes += len(read)

    def get_read(self, name: str) -> Snapshot | None:
        with self._lock:
            if name in self._read:
                self._read.move_to_end(name)
            return self._read.get(name)

    def shrink(self, limit: int) -> None:
        """Makes what is in memory take at most so many bytes."""
        while self.n_bytes > max(limit, 0):
            with self._lock:
                if self._read:
                    self._drop_read(next(iter(self._read)))
                    continue
                if not self._held:
                    return
                name, oldest = next(iter(self._held.items()))
            self._move(name, oldest)

    def move_leaving(self) -> None:
        """Moves to the folder what is to lie there."""
        while self._leaving:
            with self._lock:
                first = next(iter(self._leaving.items()), None)
            if first is not None:
                self._move(*first)

    def _move(self, name: str, oldest: Snapshot) -> None:
        if self._folder is not None:
            self._folder.put(KIND, name, oldest.encode())
            for note in self._folder.notes() if self._say else ():
                self._say(note)
        with self._lock:
            if self._held.get(name) is oldest:
                self._drop(name)

    def listed(self, owner: str = "") -> list[dict[str, Any]]:
        """Describes the conversations of an owner that wait; of those in the folder their bytes are known.

        Without an owner it describes those that have none.
        """
        with self._lock:
            held = {name: one for name, one in self._held.items() if is_owned(name, owner)}
        out = [{"id": name, "state": "parked", "where": "memory", "tokens": one.n_cells, "bytes": len(one),
                "since": one.since} for name, one in held.items()]  # fmt: skip
        there = self._folder.entries(KIND) if self._folder is not None else {}
        out += [{"id": name, "state": "parked", "where": "folder", "bytes": size, "since": since}
                for name, (size, since) in there.items() if name not in held and is_owned(name, owner)]  # fmt: skip
        return out

    def forget(self, name: str, owner: str = "") -> bool:
        """Drops an owner's conversation, from the folder too, and the prompts that led to it; False: there is none."""
        if not is_owned(name, owner):
            return False
        with self._lock:
            there = name in self._held
            self._drop(name)
            for prompt in [prompt for prompt, names in self._led_to.items() if name in names]:
                self._drop_read(prompt)
        try:
            gone = self._folder is not None and self._folder.remove(KIND, name)
        except UsageError:  # no name of a conversation
            gone = False
        return there or gone

    def _drop(self, name: str) -> None:
        self._leaving.pop(name, None)
        old = self._held.pop(name, None)
        self.n_bytes -= len(old) if old is not None else 0

    def _drop_read(self, name: str) -> None:
        self._led_to.pop(name, None)
        old = self._read.pop(name, None)
        self.n_bytes -= len(old) if old is not None else 0
