"""Tries kvedge's patches on another source distribution of llama-cpp-python, and moves the pin to it.

    python3 scripts/dev.py pin 0.3.37                fetched by pip: does each patch fit, and where does one not?
    python3 scripts/dev.py pin FILE.tar.gz --build   also builds kvedge with it, and runs the relevant tests
    python3 scripts/dev.py pin 0.3.37 --write        moves the pin: hash, version, patches; `git diff` shows it

A patch is `exact` (every hunk at its line), `offset` (hunks moved), `merged` (nearby lines changed; git's three-way
merge found no conflict), `mended` (by you), or it `fails`. All work is done in build/pin/VERSION; only --write changes
this tree. If a patch fails, build/pin/VERSION/llama.cpp is a git repository stopped at this patch, with conflict marks:
mend the file, `git add` it, `git cherry-pick --continue`, and run the command again. Exit code: 0 if all patches fit
and all checks passed, 1 if not, 2 if the archive cannot be used.
"""

import argparse
import contextlib
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_source as pinned
from build_stock import cmake, tool
from export_patches import export, write
from llama_source import BASE_TAG, BINDINGS, LLAMA, ROOT, Part, SourceError, commit, ended, git, log, read_series
from pin_structs import struct_changes

NEEDED = ("src/llama-graph.cpp", "include/llama.h", "ggml/include/ggml.h", "tools/mtmd/mtmd.h")
HISTORY = ("CHANGELOG.md", "docs/results/", "docs/dev/pin.txt")  # files about the past keep the old version
CHECKS = {
    "provider": ["tests/test_provider.py"],
    "families": ["tests/test_families.py"],
    "structs and functions": ["tests/test_abi.py", "tests/test_libraries.py"],
    "native tests": ["tests/test_native.py"],
    "packaged model": ["tests/test_packaged.py"],
}
HUNK = re.compile(r"^@@ -(\d+)\S* .*@@|^--- a/(.*)", re.M)


@dataclass(frozen=True)
class Source:
    """A source distribution of llama-cpp-python, in a work folder."""

    sdist: Path
    version: str
    sha256: str
    folder: Path
    index: str  # result of comparing the checksum with the package index

    def part(self, pinned_part: Part) -> Part:
        return replace(pinned_part, root=pinned_part.root.replace(pinned.VERSION, self.version))


def open_source(what: str, work: Path) -> Source:
    """Puts the archive in a work folder. Raises SourceError: the archive is invalid or differs from the index."""
    if re.fullmatch(r"\d+(\.\d+)+", what) and not Path(what).exists():
        folder = work / what
        folder.mkdir(parents=True, exist_ok=True)
        sdist = folder / pinned.sdist_name(what)
        if not sdist.is_file():
            log(f"fetching {pinned.PACKAGE} {what} from the package index")
            pinned.download(folder, what, "")
        return Source(sdist, read_version(sdist), pinned.file_sha256(sdist), folder, "the same")
    sdist = Path(what)
    if not sdist.is_file():
        raise SourceError(f"{what} is no file, and no version such as {pinned.VERSION}")
    version, sha256 = read_version(sdist), pinned.file_sha256(sdist)
    folder = work / version
    folder.mkdir(parents=True, exist_ok=True)
    index = ask_index(sdist, version, sha256, folder)
    kept = folder / pinned.sdist_name(version)
    if kept.resolve() != sdist.resolve():
        shutil.copyfile(sdist, kept)
    return Source(kept, version, sha256, folder, index)


def read_version(sdist: Path) -> str:
    try:
        with tarfile.open(sdist) as archive:
            names = archive.getnames()
            root = names[0].split("/")[0] if names else ""
            info = archive.extractfile(f"{root}/PKG-INFO")
            head = info.read().decode("utf-8", "replace") if info else ""
    except (tarfile.TarError, EOFError, OSError, KeyError):
        raise SourceError(f"{sdist} is no source distribution: it is no archive with a PKG-INFO") from None
    name, version = (re.search(rf"^{field}: (.*)$", head, re.M) for field in ("Name", "Version"))
    if not name or not version or re.sub(r"[-_.]+", "-", name[1].strip()) != pinned.PACKAGE:
        raise SourceError(f"{sdist} is no source distribution of {pinned.PACKAGE}")
    lacks = [path for path in (LLAMA.proof, *NEEDED) if f"{root}/vendor/llama.cpp/{path}" not in names]
    lacks += [BINDINGS.proof] if f"{root}/{BINDINGS.proof}" not in names else []
    if lacks or root != LLAMA.root.split("/")[0].replace(pinned.VERSION, version[1].strip()):
        raise SourceError(f"{sdist} lacks what kvedge is built from: {', '.join(lacks) or 'a folder ' + root}")
    return version[1].strip()


def ask_index(sdist: Path, version: str, sha256: str, folder: Path) -> str:
    """Compares the checksum with the index's, through pip. Raises SourceError if they differ."""
    try:
        pinned.download(folder, version, sha256)
    except SourceError as error:
        if "DO NOT MATCH" in str(error):
            raise SourceError(f"{sdist} is not the {version} of the package index: its sha256 is {sha256}") from None
        return "not asked: no such version there, or no network"
    return "the same"


def merge(source: Source, patches: Path, part: Part) -> tuple[Path, list[dict[str, Any]]]:
    """Applies the series to the new source, in a repository. Returns the repository, and a row for each patch."""
    tree, series = source.folder / part.name, read_series(patches)
    stamp = tree / ".git" / "kvedge-pin.json"
    sums = [source.sha256, *(pinned.file_sha256(patch.path) for patch in series)]
    with contextlib.suppress(OSError, ValueError):
        old = json.loads(stamp.read_text(encoding="utf-8"))
        if old["sums"] == sums:
            if (tree / ".git" / "CHERRY_PICK_HEAD").exists() or (tree / ".git" / "sequencer").exists():
                log(f"{tree} is being mended: `git cherry-pick --continue` there, or remove the folder to begin anew")
            elif len(git(tree, "rev-list", f"{BASE_TAG}..kvedge").split()) == len(series):
                return tree, [{**row, "fit": "mended"} if row["fit"] == "fails" else row for row in old["rows"]]
            return tree, old["rows"]
    shutil.rmtree(tree, ignore_errors=True)
    pinned.make_git(tree, None, patches, part)
    for key, value in {"user.name": "kvedge", "user.email": "kvedge@localhost", "merge.conflictStyle": "diff3"}.items():
        git(tree, "config", key, value)
    old = git(tree, "rev-list", "--reverse", f"{BASE_TAG}..HEAD").split()
    git(tree, "checkout", "-q", "-B", "kvedge", BASE_TAG)
    git(tree, "rm", "-rqf", ".")
    pinned.unpack(source.sdist, tree, source.part(part))
    commit(tree, f"{part.name} of {pinned.PACKAGE} {source.version}")
    git(tree, "tag", "-f", BASE_TAG)
    rows = [{"patch": patch.path.name, **fitted(tree, patch, which)} for patch, which in zip(series, old, strict=True)]
    if any(row["fit"] == "fails" for row in rows):
        git(tree, "reset", "-q", "--hard", BASE_TAG)
        with contextlib.suppress(SourceError):
            git(tree, "cherry-pick", *old)
    stamp.write_text(json.dumps({"sums": sums, "rows": rows}), encoding="utf-8")
    return tree, rows


def fitted(tree: Path, patch: pinned.Patch, which: str) -> dict[str, Any]:
    """Applies one patch and returns its fit. A failed patch is still forced in, so that later patches can be tried."""
    try:
        pinned.apply(patch, tree)
        commit(tree, patch.subject + (f"\n\n{patch.body}" if patch.body else ""))
        before, now = lines_of(patch.path.read_text()), lines_of(git(tree, "show"))
        moved = [abs(a - b) for a, b in zip(before, now, strict=False)]
        return {"fit": "offset" if any(moved) else "exact", "lines": max(moved, default=0), "where": []}
    except SourceError:
        pass
    try:
        git(tree, "cherry-pick", which)
        return {"fit": "merged", "lines": 0, "where": []}
    except SourceError:
        where = conflicts(tree)
    with contextlib.suppress(SourceError):
        git(tree, "cherry-pick", "--abort")
    try:
        git(tree, "cherry-pick", "-X", "theirs", which)
    except SourceError:  # a file is missing
        git(tree, "cherry-pick", "--abort")
    return {"fit": "fails", "lines": 0, "where": where}


def lines_of(diff: str) -> list[int]:
    return [int(found[1]) for found in HUNK.finditer(diff) if found[1]]


def conflicts(tree: Path) -> list[dict[str, Any]]:
    """Returns the places that both upstream and the patch changed: file, line, and both versions."""
    found = []
    for entry in git(tree, "status", "--porcelain").splitlines():
        kind, path = entry[:2], entry[3:]
        if kind in ("UD", "DU", "UA", "AU"):
            found.append({"file": path, "line": 0, "upstream": ["the file is gone, or has another name"], "patch": []})
        elif kind in ("UU", "AA"):
            text = (tree / path).read_text(encoding="utf-8", errors="replace")
            for mark in re.finditer(r"^<{7} .*?\n(.*?)^\|{7} .*?\n(.*?)^={7}\n(.*?)^>{7} .*?$", text, re.M | re.S):
                new, base, ours = (mark[i].splitlines() for i in (1, 2, 3))
                line = text.count("\n", 0, mark.start()) + 1
                found.append({"file": path, "line": line, "upstream": changed(base, new), "patch": changed(base, ours)})
    return found


def changed(old: list[str], new: list[str]) -> list[str]:
    return [line for line in difflib.ndiff(old, new) if line[0] in "+-"]


def move(root: Path, source: Source, trees: dict[Path, Path]) -> list[str]:
    """Moves the pin of a clone: the series, and each place with the version or the hash. Returns the changed files."""
    for folder, tree in trees.items():
        with contextlib.redirect_stdout(sys.stderr):
            write(export(tree), root / folder)
    names = re.compile(rf"(?<![\d.]){re.escape(pinned.VERSION)}(?!\.?\d)|{pinned.SHA256}")
    for name in git(root, "ls-files").splitlines():
        path = root / name
        if name.startswith(HISTORY) or not path.is_file() or path.suffix == ".patch":
            continue
        with contextlib.suppress(UnicodeDecodeError):
            text = path.read_bytes().decode("utf-8")
            moved = names.sub(lambda m: source.sha256 if m[0] == pinned.SHA256 else source.version, text)
            if moved != text:
                path.write_bytes(moved.encode("utf-8"))
    return git(root, "status", "--porcelain").splitlines()


def build_and_check(source: Source, trees: dict[Path, Path]) -> list[dict[str, Any]]:
    """Builds a copy of kvedge with the moved pin, and runs the relevant tests. Returns a row for each."""
    copy = source.folder / "kvedge"
    copy.mkdir(exist_ok=True)
    for name in git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)  # keeps times, so that a second build is short
    git(copy, "init", "-q")
    git(copy, "add", "-A")
    move(copy, source, trees)
    site = source.folder / "site"
    site.mkdir(exist_ok=True)
    # the environment's Python would find an editable kvedge first
    (site / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
    )
    os.environ["KVEDGE_CACHE_DIR"] = str(source.folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (site, copy, copy / "pykvedge" / "bindings")))
    return [built(copy), *(checked(copy, name, tests) for name, tests in CHECKS.items())]


def built(copy: Path) -> dict[str, Any]:
    """Builds the copy, its native tests and its baseline, and installs into its folder. Raises SourceError."""
    start, build = time.monotonic(), copy / "build" / "dev"
    launcher = {f"CMAKE_{language}_COMPILER_LAUNCHER": "ccache" for language in ("C", "CXX") if shutil.which("ccache")}
    cmake(copy, build, launcher, "all", "kvedge-tests")
    install = [tool("cmake"), "--install", str(build), "--component", "kvedge", "--prefix", str(copy)]
    for command in (install, [sys.executable, "scripts/build_stock.py", "--build", str(build)]):
        if subprocess.run(command, cwd=copy, stdout=sys.stderr, check=False).returncode:
            raise SourceError(f"in {copy}: {' '.join(command[:2])} failed; its messages are above")
    return {"check": "build", "good": True, "result": "built", "seconds": round(time.monotonic() - start)}


def checked(copy: Path, name: str, tests: list[str]) -> dict[str, Any]:
    """Runs some tests of the copy."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, text=True, errors="replace", check=False)
    sys.stderr.write(done.stdout)
    last = (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1].strip("= ")
    return {"check": name, "good": not done.returncode, "result": last, "seconds": round(time.monotonic() - start)}


def show(report: dict[str, Any]) -> None:
    print(f"{pinned.PACKAGE} {report['version']} (the pin is {pinned.VERSION}); index's checksum: {report['index']}")
    for row in report["patches"]:
        print(f"{row['fit']:7} {row['lines'] or '':>5} {row['patch']}")
        for place in row["where"]:
            print(f"        {place['file']}:{place['line']}")
            for who in ("upstream", "patch"):
                lines = place[who]
                print("".join(f"            {who}: {line}\n" for line in lines[:8]), end="")
                if len(lines) > 8:
                    print(f"            {who}: and {len(lines) - 8} lines more")
    for change in report["structs"]:
        print(f"struct  {change}")
    for row in report["checks"]:
        print(f"check   {row['check']}: {row['result']} ({row['seconds']} s)")
    for path in report["written"]:
        print(f"wrote   {path}")
    if report["folder"]:
        log(f"mend the first one that fails in {report['folder']}, `git cherry-pick --continue` there, run this again")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="FILE.tar.gz|VERSION")
    parser.add_argument("--build", action="store_true", help="build kvedge with it and run the tests that tell")
    parser.add_argument("--write", action="store_true", help="move the pin of this clone, if all patches fit")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    args = parser.parse_args()
    try:
        source = open_source(args.source, ROOT / "build" / "pin")
    except SourceError as error:
        log(f"error: {error}")
        return 2
    trees: dict[Path, Path] = {}
    rows: list[dict[str, Any]] = []
    fails: dict[str, str] = {}  # patch -> the repository where you mend it
    for part, name in ((LLAMA, "patches"), (BINDINGS, "patches/bindings")):
        tree, more = merge(source, ROOT / name, part)
        trees[Path(name)] = tree
        rows += more
        fails |= {row["patch"]: str(tree) for row in more if row["fit"] == "fails"}
    structs = struct_changes(source.folder, source.sdist, source.part(LLAMA), source.part(BINDINGS))
    checks = build_and_check(source, trees) if args.build and not fails else []
    good = not fails and all(row["good"] for row in checks)
    written = move(ROOT, source, trees) if args.write and good else []
    report = {
        "version": source.version, "sha256": source.sha256, "index": source.index, "patches": rows, "structs": structs,
        "checks": checks, "written": written, "folder": next(iter(fails.values()), ""),
    }  # fmt: skip
    print(json.dumps(report, indent=1)) if args.json else show(report)
    if fails and (args.build or args.write):
        log(f"error: nothing built or written: {len(fails)} of {len(rows)} patches do not fit: {', '.join(fails)}")
    elif args.write and not good:
        log("error: nothing written: a check failed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(ended(main))
