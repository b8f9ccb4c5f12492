"""Fetching, patching and exporting llama.cpp, on small trees made here."""

import ast
import difflib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from typing import ClassVar

import export_patches
import llama_source
import pytest
from conftest import ROOT
from llama_source import SourceError, apply, prepare, read_series, unpack

SOURCE = "".join(f"line {i}\n" for i in range(1, 31))
PATCHED = SOURCE.replace("line 10\n", "line ten\nand a half\n").replace("line 20\n", "")


def diff(path, old, new):
    """Returns a unified diff in git's form."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), "a/" + path if old else "/dev/null",
        "b/" + path if new else "/dev/null", lineterm="\n",
    )  # fmt: skip
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def make_patch(path, old, new, subject="a reason"):
    return f"Subject: {subject}\n\nWhy it is so.\n---\n" + diff(path, old, new)


CHANGE = make_patch("src/a.cpp", SOURCE, PATCHED)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cpp").write_text(SOURCE)
    return tmp_path


class TestApply:
    @pytest.fixture
    def series(self, tmp_path):
        """series(text, ...) writes patches to a folder -> the result of read_series."""
        return lambda *texts: read_series(write_series(tmp_path / "patches", *texts))

    def test_what_a_patch_says(self, series):
        (patch,) = series(CHANGE)
        assert (patch.subject, patch.body) == ("a reason", "Why it is so.")
        assert patch.changed_lines() == (2, 2, ["src/a.cpp"])

    @pytest.mark.parametrize("text", ["", "Subject: nothing\n", "Subject: x\n\nWhy.\n---\nno diff\n"])
    def test_what_is_no_patch(self, series, text):
        with pytest.raises(SourceError, match=r"0001-p\.patch is no patch"):
            series(text)

    def test_moved_hunks_apply(self, tree, series):
        (tree / "src" / "a.cpp").write_text("new first\n" * 7 + SOURCE)
        apply(*series(CHANGE), tree)
        assert (tree / "src" / "a.cpp").read_text() == "new first\n" * 7 + PATCHED

    def test_mismatch_names_patch_and_file_and_changes_nothing(self, tree, series):
        text = SOURCE.replace("line 21\n", "line XXI\n")
        (tree / "src" / "a.cpp").write_text(text)
        with pytest.raises(SourceError, match=r"^0001-p\.patch: .*src/a\.cpp") as caught:
            apply(*series(CHANGE), tree)
        assert "\n" not in str(caught.value)
        assert (tree / "src" / "a.cpp").read_text() == text

    def test_a_repository_around_the_tree_does_not_matter(self, tmp_path, tree, series):
        """Git would ignore changes below another folder of an outer repository."""
        subprocess.run(["git", "init", "-q", str(tmp_path.parent)], check=True)
        try:
            apply(*series(CHANGE), tree)
        finally:
            shutil.rmtree(tmp_path.parent / ".git")
        assert (tree / "src" / "a.cpp").read_text() == PATCHED

    @pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x"])
    def test_paths_outside_the_tree_are_refused(self, tree, series, path):
        with pytest.raises(SourceError):
            apply(*series(make_patch(path, "", "b\n")), tree)
        assert not (tree.parent / "x").exists()


@pytest.fixture
def pin(tmp_path, monkeypatch):
    """pin(files) -> the path of a small source distribution that replaces the pinned one."""

    def make(files, entries=()):
        path = tmp_path / llama_source.SDIST
        with tarfile.open(path, "w:gz") as archive:
            for name, text in {"CMakeLists.txt": "project(x)\n", **files}.items():
                data = text.encode()
                info = tarfile.TarInfo(f"{llama_source.VENDOR}/{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            for info in entries:
                archive.addfile(info)
        monkeypatch.setattr(llama_source, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
        return path

    return make


def write_series(folder, *patches):
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.patch"):
        old.unlink()
    for number, text in enumerate(patches, 1):
        (folder / f"{number:04d}-p.patch").write_text(text)
    return folder


class TestSource:
    files: ClassVar = {"src/a.cpp": SOURCE, "src/b.cpp": "b\n", "docs/big.md": "not wanted\n"}

    @pytest.fixture
    def prepared(self, pin, tmp_path):
        """A patched tree, its source and its patches."""
        made = tmp_path / "build" / "llama.cpp", pin(self.files), write_series(tmp_path / "patches", CHANGE)
        assert prepare(*made)
        return made

    def test_patched_tree(self, prepared):
        out, _, patches = prepared
        assert (out / "src" / "a.cpp").read_text() == PATCHED
        assert not (out / "docs").exists()
        assert llama_source.check(out, patches) is None
        assert [p.name for p in out.parent.iterdir()] == ["llama.cpp"]

    def test_nothing_to_do_the_second_time(self, prepared):
        prepared[1].unlink()
        assert not prepare(*prepared)

    def test_only_files_that_change_are_touched(self, prepared):
        out, _, patches = prepared
        for path in out.rglob("*.cpp"):
            os.utime(path, (1, 1))
        write_series(patches, CHANGE, make_patch("src/new.cpp", "", "new\n"))
        assert prepare(*prepared)
        assert (out / "src" / "new.cpp").read_text() == "new\n"
        assert [(out / "src" / n).stat().st_mtime for n in ("a.cpp", "b.cpp")] == [1, 1]
        write_series(patches, make_patch("src/b.cpp", "b\n", "c\n"))
        assert prepare(*prepared)
        assert (out / "src" / "a.cpp").read_text() == SOURCE
        assert (out / "src" / "a.cpp").stat().st_mtime > 1
        assert not (out / "src" / "new.cpp").exists()

    def test_failing_patch_leaves_the_tree_alone(self, prepared, tmp_path):
        out, sdist, patches = prepared
        good, bad = make_patch("src/b.cpp", "b\n", "c\n"), make_patch("src/a.cpp", "other\n", "thing\n")
        write_series(patches, good, bad)
        with pytest.raises(SourceError, match=r"^0002-p.patch: .*src/a.cpp"):
            prepare(*prepared)
        assert (out / "src" / "a.cpp").read_text() == PATCHED
        assert (out / "src" / "b.cpp").read_text() == "b\n"
        fresh = tmp_path / "fresh"
        with pytest.raises(SourceError):
            prepare(fresh, sdist, patches)
        assert not fresh.exists() and not list(tmp_path.glob("fresh*"))

    def test_a_folder_of_somebody_else_is_refused(self, pin, tmp_path):
        out = tmp_path / "mine"
        out.mkdir()
        (out / "thesis.tex").write_text("precious")
        with pytest.raises(SourceError, match="was not made by this script"):
            prepare(out, pin(self.files), None)
        assert (out / "thesis.tex").read_text() == "precious"

    def test_wrong_hash(self, pin, tmp_path):
        sdist = pin(self.files)
        sdist.write_bytes(sdist.read_bytes() + b"x")
        with pytest.raises(SourceError, match="is not the pinned source"):
            prepare(tmp_path / "llama.cpp", sdist, None)
        assert not (tmp_path / "llama.cpp").exists()

    @pytest.mark.parametrize("kind", ["escape", "link"])
    def test_unsafe_entries(self, pin, tmp_path, kind):
        info = tarfile.TarInfo(f"{llama_source.VENDOR}/src/" + ("../../../../evil" if kind == "escape" else "link"))
        if kind == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        with pytest.raises(SourceError, match="unsafe entry"):
            unpack(pin(self.files, [info]), tmp_path / "out")
        assert not (tmp_path / "evil").exists()

    def test_truncated_archive(self, pin, tmp_path):
        sdist = pin({"src/a.cpp": os.urandom(20000).hex()})
        sdist.write_bytes(sdist.read_bytes()[:5000])
        with pytest.raises(SourceError, match="cannot unpack"):
            unpack(sdist, tmp_path / "out")

    def test_cache_serves_the_second_fetch(self, pin, tmp_path, monkeypatch):
        sdist = pin(self.files)
        monkeypatch.setenv("KVEDGE_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(llama_source, "download", lambda folder: pytest.fail("went to the network"))
        assert llama_source.fetch() == sdist
        good = sdist.read_bytes()
        sdist.write_bytes(b"damaged")
        monkeypatch.setattr(llama_source, "download", lambda folder: (folder / sdist.name).write_bytes(good))
        assert llama_source.fetch().read_bytes() == good

    def test_command_line_errors_are_one_line(self, tmp_path):
        script = [sys.executable, str(ROOT / "scripts" / "llama_source.py")]
        bad = tmp_path / "bad.tar.gz"
        bad.write_bytes(b"x")
        done = subprocess.run(
            [*script, "--out", str(tmp_path / "o"), "--sdist", str(bad)], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


class TestExport:
    files: ClassVar = {"src/a.cpp": SOURCE, "src/crlf.h": "a\r\nb\r\nc\r\n", ".gitignore": "*.log\n"}

    @pytest.fixture
    def made(self, pin, tmp_path):
        """A repository with a commit for each patch, its source and its patches."""
        patches = write_series(
            tmp_path / "patches",
            make_patch("src/a.cpp", SOURCE, PATCHED, "Graph: ask the provider (part 1)"),
            make_patch("src/new.log", "", "ignored by .gitignore\n", "A new file"),
            make_patch("src/crlf.h", "a\r\nb\r\nc\r\n", "a\r\nB\r\nc\r\n", "Line ends stay"),
        )
        work, sdist = tmp_path / "work", pin(self.files)
        llama_source.make_git(work, sdist, patches)
        return work, sdist, patches

    def test_round_trip(self, made, tmp_path):
        one, sdist, _ = made
        two = tmp_path / "two"
        export_patches.write(export_patches.export(one), tmp_path / "out")
        names = sorted(p.name for p in (tmp_path / "out").iterdir())
        assert names == [
            "0001-graph-ask-the-provider-part-1.patch",
            "0002-a-new-file.patch",
            "0003-line-ends-stay.patch",
        ]
        assert [p.body for p in read_series(tmp_path / "out")] == ["Why it is so."] * 3
        llama_source.make_git(two, sdist, tmp_path / "out")
        assert export_patches.export(two) == export_patches.export(one)
        assert (two / "src" / "a.cpp").read_text() == PATCHED
        assert (two / "src" / "crlf.h").read_bytes() == b"a\r\nB\r\nc\r\n"

    def test_old_files_go_and_uncommitted_work_is_refused(self, made):
        work, _, patches = made
        export_patches.write(export_patches.export(work), patches)
        assert not list(patches.glob("*-p.patch"))
        (work / "src" / "a.cpp").write_text("changed\n")
        with pytest.raises(SourceError, match="not committed"):
            export_patches.export(work)

    def test_git_agrees(self, made):
        work, _, patches = made
        result = {p: (work / p).read_bytes() for p in ("src/a.cpp", "src/crlf.h", "src/new.log")}
        llama_source.git(work, "checkout", "-q", llama_source.BASE_TAG)
        llama_source.git(work, "apply", *sorted(str(p) for p in patches.glob("*.patch")))
        assert {p: (work / p).read_bytes() for p in result} == result


class TestSeries:
    """The series of this repository."""

    @pytest.fixture
    def pinned(self):
        sdist = llama_source.cache_dir() / llama_source.SDIST
        return sdist if sdist.is_file() else pytest.skip("the pinned source is not in the cache")

    def test_stays_small(self):
        series = read_series(ROOT / "patches")
        assert series and sum(added + removed for added, removed, _ in (p.changed_lines() for p in series)) <= 400

    def test_every_patch_has_a_reason(self):
        readme = (ROOT / "patches" / "README.md").read_text(encoding="utf-8")
        for patch in read_series(ROOT / "patches"):
            name = patch.path.name
            assert patch.body, f"{name} says no reason"
            assert f"\n| {name[:4]} " in readme, f"patches/README.md does not list {name}"

    def test_leaves_the_operations_of_ggml_alone(self):
        """Except the mends, which the baseline also has."""
        mends = read_series(ROOT / "patches", llama_source.MENDS)
        paths = {f for p in read_series(ROOT / "patches") if p not in mends for f in p.changed_lines()[2]}
        assert {p for p in paths if p.startswith("ggml/")} == {
            "ggml/src/ggml-alloc.c",
            "ggml/src/ggml-cpu/ggml-cpu.c",  # waiting of threads
            "ggml/src/ggml-cpu/ggml-cpu.cpp",  # lifetime of threads; support of kvedge's attention
            "ggml/src/ggml-cpu/ops.cpp",  # hands a sixth source to kvedge
            "ggml/src/ggml-cpu/ops.h",
            "ggml/src/ggml-cuda/fattn.cu",
            "ggml/src/ggml-cuda/fattn.cuh",
            "ggml/src/ggml-cuda/ggml-cuda.cu",
            "ggml/src/ggml-rpc/ggml-rpc.cpp",
        }

    def test_the_bindings_are_of_the_pinned_source_and_not_a_dependency(self, pinned, tmp_path):
        """kvedge contains the bindings: the index only has a source that compiles a second llama.cpp."""
        assert llama_source.PACKAGE not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        series = read_series(ROOT / "patches" / "bindings")
        assert series and all(patch.subject and patch.body for patch in series)
        out = tmp_path / "bindings"
        assert prepare(out, pinned, ROOT / "patches" / "bindings", part=llama_source.BINDINGS)
        assert not prepare(out, pinned, ROOT / "patches" / "bindings", part=llama_source.BINDINGS)
        assert "libraries.folder_with(" in (out / "llama_cpp" / "llama_cpp.py").read_text(encoding="utf-8")
        assert (out / "LICENSE.md").is_file() and not (out / "vendor").exists()

    def test_applies_to_the_pinned_source(self, pinned, tmp_path):
        assert prepare(tmp_path / "llama.cpp", pinned, ROOT / "patches")
        assert llama_source.check(tmp_path / "llama.cpp", ROOT / "patches") is None


def test_old_pythons_get_a_sentence():
    """An old Python must be able to parse the entry script."""
    text = (ROOT / "scripts" / "dev.py").read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 4))
