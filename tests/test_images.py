"""Images: formats, orientation, transparency, and unusual files."""

import contextlib
import io

import numpy as np
import pytest
from PIL import Image

from pykvedge import ImageError, load_picture
from pykvedge.models import images
from pykvedge.models.pixel_file import PixelFile


def pixels(picture):
    return np.frombuffer(picture.rgb, dtype=np.uint8).reshape(picture.height, picture.width, 3)


@pytest.mark.parametrize("form", ["png", "jpg", "webp", "bmp", "gif"])
def test_formats(picture_file, form):
    picture = load_picture(picture_file(f"a.{form}", 90, 60))
    assert (picture.width, picture.height, picture.name) == (90, 60, f"a.{form}")
    red, _, blue = pixels(picture)[5, 5].astype(int)
    assert red > 150 and blue < 90  # the red corner


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(tmp_path, orientation):
    image = Image.new("RGB", (40, 20), "white")
    image.paste((255, 0, 0), (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    picture = load_picture(tmp_path / "a.png")
    assert (picture.width, picture.height) == ((40, 20) if orientation < 5 else (20, 40))
    corner = [(0, 0), (0, -1), (-1, -1), (-1, 0)][(orientation - 1) % 4]
    assert pixels(picture)[corner].tolist() == [255, 0, 0]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparency_becomes_white(tmp_path, mode):
    image = Image.new("RGBA", (10, 10), (0, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 5, 10))
    if mode in ("P", "PA"):
        image.convert("P").save(tmp_path / "a.png", transparency=image.convert("P").getpixel((9, 9)))
    else:
        image.convert(mode).save(tmp_path / "a.png")
    assert pixels(load_picture(tmp_path / "a.png"))[5, 9].tolist() == [255, 255, 255]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "I;16"])
def test_other_colour_spaces(tmp_path, mode):
    if mode == "I;16":
        Image.fromarray(np.full((8, 8), 40000, dtype=np.uint16)).save(tmp_path / "a.png")
    else:
        Image.new(mode, (8, 8)).save(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"))
    picture = load_picture(next(tmp_path.iterdir()))
    assert pixels(picture).shape == (8, 8, 3)
    if mode == "I;16":
        assert abs(int(pixels(picture)[0, 0, 0]) - 40000 // 257) <= 1


def test_a_transparent_grey_of_16_bits_becomes_white_alone(tmp_path):
    grey = np.full((8, 8), 40000, dtype=np.uint16)
    grey[:, :4] = 5140
    Image.fromarray(grey).save(tmp_path / "a.png", transparency=5140)
    row = pixels(load_picture(tmp_path / "a.png"))[0, :, 0].tolist()
    assert row == [255] * 4 + [40000 // 257] * 4


def test_equal_pixels_have_equal_keys(picture_file):
    a, b = load_picture(picture_file("a.png")), load_picture(picture_file("same.bmp"))
    assert a.key == b.key != load_picture(picture_file("other.png", 81, 60)).key


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_of_an_animated_picture_the_first_is_read_and_that_is_said(tmp_path, kvedge, kind):
    red, blue = (Image.new("RGB", (48, 48), colour) for colour in ("red", "blue"))
    file = tmp_path / f"two.{kind}"
    red.save(file, save_all=True, append_images=[blue], lossless=True)
    red.save(tmp_path / f"one.{kind}")
    picture = load_picture(file)
    assert pixels(picture)[0, 0].tolist() in ([255, 0, 0], [254, 0, 0])
    assert picture.note == f"two.{kind} is animated; only its first frame is read"
    assert load_picture(tmp_path / f"one.{kind}").note == ""
    if kind == "gif":
        done = kvedge("chat", "--image", file, "--max-tokens", 1, "What?")
        assert done.err.count("two.gif is animated; only its first frame is read") == 1


@pytest.mark.parametrize("form", ["gif", "webp", "png", "jpeg", "bmp"])
def test_a_file_that_ends_anywhere_is_read_or_refused(form):
    """pillow raises struct.error for a GIF cut inside the place of its second frame; load_picture must catch it."""
    frames = [Image.new("RGB", (3, 2), colour) for colour in ("red", "blue")]
    more = {"save_all": True, "append_images": frames[1:]} if form in ("gif", "webp") else {}
    frames[0].save(whole := io.BytesIO(), form, **more)
    for n_bytes in range(len(whole.getvalue())):
        with contextlib.suppress(ImageError):
            picture = load_picture(whole.getvalue()[:n_bytes])
            assert (picture.width, picture.height) == (3, 2)


def test_a_webp_of_many_pixels_is_refused(tmp_path, monkeypatch):
    """libwebp needs 16 bytes for each pixel."""
    monkeypatch.setattr(images, "MAX_WEBP", 20 * 30)
    Image.new("RGB", (20, 30)).save(tmp_path / "a.webp")
    Image.new("RGB", (20, 31)).save(tmp_path / "b.webp")
    assert load_picture(tmp_path / "a.webp").height == 30
    with pytest.raises(ImageError, match=r"b.webp has 20 x 31 pixels; the limit of WebP .* convert it to JPEG"):
        load_picture(tmp_path / "b.webp")


def test_pixels_that_wait_in_a_file(picture_file, monkeypatch):
    shown = [load_picture(picture_file("a.png", width, 30)) for width in (40, 41, 42)]
    pixel_file = PixelFile()
    waiting = [pixel_file.put(picture) for picture in shown]
    for before, after in zip(shown, waiting, strict=True):
        assert after.rgb == b"" and after.pixels() == before.rgb and after.key == before.key
        assert after.n_bytes == before.n_bytes == len(before.rgb)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(full))
    with pytest.raises(ImageError, match=r"cannot be written to .*: No space left on device"):
        PixelFile().put(shown[0])
