"""Benchmarks are read as their authors give them out: DocVQA, TextVQA, ChartQA, OCRBench, TextCaps, MM-NIAH.

Each is a JSON file, or a folder with one such file, and pictures; a question ends with the request that the evaluations
of these papers use, so that answers are short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvedge_lab.eval.files import (
    DatasetError,
    check_marks,
    image_file,
    items,
    parsed,
    picture_file,
    read_text,
    text_field,
)
from kvedge_lab.eval.tasks import Line, Sample, with_choices, with_corpus

_SHORT = "\nAnswer the question using a single word or phrase."
_CAPTION = "Provide a one-sentence caption for the provided image."
_WORD = "\nAnswer the question with a single word."


def docvqa(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads {"data": [{"questionId", "question", "image", "answers"}, ...]}: similarity by edits (ANLS)."""
    file = _file(path)
    out = []
    for where, item in items(file, limit, "data"):
        picture = picture_file(images or file.parent, [str(item.get("image", ""))], where)
        out.append(_sample(file, where, item, "questionId", picture, "anls", _SHORT))
    return out


def textvqa(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads {"data": [{"question_id", "question", "image_id", "answers"}, ...]}: VQA accuracy over ten answers."""
    file = _file(path)
    out = []
    for where, item in items(file, limit, "data"):
        picture = _open_image(images or file.parent, item, where)
        out.append(_sample(file, where, item, "question_id", picture, "vqa", _SHORT))
    return out


def chartqa(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads [{"imgname", "query", "label"}, ...]: numbers within 5 %."""
    file = _file(path)
    out = []
    for where, item in items(file, limit, ""):
        name = str(item.get("imgname", ""))
        picture = picture_file(images or file.parent, [name, f"png/{name}"], where)
        renamed = {"question": item.get("query"), "answers": [str(item.get("label", ""))]}
        out.append(_sample(file, where, renamed, "", picture, "relaxed", _WORD))
    return out


def ocrbench(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads [{"id", "image_path", "question", "answers"}, ...]: one of the answers stands in what is said."""
    file = _file(path)
    out = []
    for where, item in items(file, limit, ""):
        picture = picture_file(images or file.parent, [str(item.get("image_path", ""))], where)
        out.append(_sample(file, where, item, "id", picture, "ocr", ""))
    return out


def textcaps(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads {"data": [{"image_id", "reference_strs"}, ...]}, an entry for each caption of a picture: CIDEr-D."""
    file = _file(path)
    out: dict[str, Sample] = {}
    for where, item in items(file, None, "data"):
        name = str(item.get("image_id", ""))
        if name in out:
            continue
        if limit is not None and len(out) >= limit:
            break
        renamed = {"question": _CAPTION, "answers": item.get("reference_strs"), "image_id": name}
        picture = _open_image(images or file.parent, item, where)
        out[name] = _sample(file, where, renamed, "image_id", picture, "cider", "")
    return with_corpus(list(out.values()), str(file))


def mm_niah(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads lines {"id", "images_list", "context", "question", "answer", "meta"}: needles in long pages.

    An answer is a text, or the number of one of the texts in meta's `choices`.
    """
    file, out = _file(path, "jsonl"), list[Sample]()
    folder = images or file.parent
    for i, text in enumerate(read_text(file).rstrip().split("\n")[:limit], 1):
        where = f"{file} line {i}"
        try:
            item = parsed(text)
            meta, answer, names = item.get("meta") or {}, item["answer"], item["images_list"]
            choices = tuple(str(choice) for choice in meta.get("choices") or ())
            question = f"{text_field(item, 'context', where)}\n{text_field(item, 'question', where)}"
            if meta.get("choices_image_path") or isinstance(answer, list):
                raise DatasetError(f"{where}: choices that are pictures, and counts, are not read; leave this file out")
            reply = choices[answer] if isinstance(answer, int) and choices else str(answer)
            pictures = tuple(image_file(folder, name, where) for name in names)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            if isinstance(error, DatasetError):
                raise
            raise DatasetError(f"{where} does not have MM-NIAH's form: {type(error).__name__} {error}") from None
        line = Line("user", with_choices(question, choices) if choices else question + _SHORT, pictures)
        check_marks((line,), where)
        metric = "choice" if choices else "contains"
        out.append(Sample(f"{file.stem}:{item.get('id', i)}:{i}", file.stem, (line,), reply, metric, choices))
    return out


FORMATS: dict[str, Callable[[Path, Path | None, int | None], list[Sample]]] = {
    "docvqa": docvqa,
    "textvqa": textvqa,
    "chartqa": chartqa,
    "ocrbench": ocrbench,
    "textcaps": textcaps,
    "mm-niah": mm_niah,
}


def _file(path: Path, suffix: str = "json") -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob(f"*.{suffix}"))
    if len(found) != 1:
        raise DatasetError(f"{path} holds {len(found)} .{suffix} files; name the one that is meant")
    return found[0]


def _open_image(folder: Path, item: dict[str, Any], where: str) -> Path:
    """Finds a picture of Open Images, which TextVQA and TextCaps ask about, in the folders of their archives too."""
    name = f"{item.get('image_id', '')}.jpg"
    return picture_file(folder, [name, f"train_images/{name}", f"test_images/{name}"], where)


def _sample(
    file: Path, where: str, item: dict[str, Any], key: str, picture: Path, metric: str, request: str
) -> Sample:
    question, answers = text_field(item, "question", where), item.get("answers")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers:
        raise DatasetError(f"{where}: 'answers' must be a list of texts")
    first, *others = (text_field({"answers": one}, "answers", where) for one in answers)
    number = where.rpartition(" ")[2]
    line, name = Line("user", question + request, (picture,)), f"{file.stem}:{item.get(key, number)}:{number}"
    return Sample(name, file.stem, (line,), first, metric, others=tuple(others))
