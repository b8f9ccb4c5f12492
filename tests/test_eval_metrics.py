"""Metrics of kvedge eval against other implementations, closed forms and loops."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvedge_lab.eval import metrics

# answer, reference, F1 of rouge-score 0.1.2 (rougeL, use_stemmer=False)
ROUGE = [
    ("the cat sat on the mat", "the cat is on the mat", 0.833333),
    ("A red star, at the top-left.", "a red STAR at the bottom left", 0.857143),
    ("police killed the gunman", "the gunman police killed", 0.5),
    ("one two three four five", "five four three two one", 0.2),
    ("7KE4", "7KE4", 1.0),
    ("7KE4", "7KF4", 0.0),
    ("a a a b", "a b a", 0.571429),
    ("nothing alike", "quite different", 0.0),
    ("", "words", 0),
    ("don't stop", "do not stop", 0.333333),
]
TEXTS = st.lists(st.sampled_from(["a", "b", "cc", "D,", "e-f", "7"]), max_size=30).map(" ".join)


@pytest.mark.parametrize(("answer", "reference", "expected"), ROUGE)
def test_rouge_l_is_what_the_rouge_score_package_gives(answer, reference, expected):
    assert metrics.rouge_l(answer, reference) == pytest.approx(expected, abs=1e-6)


@given(TEXTS, TEXTS)
@settings(max_examples=200, deadline=None)
def test_rouge_l_against_the_package_itself(answer, reference):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=False)
    expected = scorer.score(reference, answer)["rougeL"].fmeasure
    assert metrics.rouge_l(answer, reference) == pytest.approx(expected, abs=1e-9)


@given(TEXTS, TEXTS)
@settings(max_examples=200, deadline=None)
def test_common_subsequences_against_the_dynamic_programme(left, right):
    a, b = metrics.words(left), metrics.words(right)
    table = np.zeros((len(a) + 1, len(b) + 1), dtype=int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
    expected = 2 * table[-1, -1] / (len(a) + len(b)) if a and b else 0.0
    assert metrics.rouge_l(left, right) == pytest.approx(expected)


def test_distributions_against_closed_forms():
    logits = np.array([0.0, math.log(3.0), -1e30], dtype=np.float32)
    rows = metrics.log_softmax(logits)
    np.testing.assert_allclose(np.exp(rows), [0.25, 0.75, 0.0], atol=1e-7)
    np.testing.assert_allclose(metrics.log_softmax(logits + 500), rows, atol=1e-4)
    other = np.log([0.5, 0.25, 0.25])
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.25)
    assert metrics.divergence(rows, other) == pytest.approx(expected, abs=1e-6)
    assert metrics.divergence(other, other) == 0


CHOICES = ["a red star", "star", "blue"]


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        ("B. star", 1),
        ("star", 1),
        ("A red star!", 0),  # of two at the same place, the longer one
        ("It is BLUE, not a star", 2),  # the first one in the text
        ("c", 2),
        ("(B)", 1),
        ("b", 1),
        ("C. blue, A. a red star", 2),
        ("starboard", None),
        ("", None),
    ],
)
def test_which_choice_an_answer_names(answer, index):
    assert metrics.chosen(answer, CHOICES) == index


def test_a_reference_may_be_the_text_or_the_letter_of_its_choice():
    assert metrics.choice_match("B", "star", CHOICES) == metrics.choice_match("star", "B", CHOICES) == 1
    assert metrics.choice_match("B", "C", CHOICES) == 0
    many = [f"x{i}" for i in range(30)]  # more than there are letters
    assert metrics.choice_match("x7", "x7", many) == 1 and metrics.chosen("h", many) is None


@pytest.mark.parametrize("right", [0, 1])
def test_choices_that_differ_in_signs_alone_are_told_apart(right):
    choices = ["+5", "-5"]
    for answer in (choices[right], "AB"[right], f"{'AB'[right]}. {choices[right]}"):
        assert metrics.choice_match(answer, choices[right], choices) == 1
        assert metrics.choice_match(answer, choices[1 - right], choices) == 0
        assert metrics.choice_match(answer, "BA"[right], choices) == 0


def test_matching_texts():
    assert metrics.exact_match(" red\n", "red") == 1 and metrics.exact_match("Red", "red") == 0
    assert metrics.contains("The pass key is: 123-45.", "123 45") == 1
    assert metrics.contains("1234", "123") == 0 and metrics.contains("x", "") == 0


def test_perplexity_is_pooled_over_tokens():
    nll, tokens = np.array([1.0, 8.0]), np.array([1.0, 3.0])
    assert metrics.pooled(nll, tokens, np.exp) == pytest.approx(math.exp(9 / 4))


def test_intervals_are_of_differences_of_the_same_samples():
    rng = np.random.default_rng(0)
    n, one = 400, np.ones(400)
    hard = rng.normal(0, 10, n)  # samples differ much, methods little
    shift = rng.normal(1.0, 0.5, n)
    low, high = metrics.paired_interval(hard + shift, one, hard)
    error = 1.96 * shift.std() / math.sqrt(n)  # the normal approximation of a paired difference
    assert low == pytest.approx(shift.mean() - error, abs=0.3 * error)
    assert high == pytest.approx(shift.mean() + error, abs=0.3 * error)
    assert metrics.paired_interval(hard + 2, one, hard) == pytest.approx((2, 2))
    assert metrics.paired_interval(hard, one, hard, seed=1) == (0, 0)


@pytest.mark.parametrize(("n", "times", "least"), [(60, 100, 0.86), (6, 300, 0.88)])  # n = 6, plain percentiles: 0.83
def test_an_interval_covers_the_truth_about_as_often_as_it_says(n, times, least):
    rng, held = np.random.default_rng(1 if n == 60 else 2), 0
    for seed in range(times):
        low, high = metrics.paired_interval(rng.normal(0.5, 1, n), np.ones(n), np.zeros(n), seed=seed)
        held += low <= 0.5 <= high
    assert least <= held / times <= 1


def test_few_samples_have_no_interval():
    values = np.arange(4.0)
    assert metrics.paired_interval(values, np.ones(4), np.zeros(4)) is None
    assert metrics.score_interval(values / 4, np.zeros(4)) is None
    assert metrics.paired_interval(np.arange(5.0), np.ones(5), np.zeros(5)) is not None


@pytest.mark.parametrize(("right", "right_before"), [(0.9, 0.9), (0.5, 0.3), (0.98, 0.95)])
def test_intervals_of_scores_hold_the_truth(right, right_before):
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(500):
        low, high = metrics.score_interval(*((rng.random(20) < p).astype(float) for p in (right, right_before)))
        held += low <= right - right_before <= high
    assert held / 500 >= 0.92


def test_equal_scores_do_not_prove_that_nothing_changed():
    low, high = metrics.score_interval(np.ones(20), np.ones(20))
    assert -0.2 < low < -0.05 < 0.05 < high < 0.2
    low, high = metrics.score_interval(np.ones(2000), np.ones(2000))
    assert -0.01 < low < 0 < high < 0.01


@pytest.mark.parametrize(("freedom", "t"), [(4, 2.776), (9, 2.262), (29, 2.045), (1000, 1.962)])
def test_students_quantile_is_that_of_the_tables(freedom, t):
    assert metrics.student(freedom) == pytest.approx(t, abs=2e-3)
