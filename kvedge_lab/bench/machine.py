"""Describes the machine, and measures how fast it reads memory and how much energy it uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pykvedge.doctor import diagnosis
from pykvedge.models.gguf import Header, tensor_bytes
from pykvedge.native import calls, ggml
from pykvedge.system import memory

SETS = (4 << 20, 16 << 20, 64 << 20, 256 << 20)  # sizes of repeatedly read sets: caches are faster than memory
ATTEMPTS, ATTEMPT_S = 5, 0.03
POWERCAP = Path("/sys/class/powercap")


class Bandwidth:
    """Measures the bytes per second that dot products of float32 arrays read, in several threads: the best value.

    Call `look` before and after a measurement: other programs can only make the value worse.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._measured: dict[int, float] = {}

    def bytes_per_second(self, n_bytes: float) -> float:
        """Returns the value for a set of n_bytes that is read again and again, at the next size of SETS."""
        if not self._measured:
            self.look()
        return self._measured[next((s for s in SETS if s >= n_bytes), SETS[-1])]

    def look(self) -> None:
        """Measures all sizes, in about a second."""
        for size in SETS:
            self._measured[size] = max(self._measured.get(size, 0.0), self._measure(size))

    def _measure(self, size: int) -> float:
        arrays = [np.ones(size // 4 // self._threads, dtype=np.float32) for _ in range(self._threads)]
        n_bytes = sum(a.nbytes for a in arrays)

        def read(a: Any, passes: int) -> None:
            for _ in range(passes):
                np.dot(a, a)

        best, passes = 0.0, 1
        with ThreadPoolExecutor(self._threads) as pool:
            for _ in range(ATTEMPTS + 1):
                started = time.perf_counter()
                list(pool.map(partial(read, passes=passes), arrays))
                took = max(time.perf_counter() - started, 1e-9)
                best = max(best, n_bytes * passes / took)
                passes = max(1, round(passes * ATTEMPT_S / took))
        return best


def weight_bytes_per_token(header: Header) -> int:
    """Returns the bytes of weights that decoding one token reads.

    One row of the token embeddings is read, unless they are also the output matrix; and only the used experts.
    """
    arch, values = header.architecture, header.values
    experts, used = values.get(f"{arch}.expert_count", 0), values.get(f"{arch}.expert_used_count", 0)
    share = int(used) / int(experts) if experts and used else 1.0
    total = 0.0
    for name, tensor in header.tensors.items():
        size = tensor_bytes(tensor) or 0
        if name == "token_embd.weight" and "output.weight" in header.tensors:
            size //= max(tensor.shape[-1], 1)
        total += size * (share if "_exps." in name else 1.0)
    return round(total)


class Energy:
    """The joules that the processor packages have used, from Linux's powercap. `known` is false without it."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones: list[tuple[Path, int]] = []
        for zone in sorted(root.glob("intel-rapl:[0-9]*")):
            if zone.name.count(":") != 1:  # a part of a package, or a second view of the package
                continue
            try:
                int((zone / "energy_uj").read_text())
                self._zones.append((zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())))
            except (OSError, ValueError):
                continue
        self._last: list[int] = []

    @property
    def known(self) -> bool:
        """Whether the counters are readable; on most systems only for root."""
        return bool(self._zones)

    def start(self) -> None:
        self._last = self._read()

    def joules(self) -> float | None:
        """Returns the joules since start, or None if unknown. Counters may overflow once."""
        now = self._read()
        if not self._zones or len(now) != len(self._last):
            return None
        spent = 0
        for (_, span), before, after in zip(self._zones, self._last, now, strict=True):
            spent += after - before if after >= before else after - before + span
        return spent / 1e6

    def _read(self) -> list[int]:
        try:
            return [int(path.read_text()) for path, _ in self._zones]
        except (OSError, ValueError):
            return []


def device_bytes() -> int:
    """Returns the used bytes of all GPUs; 0 if devices do not report them."""
    return sum(device.total_bytes - device.free_bytes for device in ggml.devices() if device.kind != "CPU")


class Watch:
    """Records the bytes in use above those at its start, at intervals and once more at the end.

    It runs in a thread during a with statement. seconds, n_bytes: [n]; seconds count from `began` (time.perf_counter).
    """

    def __init__(self, look: Callable[[], int] = memory.own_bytes, interval_s: float = 0.002) -> None:
        """look: returns the bytes."""
        self.began, self._look, self._base = time.perf_counter(), look, look()
        self.seconds: list[float] = []
        self.n_bytes: list[int] = []
        self._interval_s, self._done = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        self._write()
        while not self._done.wait(self._interval_s):
            self._write()

    def _write(self) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.n_bytes.append(self._look() - self._base)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._write()


class OtherPrograms:
    """Measures the processor time of other programs during a measurement.

    Time that a hypervisor gave to other machines counts too. Systems count in hundredths of a second: intervals shorter
    than SPAN_S say nothing.
    """

    SPAN_S = 0.2

    def __init__(self) -> None:
        self._before = self._counters()

    def taken(self) -> tuple[float, float]:
        """Returns processor seconds of other programs, and elapsed seconds, since this object was made."""
        before, after = self._before, self._counters()
        return max(after[0] - before[0] - (after[1] - before[1]), 0.0), after[2] - before[2]

    @staticmethod
    def _counters() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # also counted in user and nice
        return sum(times) - idle - guests, time.process_time(), time.monotonic()


def describe(threads: int) -> dict[str, Any]:
    """Returns the facts that figures depend on: the machine, threads and libraries."""
    return {"threads": threads, **diagnosis.machine(), "libraries": calls.describe().splitlines()}
