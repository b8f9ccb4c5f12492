"""Writes patches/ again from a working tree of scripts/llama_source.py --git: one file per commit.

    export_patches.py TREE           writes the series, prints its files
    export_patches.py --count        changed lines per patch of patches/ and in all

The files depend only on the commits' content and messages: the same commits give the same bytes.
"""

import argparse
import re
import sys
from pathlib import Path

from llama_source import BASE_TAG, ROOT, Patch, SourceError, ended, git, read_series


def export(tree: Path) -> dict[str, str]:
    """Returns {file name: text} of every commit after the base, in order."""
    if not (tree / ".git").exists():
        raise SourceError(f"{tree} is no git repository; make one with scripts/llama_source.py --git {tree}")
    if git(tree, "status", "--porcelain", "--untracked-files=no").strip():
        raise SourceError(f"{tree} has changes that are not committed: commit them, or amend the commit they belong to")
    commits = git(tree, "rev-list", "--reverse", f"{BASE_TAG}..HEAD").split()
    series = {}
    for number, commit in enumerate(commits, 1):
        if len(git(tree, "rev-list", "--parents", "-n1", commit).split()) != 2:
            raise SourceError(f"{commit[:10]} is a merge: the series must be linear")
        message = git(tree, "show", "-s", "--format=%B", commit)
        subject, _, body = message.strip().partition("\n")
        why = body.strip("\n") + "\n" if body.strip() else ""
        series[f"{number:04d}-{slug(subject)}.patch"] = f"Subject: {subject}\n\n{why}---\n{diff(tree, commit)}"
    return series


def diff(tree: Path, commit: str) -> str:
    options = ["--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--full-index", "-U3"]
    options += ["--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers", "--indent-heuristic"]
    return git(tree, "diff-tree", "-p", *options, f"{commit}^", commit)


def slug(subject: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
    return words[:60].rstrip("-") or "patch"


def write(series: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.patch"):
        if old.name not in series:
            old.unlink()
    for name, text in series.items():
        data = text.encode("utf-8", "surrogateescape")
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
        print(path)


def count(patches: list[Patch]) -> None:
    total = 0
    for patch in patches:
        added, removed, _ = patch.changed_lines()
        total += added + removed
        print(f"{added + removed:5d}  +{added} -{removed}  {patch.path.name}")
    print(f"{total:5d}  in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", metavar="TREE")
    parser.add_argument("--out", type=Path, default=ROOT / "patches", metavar="DIR", help="default: patches/")
    parser.add_argument("--count", action="store_true", help="only count changed lines")
    args = parser.parse_args()
    if bool(args.tree) == args.count:
        parser.error("give the working tree, or --count")
    if args.count:
        count(read_series(args.out))
    else:
        write(export(args.tree), args.out)


if __name__ == "__main__":
    sys.exit(ended(main))
