"""Keep says where whole rows stay behind compressed ones: a later message is read over them, and nothing is lost."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pykvedge.errors import UsageError

PLACES = ("ram", "disk")
SPACE = 20 << 30  # bytes


@dataclass(frozen=True)
class Keep:
    """Where whole rows stay. folder: of the file, on a local drive; empty: the cache folder. space: bytes at most."""

    place: str
    folder: str | bytes | os.PathLike[str] = ""
    space: int = SPACE

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise UsageError(f"keep must be 'ram' or 'disk', not {self.place!r:.40}")
        if not isinstance(self.space, int) or self.space < 1:
            raise UsageError(f"keep_space must be a number of bytes, not {self.space!r:.40}")
        if not isinstance(self.folder, (str, bytes, os.PathLike)) or b"\0" in os.fsencode(self.folder):
            raise UsageError(f"keep_folder must be the path of a folder, not {self.folder!r:.40}")

    @classmethod
    def of(cls, keep: str = "", keep_folder: str | os.PathLike[str] = "", keep_space: int = SPACE) -> Keep | None:
        """Makes it of settings; None: whole rows stay nowhere. Raises UsageError."""
        return cls(keep, keep_folder, keep_space) if keep else None

    def made_folder(self) -> str:
        """Returns the folder of the file; makes the default one, which is the owner's alone. Raises UsageError."""
        if self.place != "disk" or self.folder:
            return os.fsdecode(self.folder)
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvedge" / "keep"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot make the folder {folder}: {error.strerror}; name one with --keep-folder"
            raise UsageError(why) from None
        return str(folder)
