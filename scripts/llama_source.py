"""Fetches the pinned llama.cpp, checks it and applies patches/ to it.

The source comes from the source distribution of llama-cpp-python (its vendor/llama.cpp), through pip. A per-user cache
keeps it, so that only the first build needs a network. CMake calls this script at configure time:

    llama_source.py --out DIR        a patched tree in DIR; files that did not change keep their times
    llama_source.py --bindings DIR   the Python bindings, DIR/llama_cpp, with patches/bindings applied
    llama_source.py --git DIR        a git repository: the pinned source, then one commit per patch
    llama_source.py --check DIR      does the tree DIR carry the patches?
    llama_source.py --fetch          the path of the verified source distribution, on stdout
    llama_source.py --pin            the id that a separately built backend must match, on stdout
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
VENDOR = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
# sources of the libraries; everything else (web UI, converters, vocabularies) is several times larger
WANTED = (
    "CMakeLists.txt", "LICENSE", "licenses", "cmake", "common", "ggml", "include", "src", "vendor", "tools/mtmd",
)  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".kvedge-source.json"
BASE_TAG = "kvedge-base"
MENDS = "*-mend-*.patch"  # patches for faults of llama.cpp that also stop the baseline


class SourceError(Exception):
    """An error that the user can act on; the message is one line."""


@dataclass(frozen=True)
class Patch:
    """One file of the series: a subject, a body with the reason, and a diff in git's form."""

    path: Path
    subject: str
    body: str

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Reads a patch. Raises SourceError if the file has no diff."""
        head, line, diff = path.read_bytes().decode("utf-8", "surrogateescape").partition("\n---\n")
        if not line or "\n@@ " not in diff:
            raise SourceError(f"{path.name} is no patch: a subject, a reason, a line of three dashes and a diff")
        subject, _, body = head.removeprefix("Subject: ").partition("\n")
        return cls(path, subject, body.strip("\n"))

    def changed_lines(self) -> tuple[int, int, list[str]]:
        """Returns (lines added, lines removed, changed files)."""
        rows = [row.split("\t") for row in git(self.path.parent, "apply", "--numstat", str(self.path)).splitlines()]
        return sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows), [row[2] for row in rows]


@dataclass(frozen=True)
class Part:
    """A part of the source distribution to unpack."""

    name: str
    root: str  # folder inside the archive
    wanted: tuple[str, ...]  # files and folders below root
    proof: str  # a file that must be in the part


LLAMA = Part("llama.cpp", VENDOR, WANTED, "CMakeLists.txt")
BINDINGS = Part("llama_cpp", f"llama_cpp_python-{VERSION}", ("llama_cpp", "LICENSE.md"), "llama_cpp/__init__.py")


def pin() -> str:
    """Returns the id of a ggml module's sources: the version, and a hash of the patches and kvedge's operations."""
    digest = hashlib.sha256(SHA256.encode())
    for pattern in ("patches/*.patch", "native/src/device/own.h", "native/src/device/c*/*.c*"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return f"{VERSION}-{digest.hexdigest()[:12]}"


def cache_dir() -> Path:
    """Returns the per-user folder of the source distribution. KVEDGE_CACHE_DIR overrides it."""
    if path := os.environ.get("KVEDGE_CACHE_DIR"):
        return Path(path)
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "kvedge" / "cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "kvedge"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "kvedge"


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def verify(sdist: Path) -> None:
    try:
        found = file_sha256(sdist)
    except OSError as error:
        raise SourceError(f"cannot read {sdist}: {error.strerror}") from error
    if found != SHA256:
        raise SourceError(f"{sdist} is not the pinned source: its sha256 is {found}, the pin is {SHA256}")


def fetch(fallback: Path | None = None) -> Path:
    """Returns the verified source distribution, from the cache or by pip. fallback: used if the cache is read-only."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    sdist = folder / SDIST
    if sdist.is_file() and file_sha256(sdist) == SHA256:
        return sdist
    if not writable:
        if fallback is None:
            raise SourceError(f"cannot write to {folder}; set KVEDGE_CACHE_DIR to a folder that can be written")
        fallback.mkdir(parents=True, exist_ok=True)
        folder, sdist = fallback, fallback / SDIST
        if sdist.is_file() and file_sha256(sdist) == SHA256:
            return sdist
    log(f"fetching {PACKAGE} {VERSION} (72 MiB) from the package index")
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as tmp:
        download(Path(tmp))
        verify(Path(tmp) / SDIST)
        (Path(tmp) / SDIST).replace(sdist)
    return sdist


def download(folder: Path, version: str = VERSION, sha256: str = SHA256) -> None:
    # with a hash in a requirements file, pip checks the archive before it runs code of the archive
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE}=={version}" + (f" --hash=sha256:{sha256}" if sha256 else "") + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", PACKAGE]
    command += ["--require-hashes"] if sha256 else []
    command += ["-r", str(wanted), "-d", str(folder), "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=_pip_environment(), check=False
    )
    if done.returncode == 0 and (folder / sdist_name(version)).is_file():
        return
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines()]
    if any("No module named pip" in line for line in lines):
        raise SourceError(f"{sys.executable} has no pip, which fetches llama.cpp: install pip and scikit-build-core")
    why = next((line for line in lines if line.startswith("ERROR")), f"pip ended with code {done.returncode}")
    hint = "; is the package index reachable?" if "from versions: none" in why else ""
    raise SourceError(f"cannot fetch {PACKAGE} {version}: {why.removeprefix('ERROR: ')}{hint}")


def sdist_name(version: str) -> str:
    return SDIST.replace(VERSION, version)


def _pip_environment() -> dict[str, str]:
    """Returns an environment where pip uses uv's index, if only uv has one."""
    env = dict(os.environ)
    index = env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL")
    if index and not env.get("PIP_INDEX_URL"):
        env["PIP_INDEX_URL"] = index.rpartition("=")[2] if "=" in index.split("://")[0] else index
    return env


def unpack(sdist: Path, dest: Path, part: Part = LLAMA) -> None:
    """Unpacks a part of the archive into dest: only plain files, and nothing outside dest."""
    wanted = [PurePosixPath(w).parts for w in part.wanted]
    try:
        with tarfile.open(sdist) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if not path.is_relative_to(part.root) or not (member.isfile() or member.islnk() or member.issym()):
                    continue
                parts = path.relative_to(part.root).parts
                if not any(parts[: len(w)] == w for w in wanted):
                    continue
                if ".." in parts or not member.isfile():
                    raise SourceError(f"{sdist.name} holds an unsafe entry: {member.name}")
                target = dest.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None
                with source, target.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                if member.mode & 0o100:
                    target.chmod(0o755)
    except (tarfile.TarError, EOFError) as error:
        raise SourceError(f"cannot unpack {sdist}: {error}") from error
    if not (dest / part.proof).is_file():
        raise SourceError(f"{sdist} holds no {part.root}/{part.proof}")


def read_series(folder: Path, which: str = "*.patch") -> list[Patch]:
    """Returns the patches of a folder whose names match, sorted by name."""
    return [Patch.read(path) for path in sorted(folder.glob(which))]


def apply(patch: Patch, tree: Path) -> None:
    """Applies a patch to the tree. Raises SourceError, without any change, if a line of context differs."""
    try:
        git(tree, "apply", "--whitespace=nowarn", str(patch.path.absolute()))
    except SourceError as error:
        raise SourceError(f"{patch.path.name}: {error}") from error


def prepare(out: Path, sdist: Path | None, patches: Path | None, which: str = "*.patch", part: Part = LLAMA) -> bool:
    """Makes `out` a part of the pinned source with matching patches. Returns False if `out` was up to date."""
    series = sorted(patches.glob(which)) if patches else []
    want = {"source": SHA256, "wanted": part.wanted, "patches": [[p.name, file_sha256(p)] for p in series]}
    stamp = out / STAMP
    with contextlib.suppress(OSError, ValueError):
        if json.loads(stamp.read_text(encoding="utf-8")) == json.loads(json.dumps(want)):
            return False
    if out.exists() and not stamp.is_file() and any(out.iterdir()):
        raise SourceError(f"{out} exists and was not made by this script: remove it, or choose another folder")
    sdist = sdist or fetch(out.parent)
    verify(sdist)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=out.name + ".new-") as tmp:
        fresh = Path(tmp) / "fresh"
        unpack(sdist, fresh, part)
        for patch in read_series(patches, which) if patches else []:
            apply(patch, fresh)
        (fresh / STAMP).write_text(json.dumps(want), encoding="utf-8")
        _replace_tree(fresh, out)
    log(f"{part.name} of {PACKAGE} {VERSION} with {len(series)} patches is in {out}")
    return True


def _replace_tree(fresh: Path, out: Path) -> None:
    """Makes `out` equal to `fresh`. Equal files stay untouched, so a build compiles only the changed files."""
    if not out.exists():
        fresh.replace(out)
        return
    # a tree without a valid stamp counts as unfinished, until the last file is in place
    (out / STAMP).write_text("{}", encoding="utf-8")
    new = set(_files(fresh))
    for path in set(_files(out)) - new:
        (out / path).unlink()
    for path in sorted(new - {STAMP}):
        old = out / path
        if not old.is_file() or old.read_bytes() != (fresh / path).read_bytes():
            old.parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).replace(old)
            # a new time starts the build even if the archive's clock was ahead
            os.utime(old)
    (fresh / STAMP).replace(out / STAMP)


def _files(root: Path) -> Iterator[str]:
    return (p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def check(tree: Path, patches: Path) -> str | None:
    """Returns None if the tree has all patches, else the first problem of removing them in reverse order."""
    series = [str(patch.path.absolute()) for patch in read_series(patches)]
    try:
        git(tree, "apply", "--whitespace=nowarn", "--check", "-R", *reversed(series))
    except SourceError as error:
        return str(error)
    return None


def make_git(out: Path, sdist: Path | None, patches: Path, part: Part = LLAMA) -> None:
    """Makes a repository to edit the patches in: the pinned source with a tag, and one commit per patch."""
    if out.exists() and any(out.iterdir()):
        raise SourceError(f"{out} is not empty")
    series = read_series(patches)
    sdist = sdist or fetch()
    verify(sdist)
    out.mkdir(parents=True, exist_ok=True)
    unpack(sdist, out, part)
    git(out, "init", "-q", "-b", "kvedge")
    commit(out, f"{part.name} of {PACKAGE} {VERSION}")
    git(out, "tag", BASE_TAG)
    for patch in series:
        apply(patch, out)
        commit(out, patch.subject + (f"\n\n{patch.body}" if patch.body else ""))
    log(f"{out}: {len(series)} commits after {BASE_TAG}; export them with scripts/export_patches.py {out}")


def git(tree: Path, *args: str, text: str | None = None) -> str:
    """Runs git in a tree, without outer repositories and the user's hooks, signing and line ends. Returns stdout."""
    config = ("core.hooksPath=/dev/null", "commit.gpgsign=false", "core.autocrlf=false", "core.safecrlf=false")
    command = ["git", "-C", str(tree), *(arg for entry in config for arg in ("-c", entry)), *args]
    try:
        # text mode would change the line ends of a diff
        data = text.encode("utf-8", "surrogateescape") if text is not None else None
        alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.absolute().parent)}
        done = subprocess.run(command, input=data, capture_output=True, env=alone, check=False)
    except FileNotFoundError as error:
        raise SourceError("git is not installed; the patches are applied with it") from error
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise SourceError(f"git {args[0]}: " + "; ".join(line.removeprefix("error: ") for line in lines))
    return done.stdout.decode("utf-8", "surrogateescape")


def commit(tree: Path, message: str) -> None:
    git(tree, "add", "-A", "-f")
    identity = ("-c", "user.name=kvedge", "-c", "user.email=kvedge@localhost")
    git(tree, *identity, "commit", "-q", "--allow-empty", "--cleanup=whitespace", "-F", "-", text=message + "\n")


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def ended(main: Callable[[], int | None]) -> int:
    """Runs a script and returns its exit code. A SourceError prints one line, and the code is 1."""
    try:
        try:
            return main() or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe; without this, Python reports the error at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (SourceError, OSError, subprocess.CalledProcessError) as error:
        log(f"error: {error}")
        return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="DIR", help="make the patched tree in DIR")
    action.add_argument("--bindings", type=Path, metavar="DIR", help="make the patched bindings in DIR")
    action.add_argument("--git", type=Path, metavar="DIR", help="make a git repository of the series in DIR")
    action.add_argument(
        "--check", type=Path, metavar="DIR", help="does the tree DIR carry the patches? (exit code 1: no)"
    )
    action.add_argument("--pin", action="store_true", help="print what a backend must be built from")
    action.add_argument("--fetch", action="store_true", help="print the path of the verified source distribution")
    parser.add_argument(
        "--sdist", type=Path, metavar="FILE", help="use this source distribution instead of fetching it"
    )
    parser.add_argument("--patches", type=Path, default=ROOT / "patches", metavar="DIR", help="default: patches/")
    args = parser.parse_args()
    if args.out:
        prepare(args.out.absolute(), args.sdist, args.patches)
    elif args.bindings:
        prepare(args.bindings.absolute(), args.sdist, args.patches / "bindings", part=BINDINGS)
    elif args.git:
        make_git(args.git.absolute(), args.sdist, args.patches)
    elif args.check:
        if lacks := check(args.check, args.patches):
            raise SourceError(f"{args.check} does not carry the patches: {lacks}")
    else:
        print(pin() if args.pin else fetch())


if __name__ == "__main__":
    sys.exit(ended(main))
