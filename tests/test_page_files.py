"""The files of `kvedge serve`'s page: other projects' files are unchanged, and the page contains no inline code."""

import hashlib
import re

from pykvedge.serve import app

FOLDER = app._PAGE
VENDOR = FOLDER / "vendor"


def test_files_of_other_projects_are_unchanged_and_have_their_licences():
    told = (VENDOR / "VERSIONS.md").read_text()
    table = re.findall(r"^\| `(\S+)` .*\(`(\S+)`\) \| `(\w{64})` \|$", told, re.MULTILINE)
    listed = {"VERSIONS.md", *(name for row in table for name in row[:2]), *re.findall(r"`(LICENSE-\S+)`", told)}
    assert len(table) == 2 and listed == {path.name for path in VENDOR.iterdir()}
    for name, _, digest in table:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest


def test_all_code_and_style_is_in_files_of_the_page():
    text = (FOLDER / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src=\"page/)|https?://", text)
    named = set(re.findall(r'(?:src|href)="page/([^"#]+)"', text))
    for path in FOLDER.glob("*.js"):
        code = path.read_text()
        named |= {name.removeprefix("./") for name in re.findall(r'(?:from|import) "(\./[^"]+)"', code)}
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", code), path.name
    served = {name for name in app._PAGE_FILES if not name.endswith(".md")}
    assert named | {"scene.png", "index.html"} == served
