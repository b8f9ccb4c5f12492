"""OpenMP's teams: the threads that ggml computes with are kept for each thread that has called it.

Where there are more of them than processors, although most of them sleep, the OpenMP of GCC stops spinning at barriers
and puts threads to sleep at every one. A graph has hundreds: a token of a small model then takes 28 times as long.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pykvedge.native import libraries

_SOFT = 1  # omp_pause_soft


def give_back() -> None:
    """Ends the team of the calling thread. The next graph that the thread computes makes one, in about 0.1 ms.

    Call it when a thread will not compute soon, and another one may. Does nothing where OpenMP has no such call.
    """
    function = _function()
    if function is not None:
        function(_SOFT)


@functools.cache
def _function() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError, AttributeError):
        kernels = _cpu_backend()
        if kernels is not None:
            return ctypes.CDLL(str(kernels)).omp_pause_resource_all  # of the OpenMP that ggml was linked with
    return None


def _cpu_backend() -> Path | None:
    """Finds the library with ggml's CPU kernels, one of several variants, where it is loaded."""
    here = libraries.library_dir()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libggml-cpu") and path.parent == here:
            return path
    return None
