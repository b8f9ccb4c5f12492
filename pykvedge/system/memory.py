"""The resident set size of this process, and the free memory of the machine."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from pykvedge.errors import OutOfMemoryError

_CGROUP = Path("/sys/fs/cgroup")
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes the largest number of whole pages for "no limit"
_RESERVED = 64 << 20  # address space that glibc reserves for the heap of a thread
_STACK = 8 << 20  # stack of a thread, if the system has no limit


def is_running(process: int) -> bool:
    try:
        return psutil.pid_exists(process)
    except OverflowError:
        return False  # no process has this number


def rss_bytes() -> int:
    """Returns the resident set size of this process in bytes; 0 if unknown."""
    try:
        return psutil.Process().memory_info().rss
    except (OSError, psutil.Error):
        return 0


def own_bytes() -> int:
    """Returns the resident bytes that are not shared with a file, or all resident bytes if the system cannot tell."""
    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))


def _highest_bytes() -> int:
    """Returns the largest resident set size that the system has recorded; it only grows. 0: no record."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    try:  # getrusage would include the program that started this one
        status = Path("/proc/self/status").read_text()
        return next((int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith("VmHWM:")), 0)
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, which has no /proc


class PeakMeter:
    """Measures the largest resident set size between `start` and `stop`, in bytes, in a thread.

    The thread looks every 10 ms. If the system's record rises meanwhile, it is the exact peak. The record belongs to
    the whole process and is never reset.
    """

    _INTERVAL_S = 0.01

    def __init__(self, look: Callable[[], int] = rss_bytes) -> None:
        """look: returns another measure, of which the system has no record."""
        self._look, self._peak, self._mark = look, 0, 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the measurement. A meter starts once."""
        self._peak, self._mark = self._look(), _highest_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="kvedge-peak")
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(self._INTERVAL_S):
            self._peak = max(self._peak, self._look())

    def stop(self) -> int:
        """Ends the measurement. Returns the peak since start; later calls return it again."""
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None
            mark = _highest_bytes() if self._look is rss_bytes else 0
            self._peak = max(self._peak, self._look(), mark if mark > self._mark else 0)
        return self._peak


def trim() -> None:
    """Returns freed memory of the C library to the system, so later measurements are not affected."""
    if sys.platform != "linux":
        return
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has malloc_trim
    if function is not None:
        function(ctypes.c_size_t(0))


def free_at_once(n_bytes: int) -> None:
    """Makes the C library return freed pieces of n_bytes or more at once; glibc keeps pieces of up to 32 MiB."""
    function = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if function is not None:
        function(-3, n_bytes)  # M_MMAP_THRESHOLD


def available_bytes() -> int | None:
    """Returns the bytes that this process can still get without swapping; None if unknown.

    The least of the machine's available memory, and of the rest of the limits of control group and address space.
    """
    limits = [n for n in (_of_machine("available"), _cgroup_available(), _address_space_available()) if n is not None]
    return min(limits) if limits else None


def total_bytes() -> int | None:
    """Returns the bytes of the machine's memory; None if unknown."""
    return _of_machine("total")


def _of_machine(figure: str) -> int | None:
    try:
        return getattr(psutil.virtual_memory(), figure)
    except (OSError, psutil.Error):
        return None


def cgroup_limit() -> int | None:
    """Returns the lowest limit of this process's control group and the groups above, in bytes; None: no limit."""
    return min((limit for limit, _ in _cgroup_limits()), default=None)


def _cgroup_available() -> int | None:
    return min((max(limit - used, 0) for limit, used in _cgroup_limits()), default=None)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use) of each control group with a limit, from this process's group up to the root.

    In a container the path may name missing folders of the host; the root is still read.
    """
    lines = ["0::/"]
    with contextlib.suppress(OSError):
        lines = _CGROUPS_OF_PROCESS.read_text().splitlines()
    for line in lines:
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if not kinds:
            root, (limit, used, cache) = _CGROUP, ("memory.max", "memory.current", "inactive_file ")
        elif "memory" in kinds.split(","):
            root = _CGROUP / "memory"
            limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "
        else:
            continue
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):
                most = int((group / limit).read_text())  # int() fails for "max", which means no limit
                taken = int((group / used).read_text())
                for value in (group / "memory.stat").read_text().splitlines():
                    if value.startswith(cache):  # the system frees this page cache on demand
                        taken -= int(value.split()[1])
                if most < _UNLIMITED:
                    yield most, taken
            if group == root:
                break


def address_space_limit() -> int | None:
    """Returns the limit of this process's address space (ulimit -v) in bytes; None: no limit."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    except (ImportError, OSError):
        return None


def _address_space_available() -> int | None:
    limit = address_space_limit()
    try:
        return None if limit is None else max(limit - psutil.Process().memory_info().vms, 0)
    except (OSError, psutil.Error):
        return None


def addresses_to_compute(threads: int) -> int:
    """Returns the address space that computing needs beside its data, in bytes; 0 if there is no limit.

    This is for the stacks of threads, and the C library's reserve for them. Without it llama.cpp ends the process.
    """
    if address_space_limit() is None:
        return 0
    import resource

    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _RESERVED + threads * (_STACK if stack == resource.RLIM_INFINITY else stack)


def require(n_bytes: int, what: str, advice: str) -> None:
    """Raises OutOfMemoryError if n_bytes are not available. what: the subject of the message, advice: its end."""
    available = available_bytes()
    if available is not None and n_bytes > available:
        if available == _address_space_available():
            advice = "raise the limit of the address space (ulimit -v)"
        raise OutOfMemoryError(
            f"not enough memory: {what} needs about {readable(n_bytes)}, {readable(available)} are available; {advice}"
        )


def readable(n_bytes: float) -> str:
    """Returns text such as 3.4 GiB, 306.0 MiB, or 12.5 KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes / 1024:.1f} KiB"
