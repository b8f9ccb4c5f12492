"""The statements of a release: version and date in all places, and the licences of all included code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import release
import release_texts
import sbom
from dev_install import BUILD, venv_program

SHIPPED = ("llama", "mtmd", "ggml", "ggml-base", "ggml-cpu", "ggml-rpc", "kvedge", "kvedge-chat")
# "Copyright (c) 2012-2021 Yann Collet", "SPDX-FileCopyrightText: 2009 Florian Loitsch <...>"
HOLDER = re.compile(r"(?:\(c\)|copyright|CopyrightText:)[ ,:]*(?:\d{4}(?: *- *\d{4})?)[ ,]+(?:by )?(\w[^<\n,.*\"]*)",
                    re.IGNORECASE)  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> list[Path]:
    """Returns each file of llama.cpp that a library of the build was compiled from, as ninja noted."""
    build = max(BUILD.glob("py3-none-*"), key=lambda p: p.stat().st_mtime)  # the folder of the last install
    said = subprocess.run([venv_program("ninja"), "-C", str(build), "-t", "deps"], capture_output=True, text=True,
                          check=True).stdout  # fmt: skip
    objects = "|".join(SHIPPED) + "|vendor-hash"
    found = set()
    for block in said.split("\n\n"):
        if re.match(rf"\S*CMakeFiles/({objects})\.dir/", block):
            found.update(line.strip() for line in block.splitlines()[1:])
    tree = build / "llama.cpp"
    files = sorted({(build / name).resolve() for name in found})
    return [path for path in files if path.is_relative_to(tree.resolve()) and path.is_file()]


def below(compiled: list[Path]) -> list[tuple[str, Path]]:
    return [(path.as_posix().split("/llama.cpp/", 1)[1], path) for path in compiled]


def test_each_compiled_third_party_is_in_the_list_of_parts(compiled):
    vendored = [name for name, _ in below(compiled) if name.startswith("vendor/")]
    assert len(vendored) > 10
    known = {Path(part.source).parent.as_posix() for part in sbom.PARTS if part.source.startswith("vendor/")}
    strange = [n for n in vendored if Path(n).parent.as_posix() not in known and not n.startswith(sbom.PUBLIC_DOMAIN)]
    assert not strange, "add them to PARTS of scripts/sbom.py, and their licences to licenses/"


def test_each_holder_of_a_copyright_is_named_in_a_text_that_travels(compiled):
    texts = "\n".join(part.text().read_text(encoding="utf-8") for part in sbom.PARTS if not part.mingw)
    missing = set()
    for name, path in below(compiled):
        for holder in HOLDER.findall(path.read_text(encoding="utf-8", errors="replace")):
            plain = holder.strip().removesuffix(" and contributors").replace("Bjoern", "Björn")
            if plain not in texts:
                missing.add((name, plain))
    assert not missing


def test_licence_texts_are_those_of_the_sources(compiled):
    """A licence text that is part of a source file must have the source's words, whatever the comment marks."""
    words = {name: plain(path.read_text(encoding="utf-8", errors="replace")) for name, path in below(compiled)}
    for name in ("llamafile", "miniaudio", "stb", "subprocess"):
        part = next(part for part in sbom.PARTS if part.name == name)
        assert plain(part.text().read_text(encoding="utf-8")) in words[part.source], name
    for part, file in (("llama.cpp", "LICENSE"), ("xxhash", "vendor/hash/xxhash/LICENSE"),
                       ("rotate-bits", "vendor/hash/rotate-bits/LICENSE.md")):  # fmt: skip
        root = compiled[0].as_posix().split("/llama.cpp/")[0]
        assert (sbom.TEXTS / f"LICENSE-{part}").read_bytes() == Path(root, "llama.cpp", file).read_bytes()


def plain(text: str) -> str:
    return " ".join(re.sub(r"^\s*(//|\*)|[-=*]{2,}", " ", text, flags=re.MULTILINE).split())


def test_pyproject_states_the_licences_of_all_that_travels():
    from packaging.licenses import canonicalize_license_expression

    assert sbom.pyproject("license") == sbom.licence() == canonicalize_license_expression(sbom.licence())
    texts = {part.text() for part in sbom.PARTS}
    assert texts == {*sbom.TEXTS.glob("*"), *(sbom.ROOT / sbom.PAGE).glob("LICENSE-*")}


def test_sbom_names_every_part_and_is_the_same_each_time(compiled):
    tree = Path(compiled[0].as_posix().split("/llama.cpp/")[0], "llama.cpp")
    made = sbom.document(tree, mingw=False)
    assert json.dumps(made) == json.dumps(sbom.document(tree, mingw=False))
    found = {one["name"]: one.get("version") for one in made["components"]}
    assert set(found) == {part.name for part in sbom.PARTS if not part.mingw}
    page = (sbom.ROOT / sbom.PAGE / "VERSIONS.md").read_text(encoding="utf-8")
    assert found["marked"] in page and found["dompurify"] in page
    bindings = (tree.parent / "bindings" / "llama_cpp" / "__init__.py").read_text(encoding="utf-8")
    assert f'"{found["llama-cpp-python"]}"' in bindings


def test_the_image_asks_the_program_for_what_it_has():
    from pykvedge.cli.serve import serve
    from pykvedge.serve.server import Options

    recipe = (sbom.ROOT / "packaging" / "Containerfile").read_text(encoding="utf-8")
    assert f"EXPOSE {Options.port}\n" in recipe and f":{Options.port}/health" in recipe
    command = json.loads(re.search(r"^CMD (\[.*\])$", recipe, re.MULTILINE)[1])
    assert command[0] == serve.name and serve.make_context("serve", command[1:], resilient_parsing=True)
    with_extras = (sbom.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.search(r"/wheels/\*\)\[([a-z,]+)\]", recipe)[1].split(",")
    assert all(f"\n{extra} = [" in with_extras for extra in extras)


@pytest.fixture
def texts(tmp_path):
    """texts(...) writes the three files of a release, with changes."""

    def make(version="1.2.0", cited="1.2.0", changes="", released="2026-11-27"):
        day = f"date-released: {released}\n" if released else ""
        (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{version}"  # the one place\n')
        (tmp_path / "CITATION.cff").write_text(f"version: {cited}\n{day}")
        changes = changes or "## [Unreleased]\n\n## [1.2.0] - 2026-11-27\n\n- a\n\n## [1.1.0] - 2026-10-01\n"
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{changes}")
        return tmp_path

    return make


def test_this_tree_agrees_with_itself():
    assert list(release_texts.faults(sbom.ROOT)) == []


def test_a_release_that_agrees(texts):
    assert list(release_texts.faults(texts(), "v1.2.0")) == []


@pytest.mark.parametrize(("wrong", "tag", "says"), [
    ({}, "v1.2.1", "the tag is v1.2.1"),
    ({}, "1.2.0", "the tag is 1.2.0"),
    ({"cited": "1.1.0"}, "", "CITATION.cff: version 1.1.0"),
    ({"version": "1.2.0rc1", "cited": "1.2.0rc1"}, "", "not of the form"),
    ({"released": ""}, "v1.2.0", "date-released is missing"),
    ({"released": "2026-11-26"}, "v1.2.0", "date-released 2026-11-26, CHANGELOG.md says 2026-11-27"),
    ({"changes": "## [1.2.0] - 2026-11-27\n"}, "", "first section"),
    ({"changes": "## [Unreleased]\n\n- b\n\n## [1.2.0] - 2026-11-27\n"}, "v1.2.0", "must be empty"),
    ({"changes": "## [Unreleased]\n\n## [1.1.0] - 2026-10-01\n"}, "v1.2.0", "newest version must be 1.2.0"),
    ({"changes": "## [Unreleased]\n\n## [1.2.0] - 2026-13-01\n"}, "", "must be '## [X.Y.Z]"),
    ({"changes": "## [Unreleased]\n\n## [1.1.0] - 2026-10-01\n\n## [1.2.0] - 2026-11-27\n"}, "", "the newest"),
])  # fmt: skip
def test_what_disagrees_is_said(texts, wrong, tag, says):
    found = list(release_texts.faults(texts(**wrong), tag))
    assert len(found) == 1 and says in found[0]


def test_both_builders_have_one_time_when_a_commit_comes_between(monkeypatch, tmp_path):
    times = iter(["1\n", "2\n"])
    monkeypatch.setattr(release, "git", lambda *_: next(times))
    command = [sys.executable, "-c", "import os; print(os.environ['SOURCE_DATE_EPOCH'])"]
    release.epoch.cache_clear()
    assert [builder.run(command, tmp_path) for builder in (release.ONE, release.OTHER)] == ["1\n", "1\n"]
    release.epoch.cache_clear()
