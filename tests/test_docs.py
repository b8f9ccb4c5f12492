"""The documentation is consistent: its size, its links and anchors, and the paths in it."""

import json
import re

import pytest
from docpages import PAGES, ROOT, anchors, blocks, without_blocks, words

NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LANGUAGES = {"console", "sh", "python", "c", "cmake", "csharp", "kotlin", "swift", "json", "jsonl", "toml", "text"}
BUILT = ("pykvedge/bindings", "pykvedge/include", "pykvedge/lib")  # only exist where kvedge is installed
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:pykvedge|kvedge_lab|native|tests|scripts|experiments|examples|patches|docs)/[a-z0-9_./-]+)`")


def test_the_size_of_the_documentation():
    """The pages must not grow: readers have limited time. Blocks of code are not counted."""
    pages = [name for name in NAMES if name.startswith("docs/") and not name.startswith("docs/results/")]
    assert len(pages) <= 18, pages
    assert sum(words(without_blocks(page.read_text("utf-8"))) for page in PAGES) <= 35_000
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    text = without_blocks(page.read_text("utf-8"))
    for link in _LINK.findall(text) + re.findall(r'<(?:img|a) [^>]*(?:src|href)="([^"]+)"', text):
        target, _, anchor = link.partition("#")
        if re.match(r"https?:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists() and file.is_relative_to(ROOT), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_that_are_named_exist(page):
    for path in _PATH.findall(page.read_text("utf-8")):
        assert path.startswith(BUILT) or next(ROOT.glob(f"{path}*"), None), path


def test_every_page_is_in_the_site_and_in_the_list():
    """Readers do not find a page that is missing in mkdocs.yml's navigation or in the list of all pages."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = without_blocks((ROOT / "docs" / "index.md").read_text("utf-8"))
    for name in NAMES:
        if name.startswith("docs/"):
            assert f": {name[5:]}\n" in nav, name
            assert name == "docs/index.md" or f"]({name[5:]})" in listed, name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_have_a_language_that_is_tested(page):
    """test_docs_commands.py and test_docs_code.py run these blocks. Indented blocks would not be run."""
    for block in blocks(page):
        assert block.language in LANGUAGES, block.place
        if block.language == "json":
            json.loads(block.text)
        for line in block.text.splitlines() if block.language == "jsonl" else []:
            json.loads(line)
    rest = without_blocks(page.read_text("utf-8"))
    assert not re.search(r"^\n {4,}\S", rest, re.M), f"{page.name} has an indented block"
