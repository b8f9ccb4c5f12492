"""Registers stages and presets: `@pykvedge.scorer("mine")` above a function on NumPy arrays, `pykvedge.preset`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pykvedge.errors import PluginError
from pykvedge.plans.plugins import calling, table
from pykvedge.plans.plugins.table import Preset
from pykvedge.reference.stages.base import Allocator, Param, Pruner, Reducer, Scorer, Settings

F = TypeVar("F", bound=Callable[..., Any])
About = tuple[str, str, str]  # name, summary, file that registers it
RECENT = 32  # SnapKV's window: the end of the prompt holds the question, which the answer needs


def scorer(
    name: str,
    *,
    params: Sequence[Param] = (),
    queries: int | Callable[[Settings], int] = 0,
    column_sums: bool = False,
    recent: int | Callable[[Settings], int] = RECENT,
    by_place: bool = False,
    summary: str = "",
) -> Callable[[F], F]:
    """Registers `function(layer, settings)` -> [Hkv, T] numbers as scorer `name`; the largest are kept.

    layer: a pykvedge.Layer; k and v [Hkv, T, d] float32 as the cache holds them, image_mask [T] bool, index of
    n_layers; q [H, n, d] are the last n queries of the prompt, with n = min(`queries`, T); column_sums [Hkv, T] if
    `column_sums` is set. settings: values of `params` by name.
    queries, recent: a number, or a function of the settings. recent: last tokens that `--recent auto` protects, at most
    half of the budget. by_place: the scores of a head depend on the number of the head or layer. summary: one line for
    lists; by default the first line of the docstring. Equal scores go to the lower token.
    Raises PluginError for a name that is taken or invalid.
    """

    def made(function: Any, about: About, given: tuple[Param, ...]) -> table.Plugin:
        seen, protects = (_number(n, key, f"scorer '{name}'") for n, key in ((queries, "queries"), (recent, "recent")))
        score = calling.checked_scorer(name, function, seen, column_sums)
        member = Scorer(*about, score, params=given, by_place=by_place,
                        auto_recent=lambda kept, even, settings: min(kept // 2, protects(settings)))  # fmt: skip
        return table.Plugin(member, about[2], seen, protects, column_sums)

    return _registering("scorer", name, params, summary, made)


def allocator(
    name: str, *, params: Sequence[Param] = (), by_place: bool = False, summary: str = ""
) -> Callable[[F], F]:
    """Registers `function(prompt, settings)` -> [L, Hkv] whole numbers: the KV pairs that each head keeps.

    prompt: a pykvedge.Prompt; scores [L, Hkv, T], image_mask [T] bool, budget (pairs per head on average), recent.
    Every head keeps from 1 to T pairs; the sum is L * Hkv * budget. by_place, summary and errors: see `scorer`.
    """

    def made(function: Any, about: About, given: tuple[Param, ...]) -> table.Plugin:
        allocate = calling.checked_allocator(name, function)
        return table.Plugin(Allocator(*about, allocate, params=given, by_place=by_place), about[2])

    return _registering("allocator", name, params, summary, made)


def reducer(name: str, *, params: Sequence[Param] = (), by_place: bool = False, summary: str = "") -> Callable[[F], F]:
    """Registers `function(head, settings)` -> rows k, v to store, each [n, d], in the order of head.kept.

    head: a pykvedge.Head; k and v [T, d] float32, kept [n] token indices, protected [T] bool. The function is called
    for heads that lose rows. by_place, summary and errors: see `scorer`.
    """

    def made(function: Any, about: About, given: tuple[Param, ...]) -> table.Plugin:
        reduce = calling.checked_reducer(name, function)
        return table.Plugin(Reducer(*about, reduce, params=given, by_place=by_place), about[2])

    return _registering("reducer", name, params, summary, made)


def pruner(name: str, *, params: Sequence[Param] = (), summary: str = "") -> Callable[[F], F]:
    """Registers `function(image, n, settings)` -> 1 to n row numbers of an image, ascending, that the model reads.

    image: a pykvedge.ImageRows; rows [N, D] float32 as the encoder made them, place (down, across) of their grid, or
    None. `--pruner name --image-tokens 0.5` calls the function for every image and every tile of an image. The function
    may also return new rows to read: numbers [m], rows [m, D]. summary and errors: see `scorer`.
    """

    def made(function: Any, about: About, given: tuple[Param, ...]) -> table.Plugin:
        checked = calling.checked_pruner(name, function)
        member = Pruner(*about, lambda *image: checked(*image)[0], params=given)
        return table.Plugin(member, about[2], pruned=checked)

    return _registering("pruner", name, params, summary, made)


def preset(name: str, *, summary: str = "", reference: str = "", **values: Any) -> None:
    """Registers a method: `--method name` uses this composition.

    values: fields of pykvedge.Plan (`scorer="mine"`, `text_prior=True`, `budget=0.1`), and settings of stage members by
    their full names (`**{"scorer.window": 16}`). They are checked when the method is used. Raises PluginError for a
    name that is taken or invalid.
    """
    origin = Path(sys._getframe(1).f_code.co_filename).name
    fields = {key: value for key, value in values.items() if "." not in key}
    params = {**fields.pop("params", {}), **{key: value for key, value in values.items() if "." in key}}
    table.add_preset(
        Preset(name, summary or f"defined in {origin}", reference or origin, {**fields, "params": params}), origin
    )


def _registering(
    stage: str, name: str, params: Any, summary: str, made: Callable[[Any, About, tuple[Param, ...]], table.Plugin]
) -> Callable[[F], F]:
    """Returns the decorator of a stage's function. made: makes the plugin from the function."""
    if callable(name):
        raise PluginError(f'the decorator needs a name; write @pykvedge.{stage}("name")')

    def register(function: F) -> F:
        about = name, summary or _first_line(function), _origin(function)
        table.add(made(function, about, _params(params, f"{stage} '{name}'")))
        return function

    return register


def _origin(function: Any) -> str:
    import inspect

    code = getattr(inspect.unwrap(function), "__code__", None)
    return Path(code.co_filename).name if code else getattr(function, "__module__", "a plugin")


def _first_line(function: Any) -> str:
    import inspect

    lines = (inspect.getdoc(function) or "").splitlines()
    return lines[0].rstrip(".") if lines else "no description"


def _number(value: Any, key: str, what: str) -> Callable[[Settings], int]:
    def checked(settings: Settings) -> int:
        number = calling.guarded(f"{key} of {what}", value, settings) if callable(value) else value
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 2**20:
            raise PluginError(f"{key} of {what} must be a whole number from 0 to {2**20}, not {number!r}")
        return number

    if not callable(value):
        checked({})
    return checked


def _params(params: Any, what: str) -> tuple[Param, ...]:
    if not isinstance(params, (list, tuple)) or not all(isinstance(p, Param) for p in params):
        raise PluginError(f"params of {what} must be a list of pykvedge.Param")
    return tuple(params)
