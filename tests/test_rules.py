"""Each rule of `kvedge methods --check` notices a result that breaks it, and names the place."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from arrays import prompt

import pykvedge
from pykvedge.errors import BrokenRuleError
from pykvedge.reference.checks import rules

PLAN = pykvedge.plan("h2o", 0.4, recent=3, sinks=2)
P = prompt(20, (4, 2), size=8)
HERE = 1, 1  # layer and KV head of the broken rows


def row(name):
    """Returns a change of one number in a row of a head."""

    def change(result):
        getattr(result, name)[HERE[0]][HERE[1]][-1] += 0.5

    return change


def fewer(result):
    """Removes the rows of a head's newest token."""
    for rows in (result.kept, result.k, result.v):
        rows[HERE[0]][HERE[1]] = rows[HERE[0]][HERE[1]][:-1]


def kept(change):
    """Returns a change of a head's kept tokens. change: maps the token numbers."""

    def changed(result):
        result.kept[HERE[0]][HERE[1]] = change(result.kept[HERE[0]][HERE[1]]).astype(np.int32)

    return changed


def shape(result):
    result.k[HERE[0]][HERE[1]] = result.k[HERE[0]][HERE[1]][:, :4]


def scores(result):
    result.scores[HERE] *= 1.5


def cut(result):
    return replace(result, scores=result.scores[:, :, :-1])


def moved(numbers):
    """Replaces the last token that may be dropped by a token that is not kept."""
    others = np.setdiff1d(np.arange(2, 17), numbers)
    return np.sort(np.where(numbers == numbers[2], others[0], numbers))


SWAPPED, BEYOND, MOVED = kept(lambda n: n[::-1]), kept(lambda n: n + 1), kept(moved)
ORDER = (1, 0)
CASES = [
    ("engines_agree", 0, scores, "score"),
    ("engines_agree", 0, MOVED, "they differ in"),
    ("engines_agree", 0, row("k"), "key of layer 1, KV head 1"),
    ("engines_agree", 0, row("v"), "value of layer 1, KV head 1"),
    ("engines_agree", 0, row("bias"), "bias of layer 1, KV head 1"),
    ("budget_is_met", 0, fewer, "keeps 7 KV pairs, but the budget is 8"),
    ("budget_is_met", 0, SWAPPED, "are not ascending tokens"),
    ("budget_is_met", 0, BEYOND, "are not ascending tokens"),
    ("budget_is_met", 0, shape, "rows of shape "),
    ("budget_is_met", 0, cut, "the scores have shape"),
    ("protected_are_kept", 0, kept(lambda n: np.where(n == 1, 5, n)), "does not keep the protected token 1"),
    ("protected_are_kept", 0, kept(lambda n: np.where(n == 19, 5, n)), "does not keep the protected token 19"),
    ("everything_changes_nothing", 0, fewer, "tokens of layer 1, KV head 1"),
    ("everything_changes_nothing", 0, row("k"), "keys of layer 1, KV head 1"),
    ("everything_changes_nothing", 0, row("v"), "values of layer 1, KV head 1"),
    ("heads_commute", 1, MOVED, "keeps different tokens"),
    ("heads_commute", 1, row("k"), "has different keys"),
    ("runs_repeat", 2, scores, "scores of two runs differ"),
    ("runs_repeat", 2, MOVED, "two runs keep different tokens"),
    ("runs_repeat", 2, row("k"), "two runs have different keys"),
    ("runs_repeat", 2, row("v"), "two runs have different values"),
]


def tried(rule):
    more = {"engines_agree": (), "heads_commute": ("native", ORDER)}.get(rule, ("native",))
    getattr(rules, rule)(PLAN, P, *more)


@pytest.mark.parametrize("rule", dict.fromkeys(case[0] for case in CASES))
def test_the_library_keeps_to_the_rules(native, rule):
    tried(rule)


@pytest.mark.parametrize(("rule", "at", "change", "says"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_a_broken_result_is_noticed(native, monkeypatch, rule, at, change, says):
    """at: the number of the broken result, among those that the rule compares."""
    compress, calls = rules._compress, []

    def broken(*given, **settings):
        result = copy.deepcopy(compress(*given, **settings))
        if len(calls) == at:
            result = change(result) or result
        calls.append(given)
        return result

    monkeypatch.setattr(rules, "_compress", broken)
    with pytest.raises(BrokenRuleError, match=says):
        tried(rule)
    assert len(calls) > at
