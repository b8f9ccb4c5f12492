"""Caches the embeddings of images, in memory for all conversations of an encoder, and in a folder for later runs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pykvedge.caches.folder import CacheFolder
from pykvedge.caches.memory import ByteCache

IMAGE_CACHE = 256 << 20  # default bytes in memory: 28 images of LLaVA-1.5-7B
KIND = "images"
_LOOK_S = 0.05  # seconds between two checks for cancellation while another thread encodes


@dataclass
class _Work:
    """An image that a thread is encoding. `rows` is set on success, before `over`."""

    thread: int = field(default_factory=threading.get_ident)
    over: threading.Event = field(default_factory=threading.Event)
    rows: np.ndarray | None = None


class Encoded:
    """Embeddings made by one encoder, limited in bytes. Drops the least recently used first.

    Any thread may call the methods. If another thread is encoding the same image, waits for that thread. memory: the
    embeddings in memory.
    """

    def __init__(self, width: int, limit_bytes: int, folder: CacheFolder | None = None, encoder: str = "") -> None:
        """width: of a row. limit_bytes: in memory; 0: none.

        encoder: identifies the encoder file, its settings and its version among all users of the folder.
        """
        self._width, self._folder, self._encoder = width, folder, encoder
        self._lock = threading.Lock()
        self.memory: ByteCache[np.ndarray] = ByteCache(limit_bytes, lambda rows: rows.nbytes)
        self._work: dict[str, _Work] = {}

    def rows(
        self, key: str, n_rows: int, make: Callable[[], np.ndarray], look: Callable[[float], None]
    ) -> tuple[np.ndarray, bool]:
        """Returns the embeddings of an image, [n_rows, width] float32, read-only, and whether they were cached.

        key: hash of the pixels. make: encodes the image, called if nothing is cached. look: called while another thread
        encodes the image. Raises the errors of make and look; an error of look ends the wait.
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
                return make(), False  # called inside `look`: the encoder reports the nested call
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
        if not there and self._folder is not None:  # after waiting threads continue: a disk may be slow
            self._folder.put(KIND, self._name(key, len(rows)), [rows.astype("<f4", copy=False).data])
        return rows, there

    def _name(self, key: str, n_rows: int) -> str:
        return hashlib.sha256(f"{self._encoder}\n{self._width}\n{n_rows}\n{key}".encode()).hexdigest()

    def _stored(self, key: str, n_rows: int) -> np.ndarray | None:
        data = self._folder.get(KIND, self._name(key, n_rows)) if self._folder is not None else None
        if data is None or len(data) != 4 * n_rows * self._width:
            return None
        return np.frombuffer(data, "<f4").reshape(n_rows, self._width).astype(np.float32, copy=False)
