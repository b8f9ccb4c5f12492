"""Pages of PDFs that the tests write: content, size and choice of the pages; and files that must not be drawn."""

import importlib.util
import io
import os
import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdfs import COLOURS, document, fill, of_pictures, pdf, stream

import pykvedge
from pykvedge import CancelledError, ImageError, KvedgeError, Message, UsageError
from pykvedge.models import documents, pdf_worker
from pykvedge.models.documents import MAX_PAGES, PageSize, load_pictures, pages, ranges
from pykvedge.models.gguf import Header
from pykvedge.models.imagetokens import image_grid, token_limits
from pykvedge.runtime.stream import segments

SMALL = PageSize(40 * 40, 40)
THREE = document(fill("red"), fill("green"), fill("blue"))


def pixels(picture: pykvedge.Picture) -> np.ndarray:
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)


def colours(picture: pykvedge.Picture) -> list[str]:
    """Returns the names of the colours in the middle of the upper and the lower half."""
    seen, height = pixels(picture), picture.height
    names = {colour: name for name, colour in COLOURS.items()} | {(255, 255, 255): "white"}
    return [names[tuple(seen[height * at // 4, picture.width // 2].tolist())] for at in (1, 3)]


@pytest.fixture
def three(tmp_path):
    path = tmp_path / "Three.PDF"
    path.write_bytes(THREE)
    return path


def test_pages_are_pictures_in_their_order(three):
    found = list(load_pictures(three, SMALL))
    assert [colours(page)[0] for page in found] == ["red", "green", "blue"]
    assert [page.name for page in found] == [f"Three.PDF, page {i}" for i in (1, 2, 3)]
    assert [(page.width, page.height, page.page) for page in found] == [(40, 40, i) for i in (1, 2, 3)]
    chosen = list(load_pictures([f"{three}[3,1-2,2]", three.with_name("Three.PDF[2-]")], SMALL))
    assert [page.page for page in chosen] == [3, 1, 2, 2, 3] and len({page.document for page in chosen}) == 1
    for form in (THREE, b"\n" + THREE, bytearray(THREE), io.BytesIO(THREE), three.open("rb")):
        assert [page.rgb for page in load_pictures(form, SMALL)] == [page.rgb for page in found]
    with pytest.raises(ImageError, match=r"not a picture; use pykvedge\.pages"):
        pykvedge.load_picture(three)


def test_what_stands_on_a_page_is_drawn_upright():
    box, left = (0, 0, 200, 100), fill("red", 0, 0, 100, 100) + fill("blue", 100, 0, 100, 100)
    turned = next(pages(document(left, box=box, page=b"/Rotate 90"), size=SMALL))
    assert (turned.width, turned.height) == (20, 40) and colours(turned) == ["red", "blue"]
    # a note, and a filled field of a form: each has its own picture
    note = b"<< /Type /Annot /Subtype /%b /Rect [0 %d 72 %d] /F 4 /AP << /N %d 0 R >> %b >>"
    form = b"/Type /XObject /Subtype /Form /BBox [0 0 72 36]"
    more = (note % (b"Square", 36, 72, 7, b""), note % (b"Widget", 0, 36, 8, b"/FT /Tx /T (name) /V (x)"),
            stream(fill("green"), form), stream(fill("blue"), form))  # fmt: skip
    noted = document(b"", page=b"/Annots [5 0 R 6 0 R]", more=more)
    noted = noted.replace(b"/Catalog", b"/Catalog /AcroForm << /Fields [6 0 R] >>")
    assert colours(next(pages(noted, size=SMALL))) == ["green", "blue"]


def header(kind: str) -> Header:
    given = {"clip.projector_type": kind, "clip.vision.patch_size": 14, "clip.vision.image_size": 336}
    return Header(Path("mm.gguf"), given, {}, {}, {}, {}, 0)


@pytest.mark.parametrize(("kind", "width", "height"), [
    ("mlp", 612, 792), ("mlp", 4000, 300), ("mlp", 20, 30), ("qwen2vl_merger", 842, 595),
    ("qwen2vl_merger", 14400, 14400), ("internvl", 612, 792), ("internvl", 20, 30),
])  # fmt: skip
def test_pages_are_as_large_as_the_encoder_sees(kind, width, height):
    mmproj = header(kind)
    size = PageSize.asked(mmproj, 0, 300 if kind == "qwen2vl_merger" else 0)
    page = next(pages(document(fill("red"), box=(0, 0, width, height)), size=size))
    assert abs(page.width * height - page.height * width) <= max(width, height)  # sides are whole pixels
    at_200_dpi = max(page.width / width, page.height / height) * 72
    assert at_200_dpi <= 200 * 1.05
    if at_200_dpi > 199 or kind == "internvl":
        assert max(page.width, page.height) <= 2048
    elif kind == "mlp":
        assert max(page.width, page.height) == 336
    else:  # all tokens are used except for rounding, and larger pages would give no more
        limits = token_limits(mmproj, 0, 300)
        tokens, larger = (image_grid(mmproj, n * page.width, n * page.height, limits).n_tokens for n in (1, 3))
        assert 0.8 * 300 <= tokens <= 300 and larger <= tokens * 1.1


def test_pages_have_their_numbers_in_prompts():
    one, two = ([pykvedge.Picture("p", 1, 1, b"abc", i, name) for i in (4, 9)] for name in ("a", "b"))
    image = pykvedge.Picture("i", 1, 1, b"abc")
    said = Message("user", "What is on page 4?", one[:1])
    assert said.content("<m>") == "Page 4: <m>\nWhat is on page 4?"
    told = Message("user", "And now?", [image, *two, one[1]]).content("<m>", one[:1])
    assert told.splitlines() == ["Image 2: <m>", "Document 2, page 4: <m>", "Document 2, page 9: <m>", "Page 9: <m>",
                                 "And now?"]  # fmt: skip
    for shown, earlier in ((one, []), (one[:1], []), ([image, *one], []), ([*two, image, one[1]], one[:1])):
        whole = Message("user", "And now?", shown).content("<m>", earlier)
        begun = Message("user", "And now?", shown[:1]).content("<m>", earlier)  # as a stream writes it
        parts = segments(begun, "<m>", iter(shown), earlier)
        assert "".join(text + "<m>" * (picture is not None) for text, picture in parts) == whole


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(-1, 30)), min_size=1, max_size=6), st.integers(1, 30))
def test_ranges_name_pages(some, n_pages):
    """some: ranges of (first page, number of further pages); -1: all further pages."""
    text = ",".join(f" {a} - " if n < 0 else f"{a}" if n == 0 else f"{a}-{a + n}" for a, n in some)
    wanted = [page for a, n in some for page in range(a, (n_pages if n < 0 else a + n) + 1)]
    asked = [list(one) for one in ranges(text)]
    if any(a > n_pages for a, _ in some) or max(wanted) > n_pages:
        with pytest.raises(UsageError, match=f"has {n_pages} page"):
            pdf_worker.chosen(asked, n_pages, 99)
        return
    assert pdf_worker.chosen(asked, n_pages, 99) == sorted(set(wanted), key=wanted.index)


@pytest.mark.parametrize("text", ["x", "0", "3-2", "1,,2", "1;2", "-3", "1-2-3", "1" * 9, ",".join("1" * 65), "²"])
def test_ranges_that_name_none(text, three):
    with pytest.raises(UsageError, match=r"pages must be numbers from 1"):
        next(pages(three, text))
    with pytest.raises(UsageError, match="does not name a page"):
        next(pages(f"{three}[]"))


# ------------------------------------------------------------------------------------------------------------

_LOCK = b"/Encrypt << /Filter /Standard /V 1 /R 2 /Length 40 /P -4 /O <%b> /U <%b> >> /ID [<00> <00>]"
_IMAGE = b"/Type /XObject /Subtype /Image /Width %d /Height %d /BitsPerComponent 8 /ColorSpace /DeviceRGB /Filter "
HOSTILE = {
    "encrypted": (pdf(b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count 0 /Kids [] >>",
                      trailer=_LOCK % (b"11" * 32, b"22" * 32)), "is encrypted: save the file without a password"),
    "noise": (b"%PDF-1.7\n" + np.random.default_rng(0).bytes(5000), "cannot be read as a PDF"),
    "cut": (THREE[:60], "cannot be read as a PDF"),
    "no pages": (document(), "has no pages"),
    "201 inches": (document(fill("red"), box=(0, 0, 72 * 201, 72)),
                   r"page 1 is 201 x 1 inches large; a page must have sides above 0, and 200 inches at most"),
    "a point too wide": (document(fill("red"), box=(0, 0, 14401, 72)), r"page 1 is 200\.014 x 1 inches large"),
    "cut to nothing": (document(fill("red"), page=b"/CropBox [900 900 972 972]"), "page 1 is 0 x 0 inches large"),
    "many pages": (document(*[b""] * 65), r"name up to 64 of its 65 pages, for example \[1-64\]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_that_are_refused(kind):
    data, says = HOSTILE[kind]
    with pytest.raises(KvedgeError, match=rf"^the document .*{says}") as caught:
        list(pages(data, size=SMALL))
    assert "\n" not in str(caught.value)


def _nested(deep: int) -> bytes:
    """Returns a page with a drawing inside a drawing, to the depth `deep`; each drawing draws the next ten times."""
    form = b"/Type /XObject /Subtype /Form /BBox [0 0 72 72] /Resources << /XObject << /F %d 0 R >> >>"
    forms = [stream(b"/F Do " * 10, form % (6 + i)) for i in range(deep)]
    last = stream(fill("red") * 100, b"/Type /XObject /Subtype /Form /BBox [0 0 72 72]")
    return document(b"/F Do", page=b"/Resources << /XObject << /F 5 0 R >> >>", more=(*forms, last))


def _large_image(side: int) -> bytes:
    image = stream(zlib.compress(bytes(side * side * 3 // 64)), _IMAGE % (side, side) + b"/FlateDecode")
    return document(b"72 0 0 72 0 0 cm /I Do", page=b"/Resources << /XObject << /I 5 0 R >> >>", more=(image,))


BOMBS = {
    "a million pages": document(fill("red")).replace(b"/Count 1 ", b"/Count 1000000 "),
    "deep arrays": document(b"", page=b"/X " + b"[" * 200_000 + b"]" * 200_000),
    "deep contents": document(b"q " * 500_000 + b"[" * 500_000),
    "a tree of itself": document(fill("red")).replace(b"/Kids [3 0 R]", b"/Kids [2 0 R]"),
    "a huge image": _large_image(30_000),
    "drawings in drawings": _nested(12),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_end_in_bounded_time_and_memory(kind, monkeypatch, children):
    monkeypatch.setattr(documents, "SECONDS", 3.0)
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.02):
            for child in children():
                try:
                    peak = max(peak, child.memory_info().rss)
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        drawn = list(pages(BOMBS[kind], "1", size=SMALL))
        assert len(drawn) == 1
    except KvedgeError as error:
        assert str(error).startswith("the document ") and "\n" not in str(error)
    finally:
        over.set()
        watcher.join()
    assert peak <= 1.1 * pdf_worker.MEMORY
    assert not children()


def test_drawing_that_takes_too_long_is_ended(monkeypatch, children):
    monkeypatch.setattr(documents, "SECONDS", 1.0)
    with pytest.raises(
        ImageError, match="the document cannot be read: the work takes longer than 1 seconds; name fewer pages"
    ):
        list(pages(_nested(12), size=SMALL))
    stop = threading.Event()
    found = pages(THREE, size=SMALL, stop=stop)
    next(found)
    stop.set()
    with pytest.raises(CancelledError):
        next(found)
    assert not children()


def test_who_stops_looking_leaves_no_program_behind(children):
    for taken in (0, 1, 2):
        some = pages(document(*[fill("red")] * MAX_PAGES), size=PageSize())
        for _ in range(taken):
            next(some)
        some.close()
    assert not children()


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux")
def test_the_program_that_draws_has_no_network(children):
    possible = shutil.which("unshare") and subprocess.run(["unshare", "-Un", "true"], check=False).returncode == 0
    some = pages(THREE)  # a pipe cannot hold the second page, so the program still runs
    next(some)
    (child,) = children()
    theirs, ours = (os.readlink(f"/proc/{pid}/ns/net") for pid in (child.pid, "self"))  # noqa: PTH115 - no real path
    some.close()
    if not possible:
        pytest.skip("this machine lets no program give up its network")
    assert theirs != ours


def test_files_that_are_not_there(tmp_path, monkeypatch):
    folder = tmp_path / "folder.pdf"
    folder.mkdir()
    for path, says in ((tmp_path / "none.pdf[2]", "none.pdf does not exist"),
                       (folder, "the path is a folder, not a file"), ("x" * 5000 + ".pdf", "cannot be read"),
                       ("a\0b.pdf", "cannot be read")):  # fmt: skip
        with pytest.raises(ImageError, match=says):
            list(load_pictures(path))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.pdf")
        with pytest.raises(ImageError, match="the path is a pipe"):
            list(load_pictures(tmp_path / "pipe.pdf"))
    with monkeypatch.context() as packed:
        packed.setattr("sys.frozen", True, raising=False)
        with pytest.raises(UsageError, match="needs a Python program"):
            list(load_pictures(THREE))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pypdfium2" else found(name))
    with pytest.raises(UsageError, match=r"the document needs pypdfium2, .* pip install 'kvedge\[pdf\]'"):
        list(load_pictures(THREE))


def test_a_pdf_under_the_name_of_a_picture_is_named(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(THREE)
    reading, writing = os.pipe()
    os.write(writing, THREE)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:  # nobody can look at its first bytes and give them back
        for source in (path, pipe):
            with pytest.raises(ImageError, match=r"is a PDF, but its name does not end in \.pdf; rename the file"):
                list(load_pictures(source))


def test_no_file_is_hidden_behind_another(tmp_path, monkeypatch):
    """A file has the same page labels under every name, and other files have other labels."""
    a = of_pictures(tmp_path / "a.pdf", *[pykvedge.system.files.DATA / "doctor.png"] * 2)
    b = of_pictures(tmp_path / "b.pdf", pykvedge.system.files.DATA / "doctor.png")
    monkeypatch.chdir(tmp_path)
    one, again, other = (next(load_pictures(name, SMALL)) for name in ("a.pdf[1]", a, b))
    assert one.document == again.document != other.document and one.key == other.key
