"""Keeps conversations that wait for their next message: compressed rows, in memory up to a limit, then in a folder.

The wire formats send the whole conversation with each request. A hash of everything said finds the rows again, so the
conversation continues from them. A conversation's name is its owner (guarding.Key) and this hash. Texts and pictures
are not kept.
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
_HASH = 64  # length of a hash in hexadecimal digits


def message_keys(messages: Iterable[Message]) -> list[Any]:
    """Returns roles, texts and fields of messages, with hashes in place of pictures."""
    return [[m.role, m.text, dict(m.fields), [p.key for p in m.pictures]] for m in messages]


def name_of(about: Sequence[str], plan: Plan, values: Mapping[str, Any], keys: Sequence[Any], owner: str = "") -> str:
    """Returns a name that is equal for an owner's conversations with equal rows. about: other causes of the rows."""
    text = json.dumps([_VERSION, *about, plan.to_json(), values, keys], sort_keys=True, default=str)
    return owner + hashlib.sha256(text.encode()).hexdigest()


def is_owned(name: str, owner: str) -> bool:
    """Returns whether a conversation's name belongs to an owner. An empty owner has the names without an owner."""
    return len(name) == len(owner) + _HASH and name.startswith(owner)


class Park:
    """Keeps parked conversations. When memory is short, the least recently used conversation moves to the folder first.

    Also keeps read prompts for equal requests, only in memory and only while there is room. Any thread may call the
    methods. With a folder, a small memory costs time only.
    """

    def __init__(self, folder: CacheFolder | None, say: Callable[[str], None] | None = None) -> None:
        """folder: has a size limit; None: conversations that leave memory are lost. say: reports problems."""
        self._folder, self._say = folder, say
        self._held: OrderedDict[str, Snapshot] = OrderedDict()
        self._read: OrderedDict[str, Snapshot] = OrderedDict()
        self._led_to: dict[str, set[str]] = {}  # by prompt, conversations that began with it
        self._leaving: OrderedDict[str, Snapshot] = OrderedDict()  # conversations to move to the folder
        self._lock = threading.Lock()
        self.n_bytes = 0  # of all snapshots in memory

    def __len__(self) -> int:
        return len(self._held)

    @property
    def folder_bytes(self) -> int:
        return self._folder.total_bytes() if self._folder is not None else 0

    @property
    def leaving(self) -> int:
        """Returns the number of conversations that must move to the folder, even if there is memory."""
        return len(self._leaving)

    def put(self, name: str, parked: Snapshot, prompt: str = "", to_folder: bool = False) -> None:
        """Keeps a conversation in memory; replaces one of the same name. prompt: name of the prompt that it began with.

        to_folder: `move_leaving` moves the conversation to the folder, if there is a folder.
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
        """Returns a conversation or None. Keeps it: its last message may change."""
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
                return self._held[name]
        data = self._folder.get(KIND, name) if self._folder is not None else None
        self._tell()
        try:
            return Snapshot.decode(data) if data is not None else None
        except ValueError:
            return None

    def room_for_read(self, n_bytes: int, limit: int) -> bool:
        """Drops prompts until n_bytes more fit into `limit`. Returns False if that is not enough."""
        with self._lock:
            while self._read and self.n_bytes + n_bytes > limit:
                self._drop_read(next(iter(self._read)))
            return self.n_bytes + n_bytes <= limit

    def put_read(self, name: str, read: Snapshot) -> None:
        """Keeps a read prompt; replaces one of the same name."""
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
        """Reduces the bytes in memory to at most `limit`: drops prompts, then moves conversations to the folder."""
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
        """Moves the marked conversations to the folder."""
        while self._leaving:
            with self._lock:
                first = next(iter(self._leaving.items()), None)
            if first is not None:
                self._move(*first)

    def _move(self, name: str, oldest: Snapshot) -> None:
        if self._folder is not None:
            self._folder.put(KIND, name, oldest.encode())
            self._tell()
        with self._lock:
            if self._held.get(name) is oldest:
                self._drop(name)

    def _tell(self) -> None:
        """Says what went wrong in the folder."""
        if self._folder is not None and self._say is not None:
            for note in self._folder.notes():
                self._say(note)

    def listed(self, owner: str = "") -> list[dict[str, Any]]:
        """Returns the parked conversations of an owner. In the folder only their sizes and times are known.

        Without an owner, returns the conversations without an owner.
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
        """Removes an owner's conversation, also from the folder, and its prompts. Returns False for an unknown name."""
        if not is_owned(name, owner):
            return False
        with self._lock:
            there = name in self._held
            self._drop(name)
            for prompt in [prompt for prompt, names in self._led_to.items() if name in names]:
                self._drop_read(prompt)
        try:
            gone = self._folder is not None and self._folder.remove(KIND, name)
        except UsageError:  # the name is not the name of a conversation
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
