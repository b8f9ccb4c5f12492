"""The costs of plans on contexts, with intervals that hold for unseen contexts.

Tokens of one context are not independent. Agreement and exact answers are shares of tokens and of answers. Their
interval is Wilson's for an effective number of independent tokens (the count divided by the design effect, as in Korn
and Graubard 1998), with Student's quantile for the number of contexts. The design effect is the plan's, and at least
the median of all plans on the choosing contexts, because full agreement does not show how disagreements cluster. KL
divergence has a bootstrap interval over contexts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.metrics import LEAST, SHARE, paired_interval, student
from kvedge_lab.eval.runner import FULL
from kvedge_lab.eval.tasks import Sample

Rows = Mapping[tuple[str, str, str], Mapping[str, Any]]
INTERVALS = (
    "Agreement and exact answers: Wilson's interval for the count over its design effect, contexts being clusters "
    "(Korn and Graubard 1998). KL divergence: bootstrap over contexts."
)


@dataclass(frozen=True)
class Figures:
    """One plan on some contexts. agreement: share of the tokens of the full cache's answers that are also the plan's
    likeliest tokens. exact: share of answers with full agreement. low, high: interval of agreement; *_interval: of the
    named figure. bytes: share of the full cache's bytes after the prompt. kld: nats per token.
    """

    method: str
    budget: float | int
    contexts: int
    tokens: int
    agreement: float
    low: float
    high: float
    exact: float
    exact_interval: tuple[float, float]
    kld: float
    kld_interval: tuple[float, float] | None
    bytes: float
    kept_bytes: float

    @property
    def key(self) -> tuple[str, str]:
        return self.method, str(self.budget)


def measured(cell: Cell, rows: Rows, contexts: Iterable[Sequence[Sample]]) -> list[list[Mapping[str, Any]]]:
    """Returns the rows of a plan, context by context, without contexts that miss a row."""
    found = ([rows.get((one.id, *cell.key)) for one in context] for context in contexts)
    return [[row for row in of if row is not None] for of in found if of and None not in of]


def figures(
    cells: Sequence[Cell],
    rows: Rows,
    contexts: Sequence[Sequence[Sample]],
    usual: Mapping[str, float],
    level: float = SHARE,
) -> dict[tuple[str, str], Figures]:
    """Returns key -> figures of plans, except plans that were measured on fewer than two contexts.

    usual: the result of usual_effects.
    """
    sums = _all_sums(cells, rows, contexts)
    return {cell.key: _figures(cell, sums[cell.key], usual, level) for cell in cells if cell.key in sums}


def usual_effects(cells: Sequence[Cell], rows: Rows, contexts: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Returns the median design effect of plans, for tokens ("top1") and for answers ("exact")."""
    sums = _all_sums(cells, rows, contexts)
    out = {}
    for what, total in (("top1", "tokens"), ("exact", "answers")):
        effects = [design_effect(one[what], one[total]) for one in sums.values()]
        out[what] = float(np.median([effect for effect in effects if effect > 0] or [1.0]))
    return out


def _all_sums(
    cells: Sequence[Cell], rows: Rows, contexts: Sequence[Sequence[Sample]]
) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    found = {cell.key: measured(cell, rows, contexts) for cell in cells if cell.name != FULL}
    return {key: _sums(of) for key, of in found.items() if len(of) > 1}


def _figures(cell: Cell, sums: Mapping[str, np.ndarray], usual: Mapping[str, float], level: float) -> Figures:
    tokens, n = sums["tokens"], len(sums["tokens"])
    low, high = share_interval(sums["top1"], tokens, usual["top1"], level)
    divergence = paired_interval(sums["kld"], tokens, np.zeros(n))
    return Figures(
        cell.name, cell.budget, n, int(tokens.sum()), float(sums["top1"].sum() / tokens.sum()), low, high,
        float(sums["exact"].sum() / sums["answers"].sum()),
        share_interval(sums["exact"], sums["answers"], usual["exact"], level), float(sums["kld"].sum() / tokens.sum()),
        divergence, float(sums["kept_bytes"].sum() / sums["full_bytes"].sum()), float(sums["kept_bytes"].mean()),
    )  # fmt: skip


def _sums(contexts: list[list[Mapping[str, Any]]]) -> dict[str, np.ndarray]:
    """Returns sums per context, [n] each."""

    def each(of: Any) -> np.ndarray:
        return np.array([sum(of(row) for row in rows) for rows in contexts], dtype=np.float64)

    out = {name: each(lambda row, name=name: row[name])
           for name in ("top1", "tokens", "kld", "kept_bytes", "full_bytes")}  # fmt: skip
    return {**out, "exact": each(lambda row: row["top1"] == row["tokens"]), "answers": each(lambda row: 1)}


def share_interval(hits: np.ndarray, totals: np.ndarray, usual: float, level: float) -> tuple[float, float]:
    """Returns the interval of sum(hits) / sum(totals), both [contexts]. usual: the least design effect to use."""
    n, total = len(hits), float(totals.sum())
    share, worth = float(hits.sum()) / total, total / max(design_effect(hits, totals), usual, 1.0)
    z2 = student(max(n - 1, 1), level) ** 2
    middle = (share + z2 / (2 * worth)) / (1 + z2 / worth)
    half = math.sqrt(z2 * (share * (1 - share) / worth + z2 / (4 * worth**2))) / (1 + z2 / worth)
    return max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0)


def design_effect(hits: np.ndarray, totals: np.ndarray) -> float:
    """Returns the variance of a ratio over contexts, divided by that of independent tokens; 0 if it does not vary."""
    n, total, share = len(hits), totals.sum(), hits.sum() / totals.sum()
    if n < 2 or not 0 < share < 1:
        return 0.0
    return float(n / (n - 1) * ((hits - share * totals) ** 2).sum() / total**2 / (share * (1 - share) / total))


def telling(rows: Rows, contexts: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Returns how much the full cache's answers say.

    sure: the expected share of tokens that the model would repeat if it was sampled at temperature 1. alike: among
    contexts with equal questions, the share with the most frequent answers.
    """
    full, tokens, sure, answers = (FULL, "1.0"), 0, 0.0, dict[tuple[str, ...], list[tuple[str, ...]]]()
    for context in contexts:
        of = [rows.get((one.id, *full)) for one in context]
        if None in of:
            continue
        found = [row for row in of if row is not None]
        tokens, sure = tokens + sum(row["tokens"] for row in found), sure + sum(row["sure"] for row in found)
        asked = tuple(one.lines[-1].text for one in context)
        answers.setdefault(asked, []).append(tuple(row["answer"] for row in found))
    many = [said for said in answers.values() if len(said) >= LEAST]
    most = sum(Counter(said).most_common(1)[0][1] for said in many)
    return {"sure": sure / max(tokens, 1), "alike": most / max(sum(map(len, many)), 1)}
