"""Reads the pages of the documentation: links, anchors, and blocks of commands with their output.

A block is fenced and has a language. A comment above a block tells a test how to run it: `<!-- not run: REASON -->`, or
`<!-- slow -->` for a block that runs with --all only.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hubserver import HubServer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
DATA, EXAMPLES = ROOT / "pykvedge" / "data", ROOT / "examples"
FILES = {  # file names of the pages
    "model.gguf": DATA / "demo-model.gguf",
    "mmproj.gguf": DATA / "demo-mmproj.gguf",
    "photo.jpg": EXAMPLES / "photo.jpg",
    "scene.png": EXAMPLES / "scene-1.png",
    "other.png": EXAMPLES / "scene-2.png",
    **{name: ROOT / name for name in ("examples", "pykvedge", "docs", "native", "experiments", "scripts")},
}
_REPO = re.compile(r"\b([A-Za-z][\w.-]*/[\w.-]+?-GGUF|user/repo)\b")
_FENCE = re.compile(
    r"^(?P<comment><!-- (?:not run: .+?|slow) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_SPEED = re.compile(r"[\d.,]+( (?:tok/s|s|ms|tokens/s|MiB|seconds)\b)")


@dataclass(frozen=True)
class Block:
    """One fenced block. line: the line of the page where the block begins."""

    page: Path
    line: int
    language: str
    text: str
    reason: str  # why the block does not run; empty: it runs
    is_slow: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Returns all fenced blocks of a page, in order."""
    text, found = page.read_text("utf-8"), []
    for match in _FENCE.finditer(text):
        comment = match["comment"] or ""
        reason = comment.strip().removeprefix("<!-- not run: ").removesuffix(" -->") if "not run" in comment else ""
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(page, line, match["language"], match["text"], reason, "slow" in comment))
    return found


def put_files(folder: Path) -> None:
    """Links the files that the pages name into a folder, or copies them."""
    for name, source in FILES.items():
        try:
            (folder / name).symlink_to(source)
        except OSError:  # Windows: links need a privilege
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)


def fill_hub(hub: HubServer) -> None:
    """Adds the packaged model to a hub, under every name in the pages."""
    for name in {name for page in PAGES for name in _REPO.findall(page.read_text("utf-8"))}:
        for quant in ("Q4_K_M", "Q8_0"):
            hub.add(name, f"{name.split('/')[1]}-{quant}.gguf", FILES["model.gguf"].read_bytes())
        hub.add(name, "mmproj-f16.gguf", FILES["mmproj.gguf"].read_bytes())


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, in the form of code hosts and of the documentation site."""
    made: dict[str, int] = {}
    out = set()
    for title in re.findall(r"^#+ (.+)$", without_blocks(page.read_text("utf-8")), re.M):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title.strip()).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = made[slug] = made.get(slug, -1) + 1
        out.add(slug if not count else f"{slug}-{count}")
    return out


def words(text: str) -> int:
    """Returns the number of words. A word contains a letter or a digit, so bars of tables do not count."""
    return sum(any(c.isalnum() for c in word) for word in text.split())


def masked(line: str) -> str:
    """Returns a printed line with "#" for speeds, times, process ids and ports, which differ from run to run."""
    line = _SPEED.sub(r"#\1", line.rstrip())
    return re.sub(r'("pid": |127\.0\.0\.1:|localhost:)\d+', r"\1#", line)
