"""Every Python example of the guide, the README and the docstrings runs, and prints what it says."""

import ast
import asyncio
import inspect
import json
import re
import runpy
import shutil
import textwrap

import pytest
from conftest import ROOT

import pykvedge
from pykvedge.native import llamacpp

GUIDE = (ROOT / "docs" / "python.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
DATA, EXAMPLES = ROOT / "pykvedge" / "data", ROOT / "examples"
FILES = {
    "model.gguf": DATA / "demo-model.gguf",
    "mmproj.gguf": DATA / "demo-mmproj.gguf",
    "scene.png": EXAMPLES / "scene-1.png",
    "other.png": EXAMPLES / "scene-2.png",
    "photo.jpg": EXAMPLES / "photo.jpg",
}


def examples(page):
    """(heading, code) of each block."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            yield pytest.param(code, id=section.splitlines()[0])


def docstring_example(thing):
    """The indented lines after the first paragraph of a docstring, from `import` or `with` on."""
    lines = inspect.getdoc(thing).splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(r" {4}(import|with)\b", line))
    end = next((i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    ")), len(lines))
    return textwrap.dedent("\n".join(lines[start:end]))


@pytest.fixture
def folder(tmp_path, monkeypatch, native):
    for name, source in FILES.items():
        try:
            (tmp_path / name).symlink_to(source)
        except OSError:  # where that needs a privilege
            shutil.copy(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llamacpp, "default_threads", lambda: 1)
    return tmp_path


def promised(code):
    """What the comments behind print(...) say, in order."""
    return re.findall(r"^ *print\(.*\)  # (.+)$", code, re.MULTILINE)


def run(code):
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("code", [*examples(GUIDE), *examples(README)])
def test_examples_of_the_guide(code, folder, capfd):
    run(code)
    printed = iter(capfd.readouterr().out.splitlines())
    for line in promised(code):
        assert line in printed, f"{line!r} was not printed, or not in this order"  # `in` reads on from the last one


def test_the_guide_has_what_it_should():
    found = list(examples(GUIDE))
    assert len(found) >= 10 and sum(len(promised(e.values[0])) for e in found) >= 20
    for error in pykvedge.__all__:
        if error.endswith("Error"):
            assert f"`{error}`" in GUIDE, error


def test_the_readme_has_what_it_should():
    assert len(list(examples(README))) == 1
    for command in ("python3 scripts/dev.py test", "python3 scripts/dev.py demo"):
        assert f"`{command}`" in README, command


def shown(value):
    """What a notebook shows of the value of a cell, without times."""
    return re.sub(r" \| [\d.]+ tok/s", "", repr(value))


def test_the_notebook_shows_what_its_cells_print(folder, monkeypatch, capsys):
    """The cells run in one namespace, as in a kernel, which would take packages and seconds and find nothing more."""
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
    run(code if "import pykvedge" in code else f"import pykvedge\n{code}")


def test_the_example_of_attach(folder, capfd):
    code = docstring_example(pykvedge.attach)
    space: dict = {}
    exec(code, space)
    try:
        assert space["llm"].create_completion("Hello " * 40, max_tokens=3)["choices"][0]["finish_reason"]
    finally:
        space["llm"].close()


def test_every_example_in_a_docstring_is_one_of_these():
    """A new one in what is public has to be added above."""
    code = re.compile(r"^ {4}(import|from|with|for|\w+ =|\w+\() *", re.MULTILINE)
    docs = {name: inspect.getdoc(getattr(pykvedge, name)) or "" for name in pykvedge.__all__}
    assert {name for name in docs if code.search(docs[name])} == {"attach", "load", "Session"}
