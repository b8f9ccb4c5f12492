"""Reads benchmarks in their published form: DocVQA, TextVQA, ChartQA, OCRBench, TextCaps, MM-NIAH.

A benchmark is a JSON file, or a folder with one such file, and pictures. A question ends with a request for a short
answer, as in the evaluations of these papers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from kvedge_lab.eval.tasks import DialogMessage, Sample, with_choices, with_corpus

_SHORT = "\nAnswer the question using a single word or phrase."
_CAPTION = "Provide a one-sentence caption for the provided image."
_WORD = "\nAnswer the question with a single word."


@dataclass(frozen=True)
class _Form:
    """A JSON list of questions. key: name of the list in the file; "": the file is the list. id: name of the id.

    pictures: possible paths of a question's picture, with names of its object in braces; an error names the first.
    renamed: returns an object with the names "question" and "answers".
    """

    key: str
    id: str
    pictures: tuple[str, ...]
    metric: str
    request: str
    renamed: Callable[[dict[str, Any]], dict[str, Any]] = dict


_OPEN_IMAGES = ("{image_id}.jpg", "train_images/{image_id}.jpg", "test_images/{image_id}.jpg")  # or in archives
_FORMS = {
    # {"data": [{"questionId", "question", "image", "answers"}, ...]}: similarity by edits (ANLS)
    "docvqa": _Form("data", "questionId", ("{image}",), "anls", _SHORT),
    # {"data": [{"question_id", "question", "image_id", "answers"}, ...]}: VQA accuracy over ten answers
    "textvqa": _Form("data", "question_id", _OPEN_IMAGES, "vqa", _SHORT),
    # [{"imgname", "query", "label"}, ...]: numbers within 5 %
    "chartqa": _Form("", "", ("{imgname}", "png/{imgname}"), "relaxed", _WORD,
                     lambda item: {"question": item.get("query"), "answers": [str(item.get("label", ""))]}),
    # [{"id", "image_path", "question", "answers"}, ...]: an answer must occur in the model's text
    "ocrbench": _Form("", "id", ("{image_path}",), "ocr", ""),
}  # fmt: skip


def _questions(form: _Form, path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    file = _file(path)
    return [_sample(form, file, images, where, item) for where, item in items(file, limit, form.key)]


def textcaps(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads {"data": [{"image_id", "reference_strs"}, ...]}, with one entry per caption of a picture: CIDEr-D."""
    file, form = _file(path), _Form("data", "image_id", _OPEN_IMAGES, "cider", "")
    out: dict[str, Sample] = {}
    for where, item in items(file, None, form.key):
        name = str(item.get("image_id", ""))
        if name in out:
            continue
        if limit is not None and len(out) >= limit:
            break
        asked = {"question": _CAPTION, "answers": item.get("reference_strs"), "image_id": name}
        out[name] = _sample(form, file, images, where, asked)
    return with_corpus(list(out.values()), str(file))


def mm_niah(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads lines {"id", "images_list", "context", "question", "answer", "meta"}: needles in long pages.

    An answer is a text, or the number of a text in meta's `choices`.
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
                raise DatasetError(f"{where}: samples with picture choices or counts are not supported; omit this file")
            reply = choices[answer] if isinstance(answer, int) and choices else str(answer)
            pictures = tuple(image_file(folder, name, where) for name in names)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            if isinstance(error, DatasetError):
                raise
            raise DatasetError(f"{where} does not have the format of MM-NIAH: {type(error).__name__} {error}") from None
        line = DialogMessage("user", with_choices(question, choices) if choices else question + _SHORT, pictures)
        check_marks((line,), where)
        metric = "choice" if choices else "contains"
        out.append(Sample(f"{file.stem}:{item.get('id', i)}:{i}", file.stem, (line,), reply, metric, choices))
    return out


FORMATS: dict[str, Callable[[Path, Path | None, int | None], list[Sample]]] = {
    **{name: partial(_questions, form) for name, form in _FORMS.items()},
    "textcaps": textcaps,
    "mm-niah": mm_niah,
}


def _file(path: Path, suffix: str = "json") -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob(f"*.{suffix}"))
    if len(found) != 1:
        raise DatasetError(f"{path} has {len(found)} .{suffix} files; name one file")
    return found[0]


def _sample(form: _Form, file: Path, images: Path | None, where: str, item: dict[str, Any]) -> Sample:
    names = [path.format_map(defaultdict(str, item)) for path in form.pictures]
    picture, item = picture_file(images or file.parent, names, where), form.renamed(item)
    question, answers = text_field(item, "question", where), item.get("answers")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers:
        raise DatasetError(f"{where}: 'answers' must be a list of texts")
    first, *others = (text_field({"answers": one}, "answers", where) for one in answers)
    number = where.rpartition(" ")[2]
    line = DialogMessage("user", question + form.request, (picture,))
    name = f"{file.stem}:{item.get(form.id, number)}:{number}"
    return Sample(name, file.stem, (line,), first, form.metric, others=tuple(others))
