"""Scores of benchmarks about pictures of documents, text, charts and screens.

All functions take an answer and its references, and return 0..1. They follow the benchmarks' definitions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TOLERANCE = 0.05  # ChartQA: numbers may differ by a twentieth of the reference
SIMILAR = 0.5  # DocVQA: an answer must be more similar than this, as a share of its characters
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COORDINATE = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d+)?|\.\d+)")  # skips the 2 of point_2d
_BRACKETS = re.compile(r"[(\[][\d\s.,()\[\]-]*[)\]]")
_ARTICLES = ("a", "an", "the")
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {"none": "0", **{name: str(i) for i, name in enumerate(_NAMES)}}


def anls(answer: str, references: Sequence[str]) -> float:
    """Returns the normalised Levenshtein similarity to the nearest reference; 0 up to SIMILAR.

    Biten et al. 2019, Scene Text Visual Question Answering, equation 1: case and white space around do not count.
    """
    return max(_similarity(_plain(answer), _plain(reference)) for reference in references)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _similarity(a: str, b: str) -> float:
    if not a or not b:
        return float(a == b)
    share = 1 - distance(a, b) / max(len(a), len(b))
    return share if share > SIMILAR else 0.0


def distance(a: str, b: str) -> int:
    """Returns the number of inserted, deleted and replaced characters from a to b (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def relaxed(answer: str, references: Sequence[str]) -> float:
    """Returns 1 for a number within TOLERANCE of a reference's number, or for equal words; else 0.

    Masry et al. 2022, ChartQA, section 5: percentages are numbers too; a reference of 0 must be met exactly.
    """
    return float(any(_is_near(answer, reference) for reference in references))


def _is_near(answer: str, reference: str) -> bool:
    said, right = _number(answer), _number(reference)
    if said is None or right is None:
        return _plain(answer).rstrip(".") == _plain(reference).rstrip(".")
    return abs(said - right) <= TOLERANCE * abs(right)


def _number(text: str) -> float | None:
    text = text.strip().rstrip(".").replace(",", "").removeprefix("$")
    share = text.endswith("%")
    found = _NUMBER.fullmatch(text.removesuffix("%").strip())
    return None if found is None else float(found[0]) / (100 if share else 1)


def vqa(answer: str, references: Sequence[str]) -> float:
    """Returns VQA accuracy: 1 if three of the asked people gave the answer, less for fewer people.

    Antol et al. 2015, section 4: min(agreeing / 3, 1), averaged over all sets of references that leave one out. Case,
    articles, punctuation and apostrophes do not count, and small numbers may be words.
    """
    if not answer.strip():
        return 0.0
    said, people = _bare(answer), [_bare(reference) for reference in references]
    if len(people) == 1:
        return float(said == people[0])
    n = sum(said == one for one in people)
    without_one, without_other = min((n - 1) / 3, 1.0), min(n / 3, 1.0)
    return (n * without_one + (len(people) - n) * without_other) / len(people)


def _bare(text: str) -> str:
    text = re.sub(r"(?<=\d),(?=\d)", "", text.lower().replace("'", "").replace("\u2019", ""))
    text = re.sub(r"(?!(?<=\d)[.:](?=\d))[^\w\s]", " ", text)
    return " ".join(_DIGITS.get(word, word) for word in text.split() if word not in _ARTICLES)


def point(answer: str, references: Sequence[str]) -> float:
    """Returns 1 if the point in an answer lies in a reference's box, both in the same units; else 0.

    Cheng et al. 2024, ScreenSpot. With two or three numbers, the first two are the point; with four or more, the first
    four are a box, and its centre is the point. Numbers in brackets come first if there are two or more, because models
    also name things by numbers. A reference is "left,top,right,bottom". Raises ValueError if a reference is no box.
    """
    lists = [[float(n) for n in _COORDINATE.findall(part)] for part in (*_BRACKETS.findall(answer), answer)]
    found = next((numbers for numbers in lists if len(numbers) >= 2), [])
    if not found:
        return 0.0
    x, y = ((found[0] + found[2]) / 2, (found[1] + found[3]) / 2) if len(found) >= 4 else found[:2]
    return float(any(left <= x <= right and top <= y <= bottom for left, top, right, bottom in map(box, references)))


def box(reference: str) -> tuple[float, float, float, float]:
    """Parses "left,top,right,bottom". Raises ValueError for any other text."""
    try:
        sides = [float(n) for n in reference.split(",")]
    except ValueError:
        sides = []
    if len(sides) != 4 or not (sides[0] <= sides[2] and sides[1] <= sides[3]):
        raise ValueError(f"{reference!r} is not a box; write left,top,right,bottom")
    left, top, right, bottom = sides
    return left, top, right, bottom


def ocr(answer: str, references: Sequence[str]) -> float:
    """Returns 1 if a reference occurs in the answer, letter by letter, without case and white space; else 0.

    Liu et al. 2024, OCRBench. There, white space counts outside of formulas; models break lines freely.
    """
    said = "".join(answer.lower().split())
    return float(any("".join(reference.lower().split()) in said for reference in references))


SCORES = {"anls": anls, "relaxed": relaxed, "vqa": vqa, "point": point, "ocr": ocr}
