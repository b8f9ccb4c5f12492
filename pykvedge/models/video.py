"""Yields the frames of a video one at a time, on demand. The ffmpeg program decodes them.

mtmd can call ffmpeg too, but assumes the size in the file before the rotation, so upright phone videos come out
sheared. Here each frame carries its size, which is checked before memory is allocated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pykvedge.errors import ImageError, UsageError
from pykvedge.models import sandbox
from pykvedge.models.images import MAX_PIXELS, Picture
from pykvedge.system.files import require_file

_HOW_TO_GET = "apt install ffmpeg, brew install ffmpeg, or winget install ffmpeg"
_MAX_HEADER = 64  # characters of a frame's header


def frames(path: str | os.PathLike[str], fps: float = 1.0) -> Iterator[Picture]:
    """Yields the pictures of a video file, `fps` per second, turned as the file says.

    For `Session.ask` with `stream=True`, which reads one frame at a time; a pipe holds the few frames that are decoded
    ahead. Raises UsageError if ffmpeg is missing or fps is invalid, ImageError if the file is no video or ends broken.
    """
    if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not 0.001 <= fps <= 1000:
        raise UsageError(f"the frames per second must be a number from 0.001 to 1000, not {fps!r:.20}")
    if not isinstance(path, (str, os.PathLike)) or not isinstance(name := os.fspath(path), str):
        raise UsageError(f"a video must be given as a path, not {path!r:.40}")
    place = Path(name)
    try:
        require_file(place)
    except (OSError, ValueError) as error:
        raise ImageError(f"{place} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    program = shutil.which("ffmpeg")
    if program is None:
        raise UsageError(f"reading {place.name} needs ffmpeg, which is not installed: {_HOW_TO_GET}")
    return _frames(program, place.resolve(), float(fps))


def _frames(program: str, place: Path, fps: float) -> Iterator[Picture]:
    # a playlist inside the file must not open the network
    source = ["-nostdin", "-loglevel", "error", "-protocol_whitelist", "file,pipe,crypto,data", "-i", str(place)]
    form = ["-map", "0:v:0", "-vf", f"fps={fps:.6f}", "-f", "image2pipe", "-c:v", "ppm", "pipe:1"]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [program, *source, *form], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, bufsize=1 << 20,
            start_new_session=True,  # Ctrl-C goes to the reader of the frames
        )  # fmt: skip
        n = 0
        try:
            while process.stdout is not None and (picture := _next(process.stdout, f"{place.name}, {n / fps:.1f} s")):
                n += 1
                yield picture
            status = process.wait()
        finally:
            sandbox.end(process)
        if n == 0:
            said.seek(0)
            sound = b"matches no streams" in said.read(1 << 16)
            what = "has only sound and no pictures" if sound else "is not a video that ffmpeg can read"
            raise ImageError(f"{place.name} {what}; --video takes files such as mp4, webm and gif")
        if status != 0:
            raise ImageError(f"{place.name} is damaged after {n} frames; use an undamaged copy")


def _next(pipe: IO[bytes], name: str) -> Picture | None:
    """Reads a picture in netpbm's format P6. Returns None at the end."""
    words: list[bytes] = []
    while len(words) < 4:  # P6, width, height, 255
        line = pipe.readline(_MAX_HEADER)
        if not line and not words:
            return None
        words += line.split()
        if not line.endswith(b"\n") or words[0] != b"P6":
            raise ImageError(f"{name}: ffmpeg ended before the end of the video")
    width, height = int(words[1]), int(words[2])
    if width * height > MAX_PIXELS:
        raise ImageError(f"{name}: a frame has {width} x {height} pixels; the limit is {MAX_PIXELS // 10**6} million")
    rgb = pipe.read(3 * width * height)
    if len(rgb) != 3 * width * height:
        raise ImageError(f"{name}: ffmpeg ended before the end of the video")
    return Picture(name, width, height, rgb)
