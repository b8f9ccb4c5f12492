"""The name of the processor, and the features that kvedge and llama.cpp have code for."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

# Linux's names; after a colon, macOS's name
_FEATURES = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi:avx512_vbmi",
    "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd:AdvSIMD", "asimddp:FEAT_DotProd", "i8mm:FEAT_I8MM", "sve:FEAT_SVE", "sve2", "sme:FEAT_SME",
)  # fmt: skip
_READABLE = {"asimd": "neon", "asimddp": "dotprod"}
_CPUINFO = Path("/proc/cpuinfo")


def name() -> str:
    """Returns the processor's name, or its architecture."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    return field("model name") or platform.processor() or platform.machine()


def features() -> list[str] | None:
    """Returns the processor's features that matter here; None if the system does not report features."""
    if sys.platform == "darwin":
        found = {f for f in _FEATURES if _sysctl("hw.optional.arm." + f.rpartition(":")[2]) == "1"}
        known = [f for f in _FEATURES if f in found]
    else:
        flags = set((field("flags") or field("Features")).split())
        if not flags:
            return None
        known = [f for f in _FEATURES if f.partition(":")[0] in flags]
    short = [f.partition(":")[0] for f in known]
    return [_READABLE.get(f, f) for f in short]


def field(key: str) -> str:
    """Returns the value of a line in /proc/cpuinfo, or ""."""
    try:
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.partition(":")[0].strip() == key:
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _sysctl(key: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
