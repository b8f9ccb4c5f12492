"""Pixels of pictures in a file without a name: those of a request wait for each other, those of a conversation rest."""

from __future__ import annotations

import functools
import tempfile
import threading
from dataclasses import replace
from typing import IO

from pykvedge.errors import ImageError
from pykvedge.models.images import Picture


class Aside:
    """Holds pixels of pictures. The file is gone when nobody holds a picture of it."""

    def __init__(self, folder: str | None = None) -> None:
        """folder: of the file; None: that of temporary files."""
        self._folder = folder or tempfile.gettempdir()
        self._file: IO[bytes] | None = None
        self._end, self._lock = 0, threading.Lock()

    def put(self, picture: Picture) -> Picture:
        """Returns a picture whose pixels are read from the file when they are wanted. Raises ImageError."""
        key = picture.key
        try:
            with self._lock:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - open as long as pictures need it
                at, self._end = self._end, self._end + len(picture.rgb)
                self._file.seek(at)
                self._file.write(picture.rgb)
                self._file.flush()
        except OSError as error:
            raise ImageError(f"{picture.name} finds no room in {self._folder}: {error.strerror}") from None
        out = replace(picture, rgb=b"", away=functools.partial(self._read, picture.name, at, len(picture.rgb)))
        out.__dict__["key"] = key  # as cached_property keeps it
        return out

    def _read(self, name: str, at: int, n_bytes: int) -> bytes:
        try:
            with self._lock:
                assert self._file is not None
                self._file.seek(at)
                data = self._file.read(n_bytes)
        except OSError as error:
            raise ImageError(f"{name} cannot be read again: {error.strerror}") from None
        return data
