"""ScreenSpot's files in their original form; the boxes of samples against pixels counted one by one."""

import json
from random import Random

import pytest
from PIL import Image

from kvedge_lab.eval import vqa
from kvedge_lab.eval.datasets import DatasetError, load
from kvedge_lab.eval.screens import FORMATS
from pykvedge.models.images import load_picture, picture_size

SCALES = {"screenspot": lambda x, whole: x / whole, "screenspot-1000": lambda x, whole: 1000 * x / whole,
          "screenspot-pixels": lambda x, whole: x}  # fmt: skip


def item(**changes):
    return {"img_filename": "a.png", "bbox": [10, 20, 30, 8], "instruction": "open the menu", "data_type": "text",
            "data_source": "ios", **changes}  # fmt: skip


def written(folder, items, name="screenspot_mobile.json", size=(120, 90)):
    (folder / "screenspot_imgs").mkdir(exist_ok=True)
    Image.new("RGB", size).save(folder / "screenspot_imgs" / "a.png")
    (folder / name).write_text(json.dumps(items))
    return folder / name


@pytest.mark.parametrize("form", FORMATS)
def test_a_point_is_right_where_its_pixel_is_in_the_box(tmp_path, form):
    rng = Random(form)
    scale = SCALES[form]
    for _ in range(8):
        wide, high = rng.randrange(40, 400), rng.randrange(40, 400)
        left, top = rng.randrange(wide - 20), rng.randrange(high - 20)
        box = [left, top, rng.randrange(1, 20), rng.randrange(1, 20)]
        (sample,) = load(written(tmp_path, [item(bbox=box)], size=(wide, high)), form)
        inside = {(x, y) for x in range(left, left + box[2]) for y in range(top, top + box[3])}
        anywhere = [(rng.randrange(wide), rng.randrange(high)) for _ in range(40)]
        for x, y in rng.choices(sorted(inside), k=20) + anywhere:
            said = f"({scale(x + 0.5, wide):.5f}, {scale(y + 0.5, high):.5f})"  # the middle of a pixel
            assert sample.score(said) == ((x, y) in inside), (said, box)


def test_a_folder_of_three_files(tmp_path):
    for name in ("screenspot_mobile", "screenspot_desktop", "screenspot_web"):
        written(tmp_path, [item(), item(data_type="icon"), item()], f"{name}.json")
    found = load(tmp_path, "screenspot")
    assert len(found) == 9 and len({sample.id for sample in found}) == 9
    assert {s.task for s in found} == {f"screenspot_{where} {kind}" for where in ("mobile", "desktop", "web")
                                      for kind in ("text", "icon")}  # fmt: skip
    assert len(load(tmp_path, "screenspot", limit=2)) == 6
    (line,) = found[0].lines
    assert "open the menu" in line.text and "from 0 to 1" in line.text and line.images[0].name == "a.png"
    texts = {form: load(tmp_path, form)[0].lines[0].text for form in FORMATS}
    assert "0 to 1000" in texts["screenspot-1000"] and "in pixels" in texts["screenspot-pixels"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"bbox": [1, 2, 3]}, "'bbox' must be"), ({"bbox": "1,2,3,4"}, "'bbox' must be"),
        ({"bbox": [1, 2, 3, True]}, "'bbox' must be"), ({"bbox": [1, 2, 3, float("nan")]}, "not inside its picture"),
        ({"bbox": [130, 2, 3, 4]}, "not inside its picture of 120 x 90"),
        ({"bbox": [1, 2, 0, 4]}, "not inside its picture"),
        ({"bbox": [1, -9, 3, 4]}, "not inside its picture"), ({"instruction": " "}, "'instruction' must be a text"),
        ({"data_type": 3}, "'data_type' must be a text"), ({"img_filename": "gone.png"}, "gone.png does not exist"),
        ({"img_filename": "broken.png"}, "not a readable image"),
    ],
)  # fmt: skip
def test_what_cannot_be(tmp_path, changes, what):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(DatasetError, match=what) as failed:
        load(written(tmp_path, [item(), item(**changes)]), "screenspot")
    assert "sample 2" in str(failed.value)


def test_files_that_are_none(tmp_path):
    for data in ({}, {"data": []}, [5], []):
        with pytest.raises(DatasetError):
            load(written(tmp_path, data), "screenspot")
    (tmp_path / "screenspot_mobile.json").unlink()
    with pytest.raises(DatasetError, match="no samples"):
        load(tmp_path, "screenspot")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"point_2d": [5, 6], "label": "item 3 of 7"}', 1), ('[{"bbox_2d": [4, 5, 6, 7]}]', 1),
        ("<|box_start|>(0,1),(9,10)<|box_end|>", 1), ("(4.5, .6)", 0), ("(4.5, 5.)", 1),
        ('<point x="5" y="6">menu</point>', 1),
        ("button (3) is at [5, 6]", 1), ("pyautogui.click(x=5, y=6)", 1), ("[]", 0), ("[[5, 6]]", 1), ("5-6", 1),
        ("[-5, 6]", 0),
    ],
)  # fmt: skip
def test_how_models_write_points(answer, score):
    assert vqa.point(answer, ["4,5,10,20"]) == score


def test_the_size_is_that_of_the_picture_as_it_is_read(tmp_path):
    image = Image.new("RGB", (30, 20))
    for orientation in range(1, 9):
        exif = image.getexif()
        exif[0x0112] = orientation
        image.save(tmp_path / "a.jpg", exif=exif)
        read = load_picture(tmp_path / "a.jpg")
        assert picture_size(tmp_path / "a.jpg") == (read.width, read.height)


def test_the_command(kvedge, tmp_path, native):
    file = written(tmp_path, [item(), item(data_type="icon")])
    done = kvedge("eval", file, "--format", "screenspot", "--method", "snapkv", "--metrics", "score")
    assert "screenspot_mobile icon" in done.out
