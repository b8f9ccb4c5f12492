"""Scores of picture benchmarks against their definitions, written out for small cases."""

import functools
import json
from itertools import combinations
from random import Random

import pytest

from kvedge_lab.eval import vqa
from kvedge_lab.eval.datasets import DatasetError, load


def test_distance_by_its_recursion():
    @functools.cache
    def edits(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(edits(a[1:], b) + 1, edits(a, b[1:]) + 1, edits(a[1:], b[1:]) + (a[0] != b[0]))

    rng = Random(0)
    for _ in range(300):
        a, b = ("".join(rng.choice("abc") for _ in range(rng.randrange(7))) for _ in range(2))
        assert vqa.distance(a, b) == edits(a, b)


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("Hello", ["hello"], 1), ("  hello  World ", ["Hello world"], 1), ("hallo", ["hello"], 0.8),
        ("abcd", ["abxy"], 0),
        ("abc", ["abxy", "abcd"], 0.75), ("", ["a"], 0), ("12/03/1999", ["12/03/1998", "1999"], 0.9),
    ],
)  # fmt: skip
def test_similarity(answer, references, score):
    assert vqa.anls(answer, references) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("105", "100", 1), ("105.1", "100", 0), ("95", "100", 1), ("94.9", "100", 0), ("-10", "10", 0),
        ("12%", "0.12", 1), ("12", "12%", 0), ("1,000", "1000", 1), ("$5", "5.2", 1), ("Yes", "yes", 1),
        ("Yes.", "yes", 1), ("no", "yes", 0),
        ("0", "0", 1), ("0.01", "0", 0), ("2014", "2014 and 2015", 0), ("", "5", 0),
    ],
)  # fmt: skip
def test_numbers_within_a_twentieth(answer, reference, score):
    assert vqa.relaxed(answer, [reference]) == score
    assert vqa.relaxed(answer, ["something else", reference]) == score


def test_people_agree_as_in_the_definition():
    """The mean over all sets of nine of ten people, counted one by one."""
    rng = Random(1)
    for _ in range(50):
        people = [rng.choice(("red", "blue", "green")) for _ in range(10)]
        nine = [min(sum(one == "red" for one in some) / 3, 1) for some in combinations(people, 9)]
        assert vqa.vqa("Red", people) == pytest.approx(sum(nine) / len(nine))


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("The dog.", "dog"), ("two", "2"), ("don't know", "dont know"), ("1,000", "1000"), ("Yes!", "yes"),
     ("a 3.5", "3.5"),
     ("10:30", "10:30"), ("blue-green", "blue green"), ("none", "0")],
)  # fmt: skip
def test_what_does_not_count(answer, reference):
    assert vqa.vqa(answer, [reference] * 10) == vqa.vqa(answer, [reference]) == 1


@pytest.mark.parametrize(("answer", "reference"), [("3.5", "35"), ("10:30", "1030"), ("twenty", "2"), ("", "yes")])
def test_what_does_count(answer, reference):
    assert vqa.vqa(answer, [reference]) == 0


@pytest.mark.parametrize(
    ("answer", "score"),
    [("(5, 6)", 1), ("click at x=10 y=20.0", 1), ("[4, 5, 6, 7]", 1), ("[0, 0, 4, 4]", 0), ("(11, 6)", 0), ("5", 0),
     ("nowhere", 0), ("-5, 6", 0)],
)  # fmt: skip
def test_points_in_boxes(answer, score):
    assert vqa.point(answer, ["4,5,10,20"]) == score
    assert vqa.point(answer, ["100,100,101,101", "4,5,10,20"]) == score


def test_in_a_file(tmp_path):
    rows = [
        {"question": "q", "answers": ["1999", "99"], "metric": "anls"},
        {"question": "q", "answer": "5", "metric": "relaxed"},
        {"questions": [{"question": "q", "answers": ["x"] * 10, "metric": "vqa"}]},
        {"question": "q", "answer": "1,2,3,4", "metric": "point"},
    ]  # fmt: skip
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    years, five, people, place = load(tmp_path / "d.jsonl")
    assert (years.answer, years.others, years.score("99")) == ("1999", ("99",), 1)
    assert five.score("5.1") == 1 and people.score("X") == 1 and people.score("b") == 0 and place.score("2, 3") == 1
    assert years.digest() != years.__class__(**{**years.__dict__, "others": ()}).digest()


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"answers": []}, "'answer' or a list 'answers' is required"),
        ({"answers": ["a"], "answer": "b"}, "'answer' or a list 'answers' is required"),
        ({"answers": ["a", ""], "metric": "vqa"}, "must be a text"),
        ({"answers": ["a", "b"]}, "works only with the metrics anls"),
        ({"answers": "a"}, "'answer' or a list 'answers' is required"),
        ({"answer": "1,2,3", "metric": "point"}, "is not a box"),
        ({"answer": "3,2,1,4", "metric": "point"}, "is not a box"),
        ({"answer": "a,b,c,d", "metric": "point"}, "is not a box"),
    ],
)  # fmt: skip
def test_references_that_are_none(tmp_path, row, what):
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "q", **row}))
    with pytest.raises(DatasetError, match=what):
        load(tmp_path / "d.jsonl")
