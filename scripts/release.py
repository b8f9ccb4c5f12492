"""Does all steps of a release except publishing: texts, workflows, the source distribution, and the wheel, twice.

    python3 scripts/dev.py release --check --tag v0.1.0    # before the tag is pushed; as long as two wheels take
    python3 scripts/dev.py release --check --quick         # without the wheels; seconds

Builds the last commit, not the files of the folder. The second wheel is built from the source distribution: in another
folder, at another time, with another time zone, language and umask, without ccache. Both wheels must be equal, byte by
byte. build/release/dist has the files. Prints one line for each file: SHA-256 and name.
"""

import argparse
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import release_texts
from llama_source import ROOT, SourceError, ended, git, log

WORK = ROOT / "build" / "release"
SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


@functools.cache
def epoch() -> str:
    """Returns the last commit's time. Cached, because a newer commit can appear before the second wheel is built."""
    return git(ROOT, "log", "-1", "--format=%ct").strip()


@dataclass(frozen=True)
class Builder:
    """One of two builders whose environments differ as much as possible."""

    folder: str
    umask: int
    variables: dict[str, str]

    def run(self, command: list[str], where: Path) -> str:
        """Runs a command and returns its stdout. Raises SourceError."""
        env = {**os.environ, **self.variables, "SOURCE_DATE_EPOCH": epoch(), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=where, env=env, umask=self.umask, stdout=subprocess.PIPE, text=True,
                              check=False)  # fmt: skip
        if done.returncode:
            raise SourceError(f"in build/release/{self.folder}: {' '.join(command[:3])} failed")
        return done.stdout

    def clone(self) -> Path:
        tree = WORK / self.folder / "kvedge"
        tree.parent.mkdir(parents=True)
        self.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tree)], WORK)
        return tree

    def sdist(self, tree: Path) -> Path:
        out = WORK / self.folder / "sdist"
        self.run([sys.executable, "-c", SDIST, str(out)], tree)
        return next(out.glob("*.tar.gz"))

    def wheel(self, tree: Path) -> Path:
        said = self.run([sys.executable, str(tree / "scripts" / "build_wheel.py")], tree)
        return Path(said.split()[-1])


ONE = Builder("one", 0o022, {"LC_ALL": "C", "TZ": "UTC"})
OTHER = Builder("the-other-one", 0o077, {"LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "CCACHE_DISABLE": "1"})


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yields the differences of two wheels or source distributions; nothing if they are equal."""
    if one.name != other.name:
        yield f"the names {one.name} and {other.name} differ"
    if one.read_bytes() == other.read_bytes():
        return
    first, second = members(one), members(other)
    if list(first) != list(second):
        yield f"{one.name}: its files or their order differ: {sorted(first.keys() ^ second.keys()) or 'order'}"
    same = [name for name in first if name in second]
    yield from (f"{one.name}: {name} differs" for name in same if first[name] != second[name])
    if first == second:
        yield f"{one.name}: it is packed differently"


def members(archive: Path) -> dict[str, tuple[object, ...]]:
    """Returns {file: (mode, time, content)} of an archive, in order."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {one.filename: (one.external_attr, one.date_time, wheel.read(one)) for one in wheel.infolist()}
    with tarfile.open(archive) as tar:
        files = {one.name: (one, tar.extractfile(one)) for one in tar.getmembers()}
        return {name: (one.mode, one.mtime, data.read() if data else b"") for name, (one, data) in files.items()}


def workflows() -> None:
    """Lints .github/workflows with actionlint (dev.py installs a package that contains the program)."""
    program = shutil.which("actionlint") or str(Path(sys.executable).with_name("actionlint"))
    files = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SourceError(f"actionlint: {(done.stdout + done.stderr).strip()}")


def check(tag: str, quick: bool) -> list[Path]:
    """Does all steps, and returns the files to publish. Raises SourceError."""
    if found := list(release_texts.faults(ROOT, tag)):
        raise SourceError("; ".join(found))
    workflows()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    log("packing the sources twice ...")
    tree = ONE.clone()
    made = [ONE.sdist(tree)]
    again = [OTHER.sdist(OTHER.clone())]
    if not quick:
        log("building the first wheel ...")
        made.append(ONE.wheel(tree))
        log("building the second wheel, from the source distribution ...")
        unpacked = WORK / OTHER.folder / "unpacked"
        with tarfile.open(made[0]) as tar:
            tar.extractall(unpacked, filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(unpacked)
        again.append(OTHER.wheel(next(unpacked.iterdir())))
    found = [line for one, other in zip(made, again, strict=True) for line in differences(one, other)]
    if found:
        raise SourceError(f"two builds are not equal ({len(found)} times): {'; '.join(found[:5])}")
    dist = WORK / "dist"
    dist.mkdir()
    return [Path(shutil.copyfile(path, dist / path.name)) for path in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", required=True, help="all but publishing")
    parser.add_argument("--tag", default="", help="the tag of the release; the texts must agree with it")
    parser.add_argument("--quick", action="store_true", help="without the wheels")
    args = parser.parse_args()
    for path in check(args.tag, args.quick):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


if __name__ == "__main__":
    sys.exit(ended(main))
