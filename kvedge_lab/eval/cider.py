"""CIDEr-D: compares an answer with people's captions of a picture, by runs of words that few pictures have.

Vedantam, Zitnick and Parikh 2015, Consensus-based Image Description Evaluation (arXiv:1411.5726), equations 1 to 3, and
5 for CIDEr-D. As in the authors' code, lengths are counted in pairs of words. Words are cut as in the Penn Treebank, by
a rule that replaces Stanford's tokenizer (a Java program). Nothing is stemmed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

LONGEST = 4  # words of an n-gram
SIGMA = 6.0  # width of the penalty on a different length
SCALE = 10.0
_CUT = re.compile(r"(n't|'(?:s|re|ve|ll|d|m))\b")
_WORD = re.compile(r"n't|'(?:s|re|ve|ll|d|m)\b|\w+(?:[-.,:/]\w+)*")
Gram = tuple[str, ...]
Vector = dict[Gram, float]


def cut(text: str) -> list[str]:
    """Returns the lower-case words of a text: "doesn't" is two words, "12:30" and "half-full" one, and signs none."""
    return _WORD.findall(_CUT.sub(r" \1", text.lower().replace("\u2019", "'")))


def grams(text: str) -> Counter[Gram]:
    """Returns the number of each run of 1 to LONGEST words."""
    words = cut(text)
    return Counter(tuple(words[i : i + n]) for n in range(1, LONGEST + 1) for i in range(len(words) - n + 1))


class Corpus:
    """Counts, for each run of words, the pictures whose references contain it."""

    def __init__(self, references: Sequence[Sequence[str]]) -> None:
        """references: texts per picture. With one picture all words are common, and every score is 0."""
        self._pictures = len(references)
        self._seen: Counter[Gram] = Counter()
        for texts in references:
            self._seen.update({gram for text in texts for gram in grams(text)})

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Returns CIDEr-D, 0 to 10: the mean over the references of a picture and over the lengths of runs."""
        said, total = grams(answer), 0.0
        vectors = self._vectors(said)
        for text in references:
            right = grams(text)
            apart = _pairs(said) - _pairs(right)
            alike = sum(map(_alike, vectors, self._vectors(right))) / LONGEST
            total += alike * math.exp(-(apart**2) / (2 * SIGMA**2))
        return SCALE * total / len(references)

    def _vectors(self, counts: Counter[Gram]) -> list[Vector]:
        """Returns weighted runs, one vector per length. Runs in few pictures weigh more."""
        out: list[Vector] = [{} for _ in range(LONGEST)]
        for gram, k in counts.items():
            out[len(gram) - 1][gram] = k * (math.log(max(self._pictures, 1)) - math.log(max(self._seen[gram], 1)))
        return out


def _alike(a: Vector, b: Vector) -> float:
    lengths = math.sqrt(sum(x * x for x in a.values()) * sum(x * x for x in b.values()))
    common = sum(min(x, b[gram]) * b[gram] for gram, x in a.items() if gram in b)
    return common / lengths if lengths else 0.0


def _pairs(counts: Counter[Gram]) -> int:
    return sum(k for gram, k in counts.items() if len(gram) == 2)
