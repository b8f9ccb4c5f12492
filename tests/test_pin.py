"""Moving the pin (scripts/pin.py), in a small clone with made-up source distributions."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import llama_source
import pytest
from llama_source import file_sha256
from test_patches import PATCHED, ROOT, SOURCE, make_patch, write_series

OLD, NEW = llama_source.VERSION, "9.9.9"
LLAMA = {
    "CMakeLists.txt": "project(x)\n", "src/llama-graph.cpp": SOURCE, "src/b.cpp": SOURCE, "src/c.cpp": SOURCE,
    "ggml/include/ggml.h": "", "tools/mtmd/mtmd.h": "", "tools/mtmd/mtmd-helper.h": "",
    "include/llama.h": "struct llama_p { int a; char b; };\n",
}  # fmt: skip
BINDINGS = {
    "llama_cpp/__init__.py": "load = 1\n", "llama_cpp/mtmd_cpp.py": "",
    "llama_cpp/llama_cpp.py": 'class llama_p(ctypes.Structure):\n    _fields_ = [("a", c_int), ("b", c_char)]\n',
}  # fmt: skip


def sdist(folder, version, llama=(), bindings=(), lacks=()):
    folder.mkdir(exist_ok=True)
    root, path = f"llama_cpp_python-{version}", folder / f"llama_cpp_python-{version}.tar.gz"
    files = {f"vendor/llama.cpp/{name}": text for name, text in {**LLAMA, **dict(llama)}.items()}
    files |= {"PKG-INFO": f"Name: llama_cpp_python\nVersion: {version}\n", **BINDINGS, **dict(bindings)}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in sorted(files.items()):
            if name not in lacks:
                info = tarfile.TarInfo(f"{root}/{name}")
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
    return path


@dataclass
class Clone:
    root: Path
    env: dict[str, str]

    def git(self, *args):
        return subprocess.run(
            ["git", *args], cwd=self.root, env=self.env, text=True, capture_output=True, check=True
        ).stdout

    def script(self, name, *args):
        command = [sys.executable, self.root / "scripts" / name, *args]
        return subprocess.run(command, env=self.env, text=True, capture_output=True, check=False)

    def pin(self, *args, code=0):
        done = self.script("pin.py", *args, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if done.stdout else done.stderr


@pytest.fixture(scope="module")
def pinned(tmp_path_factory):
    """A folder with a clone and a cache. Each test copies the folder."""
    folder = tmp_path_factory.mktemp("pinned")
    root, cache = folder / "clone", folder / "cache"
    (root / "scripts").mkdir(parents=True)
    for name in ("pin", "pin_structs", "llama_source", "export_patches", "build_stock"):
        shutil.copy(ROOT / "scripts" / f"{name}.py", root / "scripts")
    source = root / "scripts" / "llama_source.py"
    sha256 = file_sha256(sdist(cache, OLD))
    source.write_text(source.read_text(encoding="utf-8").replace(llama_source.SHA256, sha256), encoding="utf-8")
    (root / "page.md").write_text(f"made of llama-cpp-python {OLD}, not of 1.{OLD}.\n")
    (root / ".gitignore").write_text("/build/\n__pycache__/\n")
    changed = SOURCE.replace("line 15\n", "line fifteen\n")
    paths = ("src/llama-graph.cpp", "src/b.cpp", "src/c.cpp")
    series = [
        make_patch(path, SOURCE, text, path) for path, text in zip(paths, (PATCHED, PATCHED, changed), strict=True)
    ]
    write_series(root / "patches", *series)
    write_series(root / "patches" / "bindings", make_patch("llama_cpp/__init__.py", "load = 1\n", "load = 2\n"))
    made = clone_in(folder)
    made.git("init", "-q")
    made.git("add", "-A")
    made.pin(cache / llama_source.SDIST, "--write")  # writes patches in the script's form
    made.git("add", "-A")
    made.git("commit", "-qm", "pinned")
    return folder


def clone_in(folder):
    env = {**os.environ, "KVEDGE_CACHE_DIR": str(folder / "cache"), "PIP_NO_INDEX": "1", "GIT_AUTHOR_NAME": "t",
           "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@t"}  # fmt: skip
    return Clone(folder / "clone", env)


@pytest.fixture
def clone(pinned, tmp_path):
    shutil.copytree(pinned, tmp_path, symlinks=True, dirs_exist_ok=True)
    return clone_in(tmp_path)


def test_the_pin_moves_and_moves_back(clone, tmp_path):
    moved = {"src/b.cpp": "new\n" * 7 + SOURCE, "src/c.cpp": SOURCE.replace("line 12\n", "line XII\n"),
             "include/llama.h": "struct llama_p { int n; int a; char b; };\n"}  # fmt: skip
    new = sdist(tmp_path / "cache", NEW, moved)
    report = clone.pin(new, "--write")
    fits = [(row["fit"], row["lines"]) for row in report["patches"]]
    assert fits == [("exact", 0), ("offset", 7), ("merged", 0), ("exact", 0)]
    assert report["structs"] == [
        "llama_p: 8 bytes -> 12 bytes",
        "llama_p.a: at 0, 4 bytes -> at 4, 4 bytes",
        "llama_p.b: at 4, 1 bytes -> at 8, 1 bytes",
    ]
    page, source = (clone.root / "page.md").read_text(), (clone.root / "scripts" / "llama_source.py").read_text()
    assert page == f"made of llama-cpp-python {NEW}, not of 1.{OLD}.\n"
    assert f'"{NEW}"' in source and file_sha256(new) in source and OLD not in source
    out = tmp_path / "out"
    assert clone.script("llama_source.py", "--out", out).returncode == 0
    assert (out / "src" / "b.cpp").read_text() == "new\n" * 7 + PATCHED
    clone.pin(tmp_path / "cache" / llama_source.SDIST, "--write")
    assert clone.git("status", "--porcelain") == ""


@pytest.mark.whole
def test_what_fails_is_shown_and_can_be_mended(clone, tmp_path):
    new = sdist(tmp_path / "cache", NEW, {"src/b.cpp": SOURCE.replace("line 10\n", "line X\n")})
    report = clone.pin(new, "--write", code=1)
    assert [row["fit"] for row in report["patches"]] == ["exact", "fails", "exact", "exact"] and not report["written"]
    assert report["patches"][1]["where"] == [
        {"file": "src/b.cpp", "line": 10, "upstream": ["- line 10", "+ line X"],
         "patch": ["- line 10", "+ line ten", "+ and a half"]}
    ]  # fmt: skip
    done = clone.script("pin.py", new, "--build")
    assert done.returncode == 1 and "nothing built or written: 1 of 4 patches do not fit: 0002-" in done.stderr
    assert clone.git("status", "--porcelain") == ""
    tree = Path(report["folder"])
    text = (tree / "src" / "b.cpp").read_text()
    (tree / "src" / "b.cpp").write_text(re.sub(r"<{7}.*>{7}[^\n]*\n", "line X and a half\n", text, flags=re.DOTALL))
    for args in (["add", "-A"], ["-c", "core.editor=true", "cherry-pick", "--continue"]):
        subprocess.run(["git", *args], cwd=tree, env=clone.env, check=True, capture_output=True)
    assert [row["fit"] for row in clone.pin(new, "--write")["patches"]] == ["exact", "mended", "exact", "exact"]
    assert "+line X and a half\n" in (clone.root / "patches" / "0002-src-b-cpp.patch").read_text()


def test_what_is_no_source_distribution(clone, tmp_path):
    (tmp_path / "text.tar.gz").write_text("no archive")
    lacking = sdist(tmp_path / "lacking", NEW, lacks=["vendor/llama.cpp/include/llama.h"])
    other = sdist(tmp_path / "other", NEW, {"src/c.cpp": "other\n"})
    clone.env["PIP_FIND_LINKS"] = str(sdist(tmp_path / "index", NEW).parent)
    for what, said in {
        tmp_path / "none.tar.gz": "is no file",
        tmp_path / "text.tar.gz": "is no source distribution",
        lacking: "lacks what kvedge is built from: include/llama.h",
        other: "is not the 9.9.9 of the package index",
        "7.7.7": "cannot fetch llama-cpp-python 7.7.7",
    }.items():
        line = [line for line in clone.pin(what, code=2).splitlines() if not line.startswith("fetching")]
        assert len(line) == 1 and line[0].startswith("error: ") and said in line[0]
