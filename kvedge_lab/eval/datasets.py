"""Reads samples from files in their published form: JSONL of kvedge, MileBench, LLaVA-Description and MM-Vet.

Everything is checked before anything is measured. An error names the file, the line or the sample, and the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvedge_lab.eval import benchmarks, milebench, screens, vqa
from kvedge_lab.eval.files import (
    DatasetError,
    check_columns,
    check_marks,
    image_file,
    is_file,
    parsed,
    read_json,
    read_text,
    text_field,
)
from kvedge_lab.eval.metrics import place_of
from kvedge_lab.eval.tasks import NO_SCORE, SCORES, SEVERAL, DialogMessage, Sample, with_choices, with_corpus
from pykvedge.errors import unknown
from pykvedge.models.prompt import IMAGE, places

COLUMNS = ("id", "task", "images", "messages", "question", "questions", "answer", "answers", "choices", "metric",
           "max_tokens")  # fmt: skip
ASKED = ("question", "answer", "answers", "choices", "metric", "max_tokens", "task")  # keys of one of several questions
LLAVA_COLUMNS = ("id", "question_id", "image", "question", "answer", "conversations", "capability", "category", "model",
                 "width", "height")  # fmt: skip
MM_VET_COLUMNS = ("imagename", "question", "answer", "capability", "imagesource")
ROLES = ("system", "user", "assistant")


def load(path: Path, form: str = "auto", images: Path | None = None, limit: int | None = None) -> list[Sample]:
    """Reads the first `limit` samples of a data set, or of each data set in a MileBench folder.

    form: a name in FORMATS, or "auto" (a list of JSON objects counts as LLaVA-Description). images: the folder of
    relative image paths; None: the format's default. Raises DatasetError, UnknownNameError.
    """
    if form not in ("auto", *FORMATS):
        raise unknown("format", form, ("auto", *FORMATS))
    if not path.exists():
        raise DatasetError(f"{path} does not exist")
    name = form if form != "auto" else _guess(path)
    out = FORMATS[name](path, images, limit)
    if not out:
        raise DatasetError(f"{path} has no samples")
    return out


def _guess(path: Path) -> str:
    if path.is_dir():
        return "milebench"
    if path.suffix == ".jsonl":
        return "jsonl"
    data = read_json(path)
    if isinstance(data, dict):
        return "milebench" if "meta_data" in data else "mm-vet"
    return "llava-description"


# ------------------------------------------------------------------------------------------------------- JSONL


def jsonl(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads one JSON object per line, with keys in COLUMNS. `answer`, and `messages` or `question`, are required."""
    out: list[Sample] = []
    known: set[str] = set()
    for number, text in enumerate(read_text(path).split("\n"), 1):  # texts may contain other line separators
        where = f"{path} line {number}"
        if not text.strip():
            continue
        if limit is not None and len(out) >= limit:
            break
        try:
            data = parsed(text)
        except ValueError as error:
            raise DatasetError(f"{where} is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise DatasetError(f"{where} is not a JSON object")
        for sample in _jsonl_samples(data, images or path.parent, path, number):
            if sample.id in known:
                raise DatasetError(f"{where}: the id '{sample.id}' occurs twice")
            known.add(sample.id)
            out.append(sample)
    return with_corpus(out, str(path))


def _jsonl_samples(data: dict[str, Any], folder: Path, path: Path, number: int) -> list[Sample]:
    """Returns the sample of a line, or one sample per question of a line; such questions share a context."""
    if "questions" not in data:
        return [_jsonl_sample(data, folder, path, number)]
    where, asked = f"{path} line {number}", data["questions"]
    if not isinstance(asked, list) or not asked or not all(isinstance(one, dict) for one in asked):
        raise DatasetError(f"{where}: 'questions' must be a list of objects with 'question' and 'answer'")
    for key in ASKED[:5]:
        if key in data:
            raise DatasetError(f"{where}: '{key}' and 'questions' exclude each other; put '{key}' into each question")
    common = {key: data[key] for key in data if key not in ("questions", "messages")}
    identity, out = str(data.get("id", number)), []
    for i, one in enumerate(asked, 1):
        check_columns(one, ASKED, f"{where} question {i}")
        of = {**common, **one, "id": f"{identity}/{i}"}
        if "messages" in data:  # earlier messages come first, then each of the questions
            if not isinstance(data["messages"], list):
                raise DatasetError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
            text = text_field(of, "question", f"{where} question {i}")
            of = {**of, "messages": [*data["messages"], {"role": "user", "content": text}]}
            del of["question"]
        sample = _jsonl_sample(of, folder, path, number)
        out.append(replace(sample, context=f"{path.stem}:{identity}"))
    return out


def _jsonl_sample(data: dict[str, Any], folder: Path, path: Path, number: int) -> Sample:
    where = f"{path} line {number}"
    check_columns(data, COLUMNS, where)
    answer, *others = _references(data, where)
    choices = data.get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(c, str) and c.strip() for c in choices):
        raise DatasetError(f"{where}: 'choices' must be a list of texts")
    if len({choice.strip() for choice in choices}) < len(choices):
        raise DatasetError(f"{where}: two of the 'choices' are equal")
    metric = data.get("metric", "choice" if choices else "rouge")
    if metric not in SCORES + NO_SCORE:
        raise DatasetError(f"{where}: {unknown('metric', str(metric), SCORES + NO_SCORE)}")
    if (metric == "choice") != bool(choices):
        raise DatasetError(f"{where}: 'choices' and the metric 'choice' need each other; add the missing one")
    if choices and place_of(answer, choices) is None:
        raise DatasetError(f"{where}: the answer {answer!r:.40} is neither a choice nor the letter of a choice")
    if others and metric not in SEVERAL:
        raise DatasetError(f"{where}: 'answers' works only with the metrics {', '.join(SEVERAL)}")
    if metric == "point":
        _check_boxes((answer, *others), where)
    longest = data.get("max_tokens")
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 1):
        raise DatasetError(f"{where}: 'max_tokens' must be a number of tokens, not {longest!r}")
    files = data.get("images", [])
    if not isinstance(files, list):
        raise DatasetError(f"{where}: 'images' must be a list of paths")
    lines = _messages(data, tuple(image_file(folder, name, where) for name in files), tuple(choices), where)
    identity = f"{path.stem}:{data.get('id', number)}"
    task = str(data.get("task", path.stem))
    return Sample(identity, task, lines, answer, metric, tuple(choices), max_tokens=longest,
                  others=tuple(others))  # fmt: skip


def _references(data: dict[str, Any], where: str) -> list[str]:
    if "answers" not in data:
        return [text_field(data, "answer", where)]
    found = data["answers"]
    if "answer" in data or not isinstance(found, list) or not found:
        raise DatasetError(f"{where}: 'answer' or a list 'answers' is required")
    return [text_field({"answers": one}, "answers", where) for one in found]


def _check_boxes(references: tuple[str, ...], where: str) -> None:
    for reference in references:
        try:
            vqa.box(reference)
        except ValueError as error:
            raise DatasetError(f"{where}: {error}") from None


def _messages(
    data: dict[str, Any], images: tuple[Path, ...], choices: tuple[str, ...], where: str
) -> tuple[DialogMessage, ...]:
    """Returns the conversation. Images go to the marks in order; without marks, all go to the first user's message."""
    if ("messages" in data) == ("question" in data):
        raise DatasetError(f"{where}: exactly one of 'messages' and 'question' is required")
    if "question" in data:
        turns: Any = [{"role": "user", "content": text_field(data, "question", where)}]
    else:
        turns = data["messages"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DatasetError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    pairs: list[tuple[str, str]] = []
    for turn in turns:
        for key in turn:
            if key not in ("role", "content"):
                raise DatasetError(f"{where}: {unknown('column of a message', key, ('role', 'content'))}")
        if turn.get("role") not in ROLES:
            raise DatasetError(f"{where}: {unknown('role', str(turn.get('role')), ROLES)}")
        pairs.append((turn["role"], text_field(turn, "content", where)))
    _check_roles([role for role, _ in pairs], where)
    pairs[-1] = (pairs[-1][0], with_choices(pairs[-1][1], choices))
    lines = _placed(pairs, images)
    check_marks(lines, where)
    return lines


def _check_roles(roles: list[str], where: str) -> None:
    talk = roles[1:] if roles[:1] == ["system"] else roles
    expected = [("user", "assistant")[i % 2] for i in range(len(talk))]
    if not talk or talk != expected or talk[-1] != "user":
        raise DatasetError(
            f"{where}: the roles user and assistant must alternate, and the last message must be from the user"
        )


def _placed(pairs: list[tuple[str, str]], images: tuple[Path, ...]) -> tuple[DialogMessage, ...]:
    if not any(places(text) for _, text in pairs):
        first = next(i for i, (role, _) in enumerate(pairs) if role == "user")
        return tuple(DialogMessage(role, text, images if i == first else ()) for i, (role, text) in enumerate(pairs))
    lines, left = [], list(images)
    for i, (role, text) in enumerate(pairs):
        n = places(text) if i < len(pairs) - 1 else len(left)  # check_marks() reports a wrong number of images
        lines.append(DialogMessage(role, text, tuple(left[:n])))
        left = left[n:]
    return tuple(lines)


# ------------------------------------------------------------------------------- LLaVA-Description and MM-Vet


def llava_description(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads a list of {"image", "question", "answer"}, or of {"image", "conversations": [{"from", "value"}, ...]}."""
    return [_llava_sample(*found, images or path.parent, False) for found in _objects(path, limit)]


def mm_vet(path: Path, images: Path | None, limit: int | None) -> list[Sample]:
    """Reads a dict {id: {"imagename", "question", "answer", "capability"}}, or a list; images follow questions."""
    folders = [images] if images else [path.parent / "images", path.parent]
    out = []
    for where, identity, data in _objects(path, limit):
        if "imagename" not in data:
            out.append(_llava_sample(where, identity, data, images or path.parent, True))
            continue
        check_columns(data, MM_VET_COLUMNS, where)
        groups = data.get("capability", [])
        if not isinstance(groups, list):
            raise DatasetError(f"{where}: 'capability' must be a list of names")
        folder = next((f for f in folders if is_file(f / str(data["imagename"]))), folders[-1])
        question, image = text_field(data, "question", where), image_file(folder, data["imagename"], where)
        line = DialogMessage("user", question, (image,))
        names = tuple(str(name) for name in groups)
        out.append(Sample(identity, path.stem, (line,), text_field(data, "answer", where), "rouge", groups=names))
    return out


def _objects(path: Path, limit: int | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (where, id, object) of a JSON list or dict."""
    data = read_json(path)
    if not isinstance(data, (list, dict)):
        raise DatasetError(f"{path} must be a list or an object of samples")
    items = list(data.items()) if isinstance(data, dict) else [(str(i + 1), item) for i, item in enumerate(data)]
    for key, item in items[:limit]:
        where = f"{path} sample {key}"
        if not isinstance(item, dict):
            raise DatasetError(f"{where} is not a JSON object")
        yield where, f"{path.stem}:{key}", item


def _llava_sample(where: str, identity: str, data: dict[str, Any], folder: Path, image_last: bool) -> Sample:
    check_columns(data, LLAVA_COLUMNS, where)
    files = (image_file(folder, data["image"], where),) if "image" in data else ()
    if "conversations" in data:
        turns = data["conversations"]
        if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns):
            raise DatasetError(f"{where}: 'conversations' must be a list of turns with 'from' and 'value'")
        roles = {"human": "user", "gpt": "assistant", "system": "system"}
        pairs = [(roles.get(str(t.get("from")), ""), text_field(t, "value", where)) for t in turns]
        if pairs[-1][0] != "assistant":
            pairs.pop()
        answer = pairs.pop()[1]
        _check_roles([role for role, _ in pairs], where)
    else:
        pairs, answer = [("user", text_field(data, "question", where))], text_field(data, "answer", where)
        if image_last and files and not places(pairs[0][1]):
            pairs = [("user", f"{pairs[0][1]}\n{IMAGE}")]
    lines = _placed(pairs, files)
    check_marks(lines, where)
    return Sample(identity, identity.rpartition(":")[0], lines, answer, "rouge")


FORMATS: dict[str, Callable[[Path, Path | None, int | None], list[Sample]]] = {
    "jsonl": jsonl,
    "milebench": milebench.load,
    "llava-description": llava_description,
    "mm-vet": mm_vet,
    **benchmarks.FORMATS,
    **screens.FORMATS,
}
