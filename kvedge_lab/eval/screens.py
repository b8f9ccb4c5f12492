"""Reads ScreenSpot in its published form: pictures of screens, and the place on them that an instruction means.

Cheng et al. 2024, SeeClick, arXiv:2401.10935, and the corrected ScreenSpot-v2 (Wu et al. 2024, arXiv:2410.23218). The
boxes are in pixels; models answer in different units. Each of FORMATS asks for one unit and converts the boxes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvedge_lab.eval.files import DatasetError, items, picture_file, text_field
from kvedge_lab.eval.tasks import DialogMessage, Sample
from pykvedge.errors import ImageError
from pykvedge.models.images import picture_size

FOLDERS = ("screenspot_imgs", "screenspotv2_image")  # folders in the archives
_ASKED = (
    "Where on this screen is what belongs to the following instruction?\n{}\n"
    "Answer with a point (x, y) only: x from the left and y from the top edge, {}."
)


@dataclass(frozen=True)
class Unit:
    """The unit of a point. whole: the length of each side of a picture; None: its pixels."""

    words: str
    whole: int | None
    digits: int

    def box(self, sides: tuple[float, float, float, float], size: tuple[int, int]) -> str:
        """Returns "left,top,right,bottom" in this unit. sides: in pixels. size: width and height of the picture."""
        wide, high = size if self.whole is None else (self.whole, self.whole)
        scales = (wide / size[0], high / size[1]) * 2
        return ",".join(f"{x * scale:.{self.digits}f}" for x, scale in zip(sides, scales, strict=True))


UNITS = {  # rounding to these digits moves an edge by less than a hundredth of a pixel of any screen
    "screenspot": Unit("both as shares of the whole from 0 to 1", 1, 6),
    "screenspot-1000": Unit("both as whole numbers from 0 to 1000", 1000, 3),
    "screenspot-pixels": Unit("both in pixels", None, 3),
}


def screenspot(unit: Unit, path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads [{"img_filename", "bbox", "instruction", "data_type"}, ...], or all such files of a folder.

    bbox: [left, top, width, height] in pixels of the stored picture. limit: samples of each file. A task is a file and
    a data_type: mobile, desktop and web are separate files, texts and icons are types.
    Raises DatasetError.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    out = []
    for file in files:
        for where, item in items(file, limit, ""):
            out.append(_sample(unit, images or file.parent, file.stem, where, item))
    return out


FORMATS: dict[str, Callable[[Path, Path | None, int | None], list[Sample]]] = {
    name: partial(screenspot, unit) for name, unit in UNITS.items()
}


def _sample(unit: Unit, folder: Path, name: str, where: str, item: dict[str, Any]) -> Sample:
    file = text_field(item, "img_filename", where)
    found = picture_file(folder, [file, *(f"{archive}/{file}" for archive in FOLDERS)], where)
    try:
        size = picture_size(found)
    except ImageError as error:
        raise DatasetError(f"{where}: {error}") from None
    box = unit.box(_sides(item.get("bbox"), size, where), size)
    text = _ASKED.format(text_field(item, "instruction", where), unit.words)
    task = f"{name} {text_field(item, 'data_type', where)}"
    return Sample(f"{name}:{where.rpartition(' ')[2]}", task, (DialogMessage("user", text, (found,)),), box, "point")


def _sides(given: Any, size: tuple[int, int], where: str) -> tuple[float, float, float, float]:
    """Returns left, top, right and bottom of a box that overlaps the picture. Raises DatasetError."""
    numbers = isinstance(given, list) and len(given) == 4
    if not numbers or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in given):
        raise DatasetError(f"{where}: 'bbox' must be [left, top, width, height], not {given!r}")
    left, top, wide, high = given
    if not (wide > 0 and high > 0 and left < size[0] and top < size[1] and left + wide > 0 and top + high > 0):
        raise DatasetError(f"{where}: the box {given} is not inside its picture of {size[0]} x {size[1]} pixels")
    return left, top, left + wide, top + high
