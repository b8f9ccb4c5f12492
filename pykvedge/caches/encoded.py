"""Embeddings of images that were encoded before, for all conversations with an encoder; in a folder, for later runs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pykvedge.caches.folder import CacheFolder
from pykvedge.caches.memory import ByteCache

IMAGE_CACHE = 256 << 20  # bytes in memory, unless a setting says otherwise: 28 images of LLaVA-1.5-7B
KIND = "images"
_LOOK_S = 0.05  # between two looks at what may end the wait for another conversation's encoding


@dataclass
class _Work:
    """An image that a thread has at hand; `rows` is there when it came to its end."""

    thread: int = field(default_factory=threading.get_ident)
    over: threading.Event = field(default_factory=threading.Event)
    rows: np.ndarray | None = None


class Encoded:
    """Rows that one encoder made of images, bounded in bytes; those used least recently go first.

    May be called from several threads. Who asks for an image that another thread has at hand waits for that one.
    memory: what is held there.
    """

    def __init__(self, width: int, limit_bytes: int, folder: CacheFolder | None = None, encoder: str = "") -> None:
        """width: of the rows. limit_bytes: of those held in memory; 0 holds none.

        encoder: tells it, its settings and its version apart from all others that use the folder.
        """
        self._width, self._folder, self._encoder = width, folder, encoder
        self._lock = threading.Lock()
        self.memory: ByteCache[np.ndarray] = ByteCache(limit_bytes, lambda rows: rows.nbytes)
        self._work: dict[str, _Work] = {}

    def rows(
        self, key: str, n_rows: int, make: Callable[[], np.ndarray], look: Callable[[float], None]
    ) -> tuple[np.ndarray, bool]:
        """Returns what the encoder makes of an image, [n_rows, width] float32, read-only, and whether it was there.

        key: of its pixels. make: encodes it, and is called if nothing is there. look: called while another thread
        encodes it; what it raises ends the wait, and is raised, as is what `make` raises.
        """
        while True:
            with self._lock:
                found = self.memory.get(key)
                if found is not None and len(found) == n_rows:
                    return found, True
                other = self._work.get(key)
                if other is None:
                    own = self._work[key] = _Work()
                    break
            if other.thread == threading.get_ident():
                return make(), False  # from within a `look`: the encoder says what is wrong with that
            while not other.over.wait(_LOOK_S):
                look(0.0)
            if other.rows is not None and len(other.rows) == n_rows:
                return other.rows, True
        try:
            rows = self._stored(key, n_rows)
            there = rows is not None
            if rows is None:
                rows = np.ascontiguousarray(make(), np.float32)
                rows.setflags(write=False)
            own.rows = rows
        finally:
            with self._lock:
                del self._work[key]
                if own.rows is not None:
                    self.memory.put(key, own.rows)
            own.over.set()
        if not there and self._folder is not None:  # after those who waited went on: a disk may take its time
            self._folder.put(KIND, self._name(key, len(rows)), [rows.astype("<f4", copy=False).data])
        return rows, there

    def _name(self, key: str, n_rows: int) -> str:
        return hashlib.sha256(f"{self._encoder}\n{self._width}\n{n_rows}\n{key}".encode()).hexdigest()

    def _stored(self, key: str, n_rows: int) -> np.ndarray | None:
        data = self._folder.get(KIND, self._name(key, n_rows)) if self._folder is not None else None
        if data is None or len(data) != 4 * n_rows * self._width:
            return None
        return np.frombuffer(data, "<f4").reshape(n_rows, self._width).astype(np.float32, copy=False)
