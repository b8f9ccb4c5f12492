"""The programs of the pages, docstrings and the notebook: each runs or compiles, and prints what its text says."""

import ast
import asyncio
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from docpages import EXAMPLES, PAGES, ROOT, blocks, fill_hub, put_files
from hubs import environment as hub_environment
from hubserver import HubServer

import pykvedge
from pykvedge.native import cpackage, libraries, llamacpp

GUIDE, README = ROOT / "docs" / "python.md", ROOT / "README.md"
PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python" and not block.reason]
IN_C = [block for page in PAGES for block in blocks(page) if block.language == "c" and not block.reason]
# declarations from the text around a block in C
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


def promised(block):
    """Returns the comments behind print(...), in order."""
    return re.findall(r"^ *print\(.*\) *# (.+)$", block.text, re.MULTILINE)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python_prints_what_the_page_says(block, folder, capfd):
    exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"})
    printed = iter(capfd.readouterr().out.splitlines())
    for line in promised(block):
        assert line in printed, f"{block.place}: {line!r} was not printed"  # `in` continues from the last line


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
    guide = [block for block in PYTHON if block.page == GUIDE]
    assert len(guide) >= 10 and sum(len(promised(block)) for block in guide) >= 20
    assert len([block for block in PYTHON if block.page == README]) == 1
    assert len(PYTHON) >= len(guide) + 8 and len(IN_C) >= 2


def test_the_guide_and_the_readme_have_what_they_should():
    for page, words in (
        (GUIDE, [name for name in pykvedge.__all__ if name.endswith("Error")]),
        (README, ["python3 scripts/dev.py test", "python3 scripts/dev.py demo"]),
    ):
        for word in words:
            assert f"`{word}`" in page.read_text("utf-8"), word


# ------------------------------------------------------------------------------------------------------------
# Examples elsewhere


def docstring_example(thing):
    """Returns the indented lines of a docstring's example, from `import` or `with` on."""
    lines = inspect.getdoc(thing).splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(r" {4}(import|with)\b", line))
    end = next((i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    ")), len(lines))
    return textwrap.dedent("\n".join(lines[start:end]))


def shown(value):
    """Returns a notebook's display of a cell's value, without times."""
    return re.sub(r" \| [\d.]+ tok/s", "", repr(value))


def test_the_notebook_shows_what_its_cells_print(folder, monkeypatch, capsys):
    """Runs the cells in one namespace. A real kernel would need packages and seconds, and find nothing more."""
    monkeypatch.chdir(EXAMPLES)
    space: dict = {}
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text("utf-8"))["cells"]
    for cell in (c for c in cells if c["cell_type"] == "code"):
        tree = ast.parse("".join(cell["source"]))
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        steps = eval(compile(tree, cell["id"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), space)
        if asyncio.iscoroutine(steps):
            asyncio.run(steps)
        value = eval(compile(last, cell["id"], "eval"), space) if last else None
        printed = "".join(t for o in cell["outputs"] if o["output_type"] == "stream" for t in o["text"])
        assert capsys.readouterr().out == printed, cell["id"]
        for text in ("".join(o["data"]["text/plain"]) for o in cell["outputs"] if "data" in o):
            assert text == "<PIL image>" or shown(value) == re.sub(r" \| [\d.]+ tok/s", "", text), cell["id"]


def test_the_example_of_a_picture_through_llama_cpp_python(folder, capfd, monkeypatch):
    monkeypatch.setattr("sys.argv", ["attach_picture.py"])
    runpy.run_path(str(EXAMPLES / "attach_picture.py"), run_name="__main__")
    out, err = capfd.readouterr()
    assert out == "64UM3\n" and "(144 image" in err


@pytest.mark.parametrize("thing", [pykvedge, pykvedge.load, pykvedge.Session])
def test_examples_of_docstrings(thing, folder, capfd):
    code = docstring_example(thing)
    assert "Session(" in code
    exec(code if "import pykvedge" in code else f"import pykvedge\n{code}", {"__name__": "__main__"})


def test_the_example_of_attach(folder, capfd):
    code = docstring_example(pykvedge.attach)
    space: dict = {}
    exec(code, space)
    try:
        assert space["llm"].create_completion("Hello " * 40, max_tokens=3)["choices"][0]["finish_reason"]
    finally:
        space["llm"].close()


def test_every_example_in_a_docstring_is_one_of_these():
    """A new public example must be added to the tests above."""
    code = re.compile(r"^ {4}(import|from|with|for|\w+ =|\w+\() *", re.MULTILINE)
    docs = {name: inspect.getdoc(getattr(pykvedge, name)) or "" for name in pykvedge.__all__}
    assert {name for name in docs if code.search(docs[name])} == {"attach", "load", "Session"}
