"""Reads MileBench (Song et al. 2024) in its published form: NAME/NAME.json and NAME/images/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvedge_lab.eval.files import DatasetError, check_marks, image_file, read_json
from kvedge_lab.eval.tasks import DialogMessage, Sample, with_choices
from pykvedge.models.prompt import IMAGE

# the columns of LOOK-M's tables (its table 5) -> data sets
COLUMNS = {
    "T-1": ("ActionLocalization", "ActionPrediction", "ActionSequence"),
    "T-2": ("ObjectExistence", "ObjectInteraction", "MovingAttribute", "ObjectShuffle"),
    "T-3": ("EgocentricNavigation", "MovingDirection"),
    "T-4": ("CounterfactualInference", "StateChange", "CharacterOrder", "SceneTransition"),
    "S-1": ("WebQA", "TQA", "MultiModalQA", "WikiVQA"),
    "S-2": ("SlideVQA", "OCR-VQA", "DocVQA"),
    "S-3": ("Spot-the-Diff", "CLEVR-Change", "IEdit"),
    "S-4": ("MMCoQA", "ALFRED"),
    "S-5": ("nuscenes",),
    "NH": ("TextNeedleInAHaystack", "ImageNeedleInAHaystack"),
    "IR": ("GPR1200",),
}
_COLUMN_OF = {name.lower(): column for column, names in COLUMNS.items() for name in names}
_PLACE = re.compile(r"\{(?:image|table)#(\d+)\}")
LONGEST_ANSWER = 512  # the benchmark's limit, in tokens


def load(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads the samples of one data set (its folder or JSON file), or of every data set in a folder."""
    files = [path] if path.is_file() else _files(path)
    if not files:
        raise DatasetError(f"{path} has no data set: it needs {path.name}.json, or folders NAME with NAME.json")
    return [sample for file in files for sample in _load_file(file, images, limit)]


def _files(folder: Path) -> list[Path]:
    one = folder / f"{folder.resolve().name}.json"
    if one.is_file():
        return [one]
    return sorted(f for sub in folder.iterdir() if sub.is_dir() for f in [sub / f"{sub.name}.json"] if f.is_file())


def _load_file(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    found = read_json(path)
    data = found if isinstance(found, dict) else {}
    if not isinstance(data.get("meta_data"), dict) or not isinstance(data.get("data"), list):
        raise DatasetError(f"{path} is not a MileBench data set: 'meta_data' or 'data' is missing")
    out = []
    for i, item in enumerate(data["data"][:limit]):
        where = f"{path} sample {item.get('sample_id', i) if isinstance(item, dict) else i}"
        try:
            out.append(_sample(path.stem, i, item, data["meta_data"], images or path.parent / "images", where))
        except DatasetError:
            raise
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
            raise DatasetError(
                f"{where} does not have the format of MileBench: {type(error).__name__} {error}"
            ) from None
    return out


def _sample(name: str, i: int, item: dict[str, Any], meta: dict[str, Any], folder: Path, where: str) -> Sample:
    task = item["task_instance"]
    files = [image_file(folder, file, where) for file in task["images_path"]]
    instructions, key = meta["task_instruction"], item["task_instruction_id"]
    instruction = instructions[int(key)] if isinstance(instructions, list) else instructions[str(key)]
    context, order = _placed(task["context"], len(files), where)
    choices = tuple(str(c) for c in task.get("choice_list") or ())
    text = with_choices(f"{instruction}\n{context}", choices)
    if name.endswith("NeedleInAHaystack"):
        metric = "contains"
    else:
        metric = "choice" if meta["question_type"] == "multi-choice" and choices else "rouge"
    level = "few" if len(files) < 6 else "medium" if len(files) < 32 else "many"
    groups = (*filter(None, [_COLUMN_OF.get(name.lower())]), f"{level} images")
    line = DialogMessage("user", text, tuple(files[k] for k in order))
    check_marks((line,), where)
    identity, answer = f"{name}:{item.get('sample_id', i)}", str(item["response"])
    return Sample(identity, name, (line,), answer, metric, choices, groups, LONGEST_ANSWER)


def _placed(context: str, n_images: int, where: str) -> tuple[str, list[int]]:
    """Returns the context with kvedge's mark at each image's place, and the image of each mark."""
    order = [int(k) - 1 for k in _PLACE.findall(context)]
    wrong = [k + 1 for k in order if not 0 <= k < n_images]
    if wrong:
        raise DatasetError(f"{where}: the text names image {wrong[0]}, but the sample has {n_images} images")
    if not order:  # no place is marked: images come first
        return context, list(range(n_images))
    return _PLACE.sub(IMAGE, context), order
