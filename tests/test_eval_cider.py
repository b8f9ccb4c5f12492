"""CIDEr-D against its equations with vectors over all n-grams; its splitting into words."""

import json
from random import Random

import numpy as np
import pytest

from kvedge_lab.eval.cider import Corpus, cut
from kvedge_lab.eval.datasets import DatasetError, load

WORDS = ["a", "the", "red", "sign", "says", "stop", "bottle", "of", "beer", "with", "text", "book", "on", "table"]


def by_definition(answer, references, corpus):
    """The equations of sections 3 and 5, with one vector over all n-grams of each length."""
    total = 0.0
    for n in (1, 2, 3, 4):

        def runs(text, n=n):
            words = text.split()
            return [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]

        every = sorted({run for texts in corpus for text in texts for run in runs(text)} | set(runs(answer)))
        rare = [np.log(len(corpus)) - np.log(max(sum(any(run in runs(t) for t in texts) for texts in corpus), 1))
                for run in every]  # fmt: skip

        def vector(text, every=every, rare=rare, runs=runs):
            return np.array([runs(text).count(run) for run in every], dtype=float) * rare

        for text in references:
            a, b = vector(answer), vector(text)
            lengths = np.linalg.norm(a) * np.linalg.norm(b)
            apart = max(len(answer.split()) - 1, 0) - max(len(text.split()) - 1, 0)
            alike = np.minimum(a, b) @ b / lengths if lengths else 0.0
            total += alike * np.exp(-(apart**2) / (2 * 6.0**2))
    return 10 * total / 4 / len(references)


def test_it_is_its_definition():
    rng = Random(0)

    def caption():
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(2, 12)))

    corpus = [[caption() for _ in range(rng.randrange(1, 5))] for _ in range(12)]
    mine = Corpus(corpus)
    for references in corpus:
        for answer in (references[0], caption(), f"{references[-1]} {caption()}", "stop", "nothing that was said"):
            assert mine.score(answer, references) == pytest.approx(by_definition(answer, references, corpus), abs=1e-12)


def test_what_everybody_says_counts_nothing():
    corpus = Corpus([["a red sign that says stop"], ["a red sign that says go"], ["a red bottle"]])
    assert corpus.score("a red sign that says stop", ["a red sign that says stop"]) == pytest.approx(10)
    assert corpus.score("a red", ["a red sign that says stop"]) == 0
    assert corpus.score("", ["a red bottle"]) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [("It doesn't.", ["it", "does", "n't"]),
     ("A half-full glass, at 12:30!", ["a", "half-full", "glass", "at", "12:30"]),
     ("\u201cCoca\u2019s\u201d", ["coca", "'s"]), ("$1,000.50 (net)", ["1,000.50", "net"]), ("...", [])],
)  # fmt: skip
def test_words(text, words):
    assert cut(text) == words


def test_in_a_file(tmp_path):
    lines = [{"question": "Describe it.", "answers": ["a red sign", "a sign"], "metric": "cider"},
             {"question": "Describe it.", "answer": "a blue cup on a table", "metric": "cider"}]  # fmt: skip
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    first, second = load(path, "jsonl")
    assert second.score("a blue cup on a table") == pytest.approx(10) and second.score("a red sign") == 0
    assert first.score("a red sign") == Corpus([["a red sign", "a sign"], [second.answer]]).score(
        "a red sign", ["a red sign", "a sign"]
    )
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(DatasetError, match="the metric cider needs samples of more than one picture"):
        load(path, "jsonl")
