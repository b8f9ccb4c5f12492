"""Pictures in every form that a program may use, and one error line for anything else."""

import io
import os
import tempfile
import warnings

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps
from threads import in_threads

import pykvedge
from pykvedge import ArrayError, ImageError, Picture, Sampling, UsageError, load_picture
from pykvedge.models import images
from pykvedge.models.documents import load_pictures
from pykvedge.models.images import MAX_PIXELS, scaled_size

RNG = np.random.default_rng(7)
PIXELS = RNG.integers(0, 256, (30, 44, 3), dtype=np.uint8)  # 44 wide, 30 high


def png(pixels=PIXELS, form="PNG", **options):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **options)
    return out.getvalue()


class OnlyReads:
    """A stream that cannot seek, as a response of a web server."""

    def __init__(self, data):
        self._data = data

    def read(self):
        """Returns all data."""
        return self._data


def at_its_end(data):
    file = io.BytesIO()
    file.write(data)
    return file


FORMS = {
    "bytes": lambda: png(),
    "bytearray": lambda: bytearray(png()),
    "memoryview": lambda: memoryview(png()),
    "memoryview of every second byte": lambda: memoryview(b"".join(bytes([b, 0]) for b in png()))[::2],
    "file": lambda: io.BytesIO(png()),
    "file at its end": lambda: at_its_end(png()),
    "stream": lambda: OnlyReads(png()),
    "PIL": lambda: Image.fromarray(PIXELS),
    "PIL, not read yet": lambda: Image.open(io.BytesIO(png())),
    "array": lambda: PIXELS,
    "array that is not contiguous": lambda: np.asfortranarray(PIXELS),
    "a view of BGR": lambda: PIXELS[:, :, ::-1].copy()[:, :, ::-1],
    "opaque RGBA": lambda: np.dstack([PIXELS, np.full(PIXELS.shape[:2], 255, np.uint8)]),
    "Picture": lambda: Picture("p", 44, 30, PIXELS.tobytes()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_pixels(form):
    for picture in (load_picture(FORMS[form]()), *load_pictures(FORMS[form]()), *load_pictures([FORMS[form]()])):
        assert (picture.width, picture.height, picture.rgb) == (44, 30, PIXELS.tobytes())


def test_paths_as_text_and_as_objects(tmp_path):
    file = tmp_path / "a b ü.png"
    file.write_bytes(png())
    for path in (file, str(file)):
        assert load_picture(path).rgb == PIXELS.tobytes() and load_picture(path).name == file.name
        assert [p.name for p in load_pictures(path)] == [file.name]
    with file.open("rb") as opened:
        assert load_picture(opened).name == file.name
        assert not opened.closed
    with Image.open(file) as image:
        assert load_picture(image).name == file.name


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 1)])
def test_grey_arrays(shape):
    grey = RNG.integers(0, 256, shape, dtype=np.uint8)
    assert load_picture(grey).rgb == np.repeat(grey.reshape(6, 4, 1), 3, axis=2).tobytes()


def test_transparency_of_arrays_and_images_becomes_white():
    clear = np.zeros((5, 7, 4), np.uint8)
    for source in (clear, Image.fromarray(clear)):
        assert set(load_picture(source).rgb) == {255}


def test_an_image_of_pillow_is_turned_as_its_file_would_be(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS).save(tmp_path / "turned.png", exif=exif)
    by_path = load_picture(tmp_path / "turned.png")
    with Image.open(tmp_path / "turned.png") as image:
        assert load_picture(image) == by_path
    assert (by_path.width, by_path.height) == (30, 44)


def test_pictures_without_a_name_are_numbered():
    names = [p.name for p in load_pictures([png(), PIXELS, Picture("mine", 1, 1, b"abc")])]
    assert names == ["image 1", "image 2", "mine"]
    assert load_picture(PIXELS, "webcam").name == "webcam"


def test_none_and_nothing():
    assert list(load_pictures(None)) == list(load_pictures([])) == list(load_pictures(())) == []


def test_they_are_loaded_one_at_a_time():
    asked = []

    def frames():
        for i in range(3):
            asked.append(i)
            yield PIXELS

    pictures = load_pictures(frames())
    assert asked == []
    next(pictures)
    assert asked == [0]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (PIXELS.astype(np.float32) / 255, ["float32", "uint8", "0..255"]),
        (PIXELS.astype(np.int64), ["int64", "uint8"]),
        (PIXELS.astype(bool), ["bool", "uint8"]),
        (np.array([[None]]), ["object", "uint8"]),
        (PIXELS.transpose(2, 0, 1), ["[3, 30, 44]", "transpose(1, 2, 0)"]),
        (PIXELS[None], ["[1, 30, 44, 3]", "list(array)"]),
        (PIXELS[0, :, 0], ["[44]"]),
        (PIXELS[:, :, :2], ["[30, 44, 2]"]),
        (np.ones((), np.uint8), ["[]"]),
    ],
)
def test_arrays_that_are_no_picture(array, words):
    with pytest.raises(ArrayError) as error:
        load_picture(array)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_empty_pictures(size):
    with pytest.raises(ImageError, match="empty"):
        load_picture(np.zeros((*size, 3), np.uint8))
    with pytest.raises(ImageError, match="empty"):
        load_picture(Image.new("RGB", size))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_bytes_that_end_too_early(form):
    whole = png(form=form)
    for share in (0.0, 0.01, 0.1, 0.5, 0.9):
        data = whole[: int(len(whole) * share)]
        for source in (data, io.BytesIO(data), OnlyReads(data)):
            with pytest.raises(ImageError) as error:
                load_picture(source, "upload")
            assert str(error.value).startswith("upload ") and "\n" not in str(error.value)


def test_too_many_pixels_in_any_form():
    side = int(MAX_PIXELS**0.5) + 1
    wide = np.broadcast_to(np.uint8(0), (side, side))  # takes no memory
    grey = Image.new("1", (side, side))
    file = io.BytesIO()
    grey.save(file, "PNG")
    for source in (wide, grey, file, file.getvalue()):
        with pytest.raises(ImageError, match="50 million"):
            load_picture(source)
    with pytest.raises(ImageError, match="50 million"):
        Picture("p", side, side, b"x")


@pytest.mark.parametrize("size", [(2, 2, 11), (2, 2, 13), (-2, -2, 12), (0, 4, 1)])
def test_a_picture_must_have_the_bytes_of_its_pixels(size):
    with pytest.raises(ImageError):
        Picture("p", size[0], size[1], bytes(size[2]))


def test_a_picture_has_sizes_and_bytes():
    for size, rgb in ((("2", 2), bytes(12)), ((2, 2.0), bytes(12)), ((2, 2), "x" * 12), ((2, 2), PIXELS)):
        with pytest.raises(ImageError, match="load_picture"):
            Picture("p", *size, rgb)


def test_a_picture_that_was_forgotten_cannot_be_shown():
    with pytest.raises(ImageError, match="the pixels of p were freed"):
        load_picture(Picture("p", 2, 2, b""))


@pytest.mark.parametrize("thing", [3, 2.5, object(), {"a": 1}, [[1, 2], [3, 4]], [None], ["a.png", 5], lambda: 0])
def test_what_is_no_picture(thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PIXELS).save("a.png")
    with pytest.raises(pykvedge.KvedgeError) as error:
        list(load_pictures(thing))
    assert isinstance(error.value, UsageError) or "does not exist" in str(error.value)  # dictionary keys could be names
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    with (tmp_path / "a.png").open(encoding="latin-1") as text, pytest.raises(UsageError, match="'rb'"):
        load_picture(text)
    with (tmp_path / "a.png").open("rb") as file:
        pass
    with pytest.raises(ImageError, match="closed"):
        load_picture(file)
    with pytest.raises(UsageError, match="not bytes"):
        load_picture(OnlyReads(None))
    for path in ("", "a\0b", b"a.png"):
        with pytest.raises(ImageError):
            load_picture(path)
    with tempfile.TemporaryFile() as empty, pytest.raises(ImageError, match="not a readable image"):
        load_picture(empty)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_modes_that_do_not_say_what_is_white(mode):
    with pytest.raises(ImageError, match="convert the image to RGB"):
        load_picture(Image.new(mode, (3, 3)))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX", "I;16"])
def test_other_modes(mode):
    assert load_picture(Image.new(mode, (3, 2))).rgb == load_picture(Image.new(mode, (3, 2))).rgb
    assert len(load_picture(Image.new(mode, (3, 2))).rgb) == 18


def test_an_image_whose_file_is_gone(tmp_path):
    image = Image.open(io.BytesIO(png()[:200]))
    with pytest.raises(ImageError, match="cannot be read"):
        load_picture(image)


def test_loading_in_threads_leaves_the_filters_of_warnings_alone():
    before, data = list(warnings.filters), png()
    in_threads(*[lambda: [load_picture(data) for _ in range(30)]] * 4)
    assert list(warnings.filters) == before


# ------------------------------------------------------------------------------------------------- sessions


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_takes_them_all(tiny, native, tmp_path, stream):
    (tmp_path / "a.png").write_bytes(png())
    plan = pykvedge.plan("h2o", 400)
    sources = [tmp_path / "a.png", os.fspath(tmp_path / "a.png"), *(make() for make in FORMS.values())]
    with tiny("llava").session(plan, stream=stream) as session:
        answers = set()
        for source in sources:
            session.clear()
            answer = session.ask("What is this?", source, Sampling(max_tokens=6))
            answers.add(answer.read())
            assert answer.report.tokens.image > 0
        assert len(answers) == 1
        session.clear()
        two = session.ask("What are these?", [sources[0], sources[-1]], Sampling(max_tokens=2))
        assert two.report.tokens.image == 2 * answer.report.tokens.image


def test_a_bad_picture_leaves_the_conversation_as_it_was(tiny, native):
    with tiny("llava").session(pykvedge.plan("h2o")) as session:
        session.ask("Hello", PIXELS, Sampling(max_tokens=4)).read()
        for bad in (PIXELS.astype(float), png()[:60], [PIXELS, 5], 5, "nowhere.png"):
            with pytest.raises((ImageError, UsageError)):
                session.ask("And this?", bad)
        assert len(session.messages) == 2
        assert session.ask("And this?", PIXELS, Sampling(max_tokens=4)).read()


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_files_of_more_pixels_than_an_encoder_sees_are_scaled_by_a_whole_number(monkeypatch, kind, orientation):
    """Scales as pillow scales the whole picture. JPEG reads less of its file, so it is only near."""
    monkeypatch.setattr(images, "LARGE", 100_000)
    small = np.random.default_rng(2).integers(0, 256, (8, 9, 3), np.uint8)
    image = Image.fromarray(small).resize((836, 801), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif)
    image = ImageOps.exif_transpose(Image.open(file))
    seen = 36_700  # 2 x 2 pixels become one; 4 x 4 would be too many
    one, whole = pykvedge.load_picture(file.getvalue(), None, seen), pykvedge.load_picture(file.getvalue())
    assert (whole.width, whole.height) == image.size and whole.rgb == image.tobytes()
    if kind == "PNG":
        reduced = Image.open(file).reduce(2)
        reduced = ImageOps.exif_transpose(reduced)
        assert (one.width, one.height) == reduced.size and one.rgb == reduced.tobytes()
    scaled = image.resize((one.width, one.height), Image.Resampling.BOX).tobytes()
    assert 2 * seen <= one.width * one.height < 8 * seen
    assert (one.width, one.height) == scaled_size(*image.size, seen) == (-(-image.width // 2), -(-image.height // 2))
    assert np.abs(np.frombuffer(scaled, np.uint8).astype(int) - np.frombuffer(one.rgb, np.uint8)).mean() < 1.5
    assert pykvedge.load_picture(file.getvalue(), None, 445_000).rgb == whole.rgb
