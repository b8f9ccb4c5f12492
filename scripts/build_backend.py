"""Builds a package with a ggml backend for GPUs, in dist/. kvedge finds the package by its entry point and loads it.

    python3 scripts/dev.py backend vulkan      # needs libvulkan-dev 1.4, spirv-headers, glslc 2025; seven minutes
    python3 scripts/dev.py backend cuda13      # needs nvcc of CUDA 13; hours of two cores
    python3 scripts/dev.py backend cuda12 --archs "80-real;90"       # some architectures of ggml's default
    python3 scripts/dev.py backend vulkan -DVulkan_GLSLC_EXECUTABLE=...       # options of CMake

Modules of an older glslc do not use the matrix cores of GPUs. The package does not contain NVIDIA's libraries: pip
installs them from the package index. The module works only with a kvedge of the same pin (llama_source.py --pin).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import build_wheel
import sbom
from build_stock import cmake
from llama_source import ROOT, SourceError, ended, log, pin

WORK = ROOT / "build" / "backend"
# ggml's default for a new nvcc; "75-virtual" also serves later GPUs, which compile the code when they load it
ARCHS = "75-virtual;80-real;86-real;89-real;90-real;100-real;120-virtual;120-real"
SYSTEMS = ("libggml-base.so", "libvulkan.so.1", "libcuda.so.1", "libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*")


@dataclass(frozen=True)
class Kind:
    """A kind of package: ggml's name of the backend; NVIDIA's packages and the folders of their libraries."""

    backend: str
    requires: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


KINDS = {
    "vulkan": Kind("Vulkan"),
    "cuda12": Kind(
        "CUDA", ("nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12"), ("nvidia/cuda_runtime/lib", "nvidia/cublas/lib")
    ),
    "cuda13": Kind("CUDA", ("nvidia-cuda-runtime", "nvidia-cublas"), ("nvidia/cu13/lib",)),
}
PROJECT = """
[build-system]
requires = ["scikit-build-core>=0.11"]
build-backend = "scikit_build_core.build"
[project]
name = "kvedge-{name}"
version = "{version}"
description = "{backend} for kvedge"
requires-python = ">=3.10"
license = "MIT"
license-files = ["LICENSE*"]
dependencies = {requires}
[project.entry-points."kvedge.backends"]
{backend} = "kvedge_{name}"
[tool.scikit-build]
wheel.cmake = false
wheel.platlib = true
wheel.py-api = "py3"
wheel.packages = ["kvedge_{name}"]
"""
PACKAGE = '''"""The {backend} backend of kvedge: a module of ggml's that kvedge loads."""

MODULE = "{module}"
PIN = "{pin}"
'''


def compiled(kind: Kind, folder: Path, archs: str, given: list[str]) -> Path:
    """Builds the module with the options of a portable kvedge, and returns its file. Raises SourceError."""
    options = {"CMAKE_BUILD_TYPE": "Release", "KVEDGE_PORTABLE": "ON", f"GGML_{kind.backend.upper()}": "ON"}
    if kind.backend == "CUDA":
        options["CMAKE_CUDA_ARCHITECTURES"] = archs
    if ccache := shutil.which("ccache"):
        options |= {f"CMAKE_{language}_COMPILER_LAUNCHER": ccache for language in ("C", "CXX", "CUDA")}
    options |= dict(option.removeprefix("-D").split("=", 1) for option in given)
    log(f"compiling {kind.backend} ...")
    cmake(ROOT, folder, options, f"ggml-{kind.backend.lower()}")
    return next(folder.glob(f"bin/*ggml-{kind.backend.lower()}.*"))


def cuda_release(name: str) -> str:
    """Returns the release of nvcc, for example 13.0. Raises SourceError if nvcc belongs to another CUDA than `name`."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        raise SourceError(f"there is no {nvcc}; CUDACXX=/path/to/nvcc names the compiler") from None
    found = re.search(r"release (\d+)\.(\d+)", said)
    if not found or f"cuda{found[1]}" != name:
        raise SourceError(f"{nvcc} is of CUDA {found[1] if found else '?'}, not of {name}; CUDACXX names another")
    return f"{found[1]}.{found[2]}"


def packed(name: str, module: Path, release: str) -> Path:
    """Makes a wheel that contains the module, and returns the wheel's file. Raises SourceError."""
    kind, project = KINDS[name], WORK / f"{name}-package"
    shutil.rmtree(project, ignore_errors=True)
    package = project / f"kvedge_{name}"
    package.mkdir(parents=True)
    version = sbom.pyproject("version")  # the package has the version of kvedge
    requires = [f"kvedge=={version}"]
    requires += [f"{of}>={release},<{int(release.partition('.')[0]) + 1}" for of in kind.requires]
    words = {"name": name, "backend": kind.backend, "module": module.name, "version": version, "pin": pin()}
    (project / "pyproject.toml").write_text(PROJECT.format(requires=json.dumps(requires), **words), encoding="utf-8")
    (package / "__init__.py").write_text(PACKAGE.format(**words), encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", project / "LICENSE")
    shutil.copy(sbom.TEXTS / "LICENSE-llama.cpp", project)
    shutil.copy2(module, package)
    if kind.folders:
        where = ":".join(f"$ORIGIN/../{folder}" for folder in kind.folders)
        build_wheel.run(
            ["patchelf", "--force-rpath", "--set-rpath", where, str(package / module.name)], "naming NVIDIA's folders"
        )
    raw = project / "raw"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", str(project), "--no-deps"]
    build_wheel.run([*pip, "--no-build-isolation", "-w", str(raw)], "packing the wheel")
    return build_wheel.repair(build_wheel.only(raw), [f"--exclude={library}" for library in SYSTEMS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=KINDS)
    parser.add_argument("--archs", default=ARCHS, help="CUDA's architectures as CMake takes them (default %(default)s)")
    parser.add_argument("--module", type=Path, help="pack a module that was built already, in bin/ of a build")
    args, options = parser.parse_known_args()
    if any(not option.startswith("-D") or "=" not in option for option in options):
        parser.error(f"options of CMake are -DNAME=VALUE, not {' '.join(options)}")
    release = cuda_release(args.name) if args.name.startswith("cuda") else ""
    module = args.module or compiled(KINDS[args.name], WORK / args.name, args.archs, options)
    print(build_wheel.published(packed(args.name, module.absolute(), release)))


if __name__ == "__main__":
    sys.exit(ended(main))
