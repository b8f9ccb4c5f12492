"""Turns records into figures per task and over all tasks, on the samples that the full cache has records of.

Perplexity and KL divergence are pooled over tokens; scores are averaged over samples. Intervals are 95 %: Agresti and
Min's rule for pairs for scores, a paired bootstrap over samples for other figures. Few samples have no intervals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.metrics import LEAST, paired_interval, pooled, score_interval
from kvedge_lab.eval.runner import FULL
from kvedge_lab.eval.tasks import Sample
from pykvedge.cli.tables import folded, wrapped

ALL = "all"
Rows = list[dict[str, Any]]
PER_TASK = "Score by task: percent of right answers, or ROUGE-L or CIDEr times 100."
OVER_ALL = "Over all samples, with 95 % intervals of the difference to {base} on the same samples."

TOO_FEW = f"Fewer than {LEAST} samples: no intervals, and the figures are unreliable."


@dataclass
class ResultRow:
    """The figures of one method and budget on one task ("all": on all tasks). None: not measured.

    score, rouge (to the reference), rouge_full (to the full cache's answer): means, 0..1. ppl, kld (nats), top1 (share
    of tokens): over all tokens of the reference answers. kld_pN: the divergence that N of 100 tokens do not exceed.
    *_change: the interval of the difference to the base: the full cache, or another method at the same budget.
    contexts: if several questions share a context, scores are first averaged per context, and intervals are over
    contexts. kept: KV pairs per head as a share of the conversation's tokens.
    """

    method: str
    budget: float | int
    task: str
    samples: int
    contexts: int = 0
    kept: float | None = None
    score: float | None = None
    score_change: tuple[float, float] | None = None
    rouge: float | None = None
    rouge_full: float | None = None
    ppl: float | None = None
    ppl_change: tuple[float, float] | None = None
    kld: float | None = None
    kld_change: tuple[float, float] | None = None
    kld_p50: float | None = None
    kld_p90: float | None = None
    kld_p95: float | None = None
    kld_p99: float | None = None
    kld_max: float | None = None
    top1: float | None = None
    kv_bytes: float | None = None


def lines(
    records: dict[Any, dict[str, Any]], samples: list[Sample], cells: Iterable[Cell], against: str = FULL
) -> list[ResultRow]:
    """Returns, per cell, a line for each task, each group of tasks, and all tasks, on samples of the full cache.

    against: the method that changes are measured against, at the same budget. There are no changes for samples without
    its records and for cells with another budget.
    """
    names = {sample.id for sample in samples}
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in records.values():
        if row["id"] in names:
            rows.setdefault((row["method"], str(row["budget"])), {})[row["id"]] = row
    full = next((found for (name, _), found in rows.items() if name == FULL), {})
    out = []
    for cell in cells:
        here = rows.get(cell.key, {})
        base = {} if cell.name in (FULL, against) else full if against == FULL else rows.get((against, cell.key[1]), {})
        shared = [sample for sample in samples if sample.id in here and sample.id in full]
        for task, chosen in _tasks(shared):
            mine = _by_context(chosen, here)
            line = _line(cell, task, mine)
            line.samples, line.contexts = len(chosen), len(mine)
            if all(s.id in base for s in chosen):
                _changes(line, mine, _by_context(chosen, base))
            out.append(line)
        out += _groups(cell, shared, out)
    return out


_PERCENTILES = (50, 90, 95, 99)
_SUMS = ("nll", "kld", "top1", "tokens")


def _by_context(samples: list[Sample], rows: dict[str, dict[str, Any]]) -> Rows:
    """Returns one row per context. Questions about a context are not independent: means, and sums over tokens."""
    found: dict[str, Rows] = {}
    for sample in samples:
        found.setdefault(sample.context or sample.id, []).append(rows[sample.id])
    return [of[0] if len(of) == 1 else _merged(of) for of in found.values()]


def _merged(rows: Rows) -> dict[str, Any]:
    out = {}
    for name in ("score", "rouge", "rouge_full", "kept", "kept_bytes", "prompt_tokens", *_SUMS):
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            out[name] = sum(values) / (1 if name in _SUMS else len(values))
    if all("klds" in row for row in rows):
        out["klds"] = [one for row in rows for one in row["klds"]]
    return out


def _tasks(samples: list[Sample]) -> list[tuple[str, list[Sample]]]:
    tasks: dict[str, list[Sample]] = {}
    for sample in samples:
        tasks.setdefault(sample.task, []).append(sample)
    return [*tasks.items(), (ALL, samples)] if samples else []


def _groups(cell: Cell, samples: list[Sample], made: list[ResultRow]) -> list[ResultRow]:
    """Returns lines of groups. A group's score is the mean of its tasks' scores, as in MileBench's columns."""
    tasks: dict[str, dict[str, int]] = {}
    for sample in samples:
        for group in sample.groups:
            of = tasks.setdefault(group, {})
            of[sample.task] = of.get(sample.task, 0) + 1
    scores = {line.task: line.score for line in made if (line.method, line.budget) == (cell.name, cell.budget)}
    out = []
    for group, of in sorted(tasks.items()):
        found = [s for s in (scores.get(task) for task in of) if s is not None]
        mean = float(np.mean(found)) if found else None
        out.append(ResultRow(cell.name, cell.budget, group, sum(of.values()), score=mean))
    return out


def _column(rows: Rows, name: str) -> np.ndarray | None:
    values = [row.get(name) for row in rows]
    return None if any(value is None for value in values) else np.array(values, dtype=np.float64)


def _line(cell: Cell, task: str, rows: Rows) -> ResultRow:
    line = ResultRow(cell.name, cell.budget, task, len(rows))
    tokens = np.array([row["prompt_tokens"] for row in rows], dtype=np.float64)
    kept, size = _column(rows, "kept"), _column(rows, "kept_bytes")
    line.kept = None if kept is None else float(np.mean(kept / tokens))
    line.kv_bytes = None if size is None else float(size.mean())
    for name in ("score", "rouge", "rouge_full"):
        values = _column(rows, name)
        setattr(line, name, None if values is None else float(values.mean()))
    nll, weights = _column(rows, "nll"), _column(rows, "tokens")
    if nll is not None and weights is not None:
        line.ppl = pooled(nll, weights, np.exp)
        for name in ("kld", "top1"):
            values = _column(rows, name)
            setattr(line, name, None if values is None else pooled(values, weights))
    if all("klds" in row for row in rows) and (each := [one for row in rows for one in row["klds"]]):
        for percent, value in zip(_PERCENTILES, np.percentile(each, _PERCENTILES), strict=True):
            setattr(line, f"kld_p{percent}", float(value))
        line.kld_max = max(each)
    return line


def _changes(line: ResultRow, rows: Rows, base: Rows) -> None:
    """Sets a line's intervals. rows and base belong to the same samples. Full has no divergence from itself."""
    weights = _column(rows, "tokens")
    mine, theirs = _column(rows, "score"), _column(base, "score")
    if mine is not None and theirs is not None:
        if max(mine.max(), theirs.max()) > 1:  # CIDEr is no share
            line.score_change = paired_interval(mine, np.ones(len(mine)), theirs)
        else:
            line.score_change = score_interval(mine, theirs)
    mine, theirs = _column(rows, "nll"), _column(base, "nll")
    if mine is None or theirs is None or weights is None:
        return
    line.ppl_change = paired_interval(mine, weights, theirs, np.exp)
    mine, theirs = _column(rows, "kld"), _column(base, "kld")
    if mine is not None:
        line.kld_change = paired_interval(mine, weights, np.zeros(len(rows)) if theirs is None else theirs)


def as_json(made: list[ResultRow], about: dict[str, Any]) -> str:
    """Returns one object: `about`, and the lines."""
    return json.dumps({**about, "rows": [asdict(line) for line in made]}, indent=1)


def as_markdown(made: list[ResultRow], notes: Iterable[str] = (), against: str = FULL) -> str:
    """Returns a table of scores by task, a table of figures over all tasks, and notes. against: see lines()."""
    tasks = [task for task in dict.fromkeys(line.task for line in made) if task != ALL]
    by_cell: dict[tuple[str, Any], dict[str, ResultRow]] = {}
    for line in made:
        by_cell.setdefault((line.method, line.budget), {})[line.task] = line
    parts = []
    if any(line.score is not None for line in made) and len(tasks) > 1:
        rows = [["method", "budget", *tasks]]
        for (method, budget), of in by_cell.items():
            rows.append([method, f"{budget:g}", *(_percent(of.get(task)) for task in tasks)])
        parts += [PER_TASK, folded(rows, keys=2)]
    columns = _columns("" if against == FULL else "+")
    rows = [[*columns], *([cell(of[ALL]) for cell in columns.values()] for of in by_cell.values() if ALL in of)]
    base = "the full cache" if against == FULL else f"{against} at the same budget"
    parts += [wrapped(OVER_ALL.format(base=base)), folded(rows, keys=2)]
    if any(of[ALL].contexts < LEAST for of in by_cell.values() if ALL in of):
        parts.append(TOO_FEW)
    return "\n\n".join([*parts, *notes])


def _columns(sign: str) -> dict[str, Callable[[ResultRow], str]]:
    """Returns heading -> text of a cell. sign: of the divergence's interval, "+" if it is a difference."""
    return {
        "method": lambda x: x.method,
        "budget": lambda x: f"{x.budget:g}",
        "samples": lambda x: str(x.samples),
        "kept": lambda x: _share(x.kept),
        "score": lambda x: _share(x.score),
        "score change": lambda x: _span(x.score_change, 100, 1),
        "ROUGE-L to full": lambda x: _share(x.rouge_full),
        "PPL": lambda x: _figure(x.ppl),
        "PPL change": lambda x: _span(x.ppl_change, 1, 3),
        "KL to full": lambda x: _small(x.kld),
        "KL interval": lambda x: " to ".join(f"{v:{sign}.2g}" for v in x.kld_change or ()),
        "KL median": lambda x: _small(x.kld_p50),
        "KL 99 %": lambda x: _small(x.kld_p99),
        "same top token": lambda x: _share(x.top1),
    }


def _percent(line: ResultRow | None) -> str:
    return "" if line is None or line.score is None else f"{100 * line.score:.1f}".removesuffix(".0")


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if value >= 1000 else f"{value:.3f}"


def _small(value: float | None) -> str:
    """Returns a divergence as text with three significant digits; it may be a millionth."""
    return "" if value is None else f"{value:.3g}"


def _span(values: tuple[float, float] | None, scale: float, digits: int) -> str:
    if values is None:
        return ""
    low, high = (scale * v for v in values)
    largest = max(abs(low), abs(high))
    form = "+.2g" if largest >= 1e5 else f"+.{0 if largest >= 1000 else digits}f"
    return f"{low:{form}} to {high:{form}}"
