"""What the operating system says about memory: resident set size of this process, and what is left of the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from pykvedge.errors import OutOfMemoryError

_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def rss_bytes() -> int:
    """Resident set size of this process now, in bytes; 0 where it cannot be told."""
    if _STATUS.exists():
        return _status_bytes("VmRSS")
    if sys.platform == "win32":
        return _windows_counters()[0]
    try:
        out = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
        return int(out.stdout) * 1024
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


def _windows_counters() -> tuple[int, int]:
    """(working set, peak working set) in bytes, of PROCESS_MEMORY_COUNTERS."""
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):
        _fields_ = [
            ("cb", wintypes.DWORD),
            ("page_faults", wintypes.DWORD),
            ("peak", ctypes.c_size_t),
            ("now", ctypes.c_size_t),
            ("rest", ctypes.c_size_t * 6),
        ]

    kernel = ctypes.windll.kernel32  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    kernel.K32GetProcessMemoryInfo.argtypes = [wintypes.HANDLE, ctypes.POINTER(Counters), wintypes.DWORD]
    counters = Counters(cb=ctypes.sizeof(Counters))
    if not kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        return 0, 0
    return counters.now, counters.peak


class PeakMeter:
    """Largest resident set size between `start` and `stop`, in bytes.

    Linux can reset its high-water mark; where that is not permitted, and elsewhere, a thread looks every 10 ms.
    """

    _INTERVAL_S = 0.01

    def __init__(self) -> None:
        self._peak = 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Forgets what was before."""
        self._peak = rss_bytes()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(self._INTERVAL_S):
            self._peak = max(self._peak, rss_bytes())

    def stop(self) -> int:
        """The peak since start."""
        if self._thread is None:
            return max(_status_bytes("VmHWM"), self._peak)
        self._done.set()
        self._thread.join()
        return max(self._peak, rss_bytes())


def trim() -> None:
    """Returns to the system what the C library keeps of freed memory, so that what is measured next is its own."""
    if sys.platform != "linux":
        return
    import ctypes

    function = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if function is not None:
        function(ctypes.c_size_t(0))


def available_bytes() -> int | None:
    """Memory that this process can still get without swapping, in bytes; None where it cannot be told.

    The least of what the machine has available, what its control group may still use, and its address-space limit.
    """
    limits = [n for n in (_machine_available(), _cgroup_available(), _address_space_available()) if n is not None]
    return min(limits) if limits else None


def _machine_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_available() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):  # page cache that is given back on demand
                used -= int(line.split()[1])
        return max(int(limit) - used, 0)
    except (OSError, ValueError):
        return None


def _address_space_available() -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY or not _STATUS.exists():
            return None
        return max(limit - _status_bytes("VmSize"), 0)
    except (ImportError, OSError):
        return None


def require(n_bytes: int, what: str, advice: str) -> None:
    """Raises OutOfMemoryError if n_bytes are not available. what: the subject of the message, advice: its end."""
    available = available_bytes()
    if available is not None and n_bytes > available:
        raise OutOfMemoryError(
            f"not enough memory: {what} needs about {readable(n_bytes)}, {readable(available)} are available; {advice}"
        )


def readable(n_bytes: float) -> str:
    """3.4 GiB, 306.0 MiB, 12.5 KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes / 1024:.1f} KiB"
