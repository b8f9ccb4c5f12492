"""Recipes measure the content of a paper's table: its data, methods, budgets and figures, beside the paper's figures.

The figures come from the papers' tables (papers.json). Models are the user's, and a quantised model is not the paper's:
what must agree is the loss of a method, not the score of a model.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvedge_lab.eval.table import ALL, ResultRow
from pykvedge.cli.tables import folded
from pykvedge.errors import unknown

_FILE = Path(__file__).with_name("papers.json")
_MIXKV = ("snapkv", "mixkv", "pyramidkv", "mixkv-pyramid", "adakv", "mixkv-ada", "sparsemm", "mixkv-sparsemm")
_PREFIX = tuple(f"0.{i}" for i in range(1, 10))
_PLAIN = {"text_prior": False}
_LATEX = re.compile(r"[&%$#_{}]")
_COLUMNS = {"score": "score", "cider": "CIDEr", "ppl": "PPL", "rouge": "ROUGE-L to full"}


@dataclass(frozen=True)
class Recipe:
    """table: the paper and its table. form: of the data. methods: names, or (name, method, settings of its plan)."""

    table: str
    form: str
    budgets: Sequence[str]
    methods: Sequence[str | tuple[str, str, Mapping[str, Any]]]
    metrics: str = "score"
    note: str = ""
    max_tokens: int = 512
    rows_of: str = ""  # the recipe with the figures, if others than the method's authors made the table

    def named(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Returns all methods as (name, method, settings)."""
        return [(one, one, {}) if isinstance(one, str) else one for one in self.methods]


_LOOKM = (
    "h2o", "snapkv", "roco",
    ("averaged", "lookm", {**_PLAIN, "reducer": "averaged"}), ("weighted", "lookm", {**_PLAIN, "reducer": "weighted"}),
    ("pivotal", "lookm", _PLAIN), ("lookm-averaged", "lookm", {"reducer": "averaged"}),
    ("lookm-weighted", "lookm", {"reducer": "weighted"}), "lookm",
)  # fmt: skip
_OTHERS = "the figures are those that MixKV's authors measured"
_NONE = "no figures: the paper has no table for this data"
_NEEDS_HEADS = "sparsemm and mixkv-sparsemm need a profile of the model: kvedge calibrate heads"
_BOTH = "the paper's ROUGE without compression is not 1: its reference is another text; compare the order of methods"

RECIPES: dict[str, Recipe] = {
    "lookm-milebench": Recipe("LOOK-M, table 1", "milebench", ("0.2",), _LOOKM),
    "flashcache-milebench": Recipe(
        "FlashCache, table 1 (its two columns of one data set each)", "milebench", ("0.2",),
        ("streaming-llm", "h2o", "snapkv", "lookm", "meda", "flashcache"),
    ),
    "prefixkv-llava-description": Recipe(
        "PrefixKV, table 1", "llava-description", _PREFIX, ("streaming-llm", "h2o", "pyramidkv", "elastic", "prefixkv"),
        "ppl,rouge", _BOTH,
    ),
    "prefixkv-mm-vet": Recipe(
        "PrefixKV, table 2", "mm-vet", _PREFIX, ("streaming-llm", "h2o", "pyramidkv", "elastic", "prefixkv"),
        "ppl,rouge", _BOTH,
    ),
    "elastic-llava-description": Recipe(
        "Elastic Cache, figure 2", "llava-description", _PREFIX, ("streaming-llm", "h2o", "elastic"), "ppl,rouge",
        "the paper shows curves; in words: at 0.5 elastic is 4.34 in PPL and 0.089 in ROUGE-L better than h2o (13B)",
    ),
    **{
        f"{method}-{form}": Recipe("MixKV, table 1", form, ("256", "128", "64"), (method,), "score", _OTHERS, 64,
                                   f"mixkv-{form}")
        for method in ("snapkv", "pyramidkv", "adakv") for form in ("docvqa", "chartqa")
    },
    "kvzip-docvqa": Recipe("KVzip", "docvqa", ("0.7", "0.5", "0.3", "0.1"), ("kvzip",), "score", _NONE, 64),
    "mm-niah": Recipe("MM-NIAH", "mm-niah", ("0.5", "0.2", "0.1"), ("snapkv", "pyramidkv", "adakv", "kvzip"), "score",
                      _NONE, 32),
    "mixkv-docvqa": Recipe("MixKV, table 1", "docvqa", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 64),
    "mixkv-textvqa": Recipe("MixKV, table 1", "textvqa", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 64),
    "mixkv-chartqa": Recipe("MixKV, table 1", "chartqa", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 64),
    "mixkv-ocrbench": Recipe("MixKV, table 1", "ocrbench", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 128),
    "mixkv-textcaps": Recipe("MixKV, table 1", "textcaps", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 64),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure of a paper. columns: name of the measure -> value as in the paper."""

    model: str
    method: str
    budget: float | int
    columns: Mapping[str, float] = field(default_factory=dict)


def recipe(name: str) -> Recipe:
    """Returns a recipe. Raises UnknownNameError."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


@cache
def figures(name: str) -> tuple[Figure, ...]:
    """Returns the paper's figures; () if the paper has no table."""
    chosen = recipe(name)
    made = {method[0] for method in chosen.named()} | {"full"}
    rows = json.loads(_FILE.read_text(encoding="utf-8")).get(chosen.rows_of or name, ())
    return tuple(Figure(*row) for row in rows if row[1] in made or not chosen.rows_of)


def mine(made: Sequence[ResultRow], method: str, budget: float | int, column: str) -> float | None:
    """Returns the figure of a run for a paper's figure: in percent, or PPL, ROUGE-L in 0..1, CIDEr; or None."""
    task = ALL if column in _COLUMNS else column
    for line in made:
        if (line.method, line.budget, line.task) == (method, budget, task):
            value = {"ppl": line.ppl, "rouge": line.rouge_full}.get(column, line.score)
            return value if value is None or column in ("ppl", "rouge", "cider") else 100 * value
    return None


def beside(name: str, made: Sequence[ResultRow]) -> str:
    """Returns a table per model of the paper: this run's figure, a stroke, the paper's figure."""
    chosen, parts = recipe(name), []
    for model in dict.fromkeys(figure.model for figure in figures(name)):
        of = [figure for figure in figures(name) if figure.model == model]
        columns = list(dict.fromkeys(column for figure in of for column in figure.columns))
        rows = [["method", "budget", *(_COLUMNS.get(column, column) for column in columns)]]
        for figure in of:
            cells = [_both(mine(made, figure.method, figure.budget, c), figure.columns.get(c)) for c in columns]
            rows.append([figure.method, f"{figure.budget:g}", *cells])
        parts += [f"This run / {model} in {chosen.table}.", folded(rows, keys=2)]
    return "\n\n".join([*parts, *([f"{chosen.table}: {chosen.note}."] if chosen.note else [])])


def _both(ours: float | None, theirs: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:.4g}" for value in (ours, theirs))


def as_csv(name: str, made: Sequence[ResultRow]) -> str:
    """Returns one line per figure of the paper, with this run's figure."""
    out = io.StringIO()
    rows = as_rows(name, made)
    writer = csv.DictWriter(out, rows[0] if rows else ["model"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_latex(name: str, made: Sequence[ResultRow]) -> str:
    """Returns one tabular for all models of the paper: this run's figure, a stroke, the paper's figure."""
    rows = as_rows(name, made)
    columns = list(dict.fromkeys(row["figure"] for row in rows))
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        key = (row["model"], row["method"], f"{row['budget']:g}")
        cells.setdefault(key, {})[row["figure"]] = _both(row["this_run"], row["paper"])
    head = ["model", "method", "budget", *(_COLUMNS.get(column, column) for column in columns)]
    lines = [head, *([*key, *(found.get(column, "-") for column in columns)] for key, found in cells.items())]
    body = [" & ".join(_LATEX.sub(r"\\\g<0>", cell) for cell in line) + r" \\" for line in lines]
    form = "lll" + "r" * len(columns)
    return "\n".join([
        f"% this run / the paper's: {recipe(name).table}", rf"\begin{{tabular}}{{{form}}}",
        r"\hline", body[0], r"\hline", *body[1:], r"\hline", r"\end{tabular}", "",
    ])  # fmt: skip


def as_rows(name: str, made: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Returns one object per figure of the paper, with this run's figure."""
    return [
        {"model": f.model, "method": f.method, "budget": f.budget, "figure": column, "paper": value,
         "this_run": mine(made, f.method, f.budget, column)}
        for f in figures(name) for column, value in f.columns.items()
    ]  # fmt: skip
