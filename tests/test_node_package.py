"""packages/node: its tests in Node's runner, its types, its package files, and its version."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "packages" / "node"
TYPESCRIPT = ROOT / "build" / "node" / "node_modules"  # npm install --prefix build/node typescript@5 @types/node@20
NODE, NPM = shutil.which("node"), shutil.which("npm")
PROGRAM = Path(sys.executable).with_name("kvedge")
ABOUT = json.loads((PACKAGE / "package.json").read_text())


def run(*command, **more):
    environment = {**os.environ, "KVEDGE_PROGRAM": str(PROGRAM), **more}
    return subprocess.run(command, cwd=PACKAGE, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not NODE, reason="needs node")
@pytest.mark.skipif(not PROGRAM.exists(), reason="needs kvedge beside this Python")
def test_nodes_own_tests():
    done = run(NODE, "--test", "test/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^# pass [1-9]", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.skipif(not NODE, reason="needs node")
def test_types():
    compiler = TYPESCRIPT / "typescript" / "bin" / "tsc"
    if not compiler.exists():
        pytest.skip("needs npm install --prefix build/node typescript@5 @types/node@20")
    done = run(NODE, str(compiler), "-p", "test", "--typeRoots", str(TYPESCRIPT / "@types"))
    assert done.returncode == 0, done.stdout
    script = "import('kvedge').then((m) => console.log(Object.keys(m).sort().join(' ')))"
    typed = re.findall(r"^export (?:class|function) (\w+)", (PACKAGE / "index.d.ts").read_text(), re.MULTILINE)
    assert run(NODE, "-e", script).stdout.split() == sorted(typed)


@pytest.mark.skipif(not NPM, reason="needs npm")
def test_what_travels(tmp_path):
    done = run(NPM, "pack", "--dry-run", "--json", npm_config_cache=str(tmp_path))
    assert done.returncode == 0, done.stderr
    files = {one["path"] for one in json.loads(done.stdout)[0]["files"]}
    assert files == {*ABOUT["files"], "package.json", "README.md"}


def test_version():
    version = re.search(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert ABOUT["version"] == version
    assert not {"dependencies", "optionalDependencies"} & ABOUT.keys()
