"""Explains in one line why a shared library of kvedge cannot be loaded: by checks before loading, because some faults
kill the process, and from the loader's message.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import struct
import sys
from pathlib import Path

from pykvedge.errors import LibraryError
from pykvedge.system import cpu
from pykvedge.system.version import NOT_INSTALLED, package_version

REINSTALL = "reinstall kvedge, or set KVEDGE_LIB_DIR to the folder of a development build"
REBUILD = "build kvedge on this machine: python3 scripts/dev.py build"
FEATURES_FILE = "cpu-features.txt"  # the build writes this file beside the libraries (cmake/CpuFeatures.cmake)

# e_machine of an ELF header: name in platform.machine()
_MACHINES = {3: "i686", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}

# system library: packages that contain it
_PACKAGES = {
    "libstdc++.": "apt install libstdc++6 (Debian, Ubuntu), dnf install libstdc++ (Fedora, RHEL)",
    "libcuda.": "install NVIDIA's driver",
    "libcudart": "pip install 'kvedge[cuda13]' brings it, as NVIDIA's CUDA toolkit does",
    "libcublas": "pip install 'kvedge[cuda13]' brings it, as NVIDIA's CUDA toolkit does",
    "libvulkan.": "apt install libvulkan1 (Debian, Ubuntu), dnf install vulkan-loader (Fedora, RHEL)",
}
_NEWER = {
    "GLIBC": "a newer C library (glibc)",
    "GLIBCXX": "a newer C++ library (libstdc++)",
    "CXXABI": "a newer C++ library (libstdc++)",
}


def this_machine() -> str:
    """Returns the processor's architecture under Linux's name."""
    name = platform.machine().lower()
    return _SAME.get(name, name)


@functools.cache
def cpu_features() -> frozenset[str] | None:
    """Returns the instruction sets of processor and system under the names of /proc/cpuinfo. None: unknown."""
    flags = cpu.field("flags") or cpu.field("Features")
    return frozenset(flags.split()) if flags else None


def check_cpu(folder: Path) -> None:
    """Checks that this processor has the instructions of the libraries: a missing instruction would kill the process.

    Raises LibraryError. Does nothing if the instructions of the build, or of the processor, are unknown.
    """
    try:
        machine, *needed = (folder / FEATURES_FILE).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return
    have = cpu_features()
    if have is None or machine != this_machine():
        return  # the loader, or check_machine, reports another architecture better
    missing = [name for name in needed if name not in have]
    if missing:
        names = ", ".join(missing)
        raise LibraryError(
            f"the libraries in {folder} are built for a processor with {names}, which this processor lacks; {REBUILD}"
        )


def check_machine(library: Path, remedy: str = REBUILD) -> None:
    """Raises LibraryError for a file that is no ELF library, or for another architecture. Checks only on Linux."""
    if not sys.platform.startswith("linux"):
        return
    try:
        with library.open("rb") as file:
            head = file.read(20)
    except OSError as error:
        raise LibraryError(f"{library} cannot be read: {error.strerror}; {remedy}") from None
    if len(head) < 20 or head[:4] != b"\x7fELF":
        raise LibraryError(f"{library} is not a shared library of this system (not an ELF file); {remedy}")
    (machine,) = struct.unpack_from(">H" if head[5] == 2 else "<H", head, 18)
    name = _MACHINES.get(machine, f"machine {machine}")
    if machine in _MACHINES and name != this_machine() and this_machine() in _MACHINES.values():
        raise LibraryError(f"{library} is built for {name}, but this machine is {this_machine()}; {remedy}")


def lacks_driver(message: str) -> bool:
    """Returns whether the loader misses a library of a GPU driver, or Vulkan's loader."""
    return re.search(r"lib(cuda|vulkan)\.so\.1: cannot open", message) is not None


def explain(library: Path, message: str, remedy: str = REBUILD) -> LibraryError:
    """Returns an error with the loader's message in one line, and what to do."""
    text = " ".join(message.split())
    if "failed to map segment" in text:
        where = f"{library.parent} is on a file system that does not allow programs (noexec)"
        return LibraryError(f"{library.name} cannot be loaded: {where}; install kvedge elsewhere")
    if found := re.search(r"version [`'](\w+?)_([\w.]+)' not found", text):
        what = _NEWER.get(found[1], f"a newer {found[1]}")
        glibc = platform.libc_ver()[1] if found[1] == "GLIBC" else ""
        has = f"than this system{f' ({glibc})' if glibc else ''}"
        return LibraryError(f"{library.name} needs {what} {has}, version {found[2]} or later; {remedy}")
    if found := re.search(r"(\S+): cannot open shared object file: No such file", text):
        missing = Path(found[1]).name
        how = next((how for prefix, how in _PACKAGES.items() if missing.startswith(prefix)), None)
        return LibraryError(f"{library.name} needs {missing}, which is missing: {how or remedy}")
    return LibraryError(f"{library} cannot be loaded: {text}; {remedy}")


def check_version(libkvedge: ctypes.CDLL, abi_version: int) -> None:
    """Raises LibraryError for a libkvedge of another version than the Python package."""
    libkvedge.kvedge_version.restype = ctypes.c_char_p
    path, found = libkvedge._name, libkvedge.kvedge_abi_version()
    if found != abi_version:
        raise LibraryError(f"{path} has ABI version {found}, but this package needs {abi_version}; {REINSTALL}")
    version, package = libkvedge.kvedge_version().decode(), package_version()
    # CMake only knows the numbers of a version; sources without installation have no version
    if package != NOT_INSTALLED and _numbers(version) != _numbers(package):
        raise LibraryError(f"{path} has version {version}, but the Python package has version {package}; {REINSTALL}")


def _numbers(version: str) -> str:
    return re.sub(r"[^0-9.].*", "", version).rstrip(".")
