"""Recipes measure what a table of a paper has: its data, methods, budgets and figures, beside the paper's own.

The figures come from the papers' tables (papers.json). Models are the user's: a quantised one is not the paper's,
and what must agree is what a method loses, not what a model scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvedge_lab.eval.table import ALL, Line
from pykvedge.cli.tables import folded
from pykvedge.errors import unknown

_FILE = Path(__file__).with_name("papers.json")
_MIXKV = ("snapkv", "mixkv", "pyramidkv", "mixkv-pyramid", "adakv", "mixkv-ada", "sparsemm", "mixkv-sparsemm")
_PREFIX = tuple(f"0.{i}" for i in range(1, 10))
_PLAIN = {"text_prior": False}
_COLUMNS = {"score": "score", "cider": "CIDEr", "ppl": "PPL", "rouge": "ROUGE-L to full"}


@dataclass(frozen=True)
class Recipe:
    """table: of which paper. form: of the data. methods: names, or (name, method, settings of its plan)."""

    table: str
    form: str
    budgets: Sequence[str]
    methods: Sequence[str | tuple[str, str, Mapping[str, Any]]]
    metrics: str = "score"
    note: str = ""
    max_tokens: int = 512

    def named(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Returns all methods as (name, method, settings)."""
        return [(one, one, {}) if isinstance(one, str) else one for one in self.methods]


_LOOKM = (
    "h2o", "snapkv", "roco",
    ("averaged", "lookm", {**_PLAIN, "reducer": "averaged"}), ("weighted", "lookm", {**_PLAIN, "reducer": "weighted"}),
    ("pivotal", "lookm", _PLAIN), ("lookm-averaged", "lookm", {"reducer": "averaged"}),
    ("lookm-weighted", "lookm", {"reducer": "weighted"}), "lookm",
)  # fmt: skip
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
    "mixkv-docvqa": Recipe("MixKV, table 1", "docvqa", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 64),
    "mixkv-textvqa": Recipe("MixKV, table 1", "textvqa", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 64),
    "mixkv-chartqa": Recipe("MixKV, table 1", "chartqa", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 64),
    "mixkv-ocrbench": Recipe("MixKV, table 1", "ocrbench", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 128),
    "mixkv-textcaps": Recipe("MixKV, table 1", "textcaps", ("256", "128", "64"), _MIXKV, "score", _NEEDS_HEADS, 64),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure of a paper. columns: what it measured -> the value, as the paper writes it."""

    model: str
    method: str
    budget: float | int
    columns: Mapping[str, float] = field(default_factory=dict)


def recipe(name: str) -> Recipe:
    """Finds a recipe. Raises UnknownNameError."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


@cache
def figures(name: str) -> tuple[Figure, ...]:
    """Returns what the paper says; nothing where it has no table."""
    return tuple(Figure(*row) for row in json.loads(_FILE.read_text(encoding="utf-8")).get(name, ()))


def mine(made: Sequence[Line], method: str, budget: float | int, column: str) -> float | None:
    """Finds the figure of a run that belongs in the place of a paper's: in percent, or PPL, ROUGE-L in 0..1, CIDEr."""
    task = ALL if column in _COLUMNS else column
    for line in made:
        if (line.method, line.budget, line.task) == (method, budget, task):
            value = {"ppl": line.ppl, "rouge": line.rouge_full}.get(column, line.score)
            return value if value is None or column in ("ppl", "rouge", "cider") else 100 * value
    return None


def beside(name: str, made: Sequence[Line]) -> str:
    """Writes a table for each model of the paper: this run's figure, and the paper's behind a stroke."""
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


def as_rows(name: str, made: Sequence[Line]) -> list[dict[str, Any]]:
    """Returns the same for JSON: one object a figure."""
    return [
        {"model": f.model, "method": f.method, "budget": f.budget, "figure": column, "paper": value,
         "this_run": mine(made, f.method, f.budget, column)}
        for f in figures(name) for column, value in f.columns.items()
    ]  # fmt: skip
