"""The programs of the pages: each block runs, or compiles. test_guide.py has the README and docs/python.md."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from docpages import PAGES, blocks, fill_hub, put_files
from hubs import environment as hub_environment
from hubserver import HubServer

from pykvedge.native import cpackage, libraries, llamacpp

OTHERS = [page for page in PAGES if page.name not in ("README.md", "python.md")]
PYTHON = [block for page in OTHERS for block in blocks(page) if block.language == "python" and not block.reason]
IN_C = [block for page in PAGES for block in blocks(page) if block.language == "c" and not block.reason]
# what the text around a block in C has made before
GIVEN = """#include <kvedge.h>
#include <llama.h>
int given(struct llama_context * ctx, llama_memory_t mem, kvedge_cache * kv, llama_pos n_prompt, kvedge_plan * plan) {
    kvedge_error err;
    %s
    return mem && kv && n_prompt && plan && ctx;
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, native):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llamacpp, "default_threads", lambda: 1)
    with HubServer() as hub:
        fill_hub(hub)
        for name, value in hub_environment(hub, tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        yield tmp_path


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python_prints_what_the_page_says(block, folder, capfd):
    exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"})
    printed = iter(capfd.readouterr().out.splitlines())
    for line in re.findall(r"^ *print\(.*\) *# (.+)$", block.text, re.MULTILINE):
        assert line in printed, f"{block.place}: {line!r} was not printed"


@pytest.mark.parametrize("block", IN_C, ids=lambda block: block.place)
def test_c_compiles(block, tmp_path):
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    (tmp_path / "block.c").write_text(GIVEN % block.text)
    flags = ["-fsyntax-only", "-std=c99", "-Wall", "-Werror", *cpackage.flags("Cflags")]
    done = subprocess.run([compiler, *flags, tmp_path / "block.c"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.place}\n{done.stderr}"


JARS = Path("/usr/share/java")  # Debian's libjna-java and kotlin
ELSEWHERE = {
    "csharp": ("mcs", [["mcs", "block.cs"], ["mono", "block.exe"]]),
    "kotlin": ("kotlinc", [["kotlinc", "-cp", f"{JARS}/jna.jar", "-d", "out", "block.kt"],
                           ["java", "-cp", f"{JARS}/jna.jar:{JARS}/kotlin-stdlib.jar:out", "BlockKt"]]),
}  # fmt: skip


@pytest.mark.whole  # compilers of other languages take half a minute
@pytest.mark.parametrize("language", ELSEWHERE)
def test_other_languages_find_the_library(language, tmp_path, native):
    compiler, commands = ELSEWHERE[language]
    shutil.which(compiler) or pytest.skip(f"needs {compiler}")
    (block,) = (b for page in PAGES for b in blocks(page) if b.language == language)
    (tmp_path / f"block.{'cs' if language == 'csharp' else 'kt'}").write_text(block.text, encoding="utf-8")
    env = os.environ | {"LD_LIBRARY_PATH": str(libraries.require_dir())}
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    kept, refused = done.stdout.splitlines()
    assert kept.lower() == "200 of 1000, automatic: true" and refused.startswith("no scorer named 'größte'")


def test_there_are_blocks():
    assert len(PYTHON) >= 7 and len(IN_C) >= 2
