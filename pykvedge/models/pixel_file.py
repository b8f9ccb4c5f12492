"""Keeps pixels in an unnamed file, for waiting requests and for conversations whose whole rows are in a file."""

from __future__ import annotations

import functools
import tempfile
import threading
from dataclasses import replace
from typing import IO

from pykvedge.errors import ImageError
from pykvedge.models.images import Picture


class PixelFile:
    """Holds pixels of pictures in a file. The file is removed when no picture of it is in use."""

    def __init__(self, folder: str | None = None) -> None:
        """folder: of the file; None: the folder of temporary files."""
        self._folder = folder or tempfile.gettempdir()
        self._file: IO[bytes] | None = None
        self._end, self._lock = 0, threading.Lock()

    def put(self, picture: Picture) -> Picture:
        """Returns a picture whose pixels are read from the file on demand. Raises ImageError."""
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
            raise ImageError(
                f"{picture.name} cannot be written to {self._folder}: {error.strerror}; free disk space"
            ) from None
        out = replace(picture, rgb=b"", away=functools.partial(self._read, picture.name, at, len(picture.rgb)))
        out.__dict__["key"] = key  # the value of cached_property
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
