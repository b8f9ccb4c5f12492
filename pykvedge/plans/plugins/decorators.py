"""A stage is registered by `@pykvedge.scorer("mine")` above a function on NumPy arrays, and `pykvedge.preset`."""

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
RECENT = 32  # SnapKV's window: the end of the prompt is the question, which an answer needs


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
    """Registers `function(layer, settings)` -> [Hkv, T] numbers, the larger the sooner kept, as scorer `name`.

    layer: a pykvedge.Layer; k and v [Hkv, T, d] float32 as the cache holds them, image_mask
    [T] bool, index of n_layers; q [H, n, d] are the last n queries of the prompt, with n = `queries`, or T if that
    is less; column_sums [Hkv, T] are there if `column_sums` is set. settings: values of `params` by name.
    queries, recent: a number, or a function of the settings. recent: last tokens that `--recent auto` protects, at most
    half of the budget. by_place: the scores of a head depend on its number or its layer's. summary: one line for lists;
    default: the first line of the docstring. Equal scores go to the lower token.
    Raises PluginError for a name that is taken or not allowed.
    """

    def register(function: F) -> F:
        what, origin = f"scorer '{name}'", _origin(function)
        seen, protects = _number(queries, "queries", what), _number(recent, "recent", what)
        member = Scorer(
            name,
            summary or _first_line(function),
            origin,
            calling.checked_scorer(name, function, seen, column_sums),
            params=_params(params, what),
            auto_recent=lambda kept, even, settings: min(kept // 2, protects(settings)),
            by_place=by_place,
        )
        table.add(table.Plugin(member, origin, seen, protects, column_sums))
        return function

    _called("scorer", name)
    return register


def allocator(
    name: str, *, params: Sequence[Param] = (), by_place: bool = False, summary: str = ""
) -> Callable[[F], F]:
    """Registers `function(prompt, settings)` -> [L, Hkv] whole numbers, KV pairs that each head keeps.

    prompt: a pykvedge.Prompt; scores [L, Hkv, T], image_mask [T] bool, budget (pairs per head on
    average), recent. Every head keeps from 1 to T, all together L * Hkv * budget. by_place, summary and errors: as for
    `scorer`.
    """

    return _registering(Allocator, calling.checked_allocator, name, params, by_place, summary)


def reducer(name: str, *, params: Sequence[Param] = (), by_place: bool = False, summary: str = "") -> Callable[[F], F]:
    """Registers `function(head, settings)` -> rows k, v to store, each [n, d], in the order of head.kept.

    head: a pykvedge.Head; k and v [T, d] float32, kept [n] token indices, protected [T] bool.
    It is called for heads that lose rows. by_place, summary and errors: as for `scorer`.
    """

    return _registering(Reducer, calling.checked_reducer, name, params, by_place, summary)


def pruner(name: str, *, params: Sequence[Param] = (), summary: str = "") -> Callable[[F], F]:
    """Registers `function(image, n, settings)` -> 1 to n row numbers, ascending, that the model reads of an image.

    image: a pykvedge.ImageRows; rows [N, D] float32 as the encoder made them, place (down,
    across) of their grid, or None. `--pruner name --image-tokens 0.5` calls it for every image, and every tile of
    one. It may return the rows to read as well: numbers [m], rows [m, D]. summary and errors: as for `scorer`.
    """

    def register(function: F) -> F:
        origin, given = _origin(function), _params(params, f"pruner '{name}'")
        checked = calling.checked_pruner(name, function)
        member = Pruner(name, summary or _first_line(function), origin, lambda *image: checked(*image)[0], params=given)
        table.add(table.Plugin(member, origin, pruned=checked))
        return function

    _called("pruner", name)
    return register


def preset(name: str, *, summary: str = "", reference: str = "", **values: Any) -> None:
    """Registers a method: `--method name` is this composition.

    values: fields of pykvedge.Plan (`scorer="mine"`, `text_prior=True`, `budget=0.1`), and settings of stage members by
    their full names (`**{"scorer.window": 16}`). Whether they fit together is found out when the method is used.
    Raises PluginError for a name that is taken or not allowed.
    """
    origin = Path(sys._getframe(1).f_code.co_filename).name
    fields = {key: value for key, value in values.items() if "." not in key}
    params = {**fields.pop("params", {}), **{key: value for key, value in values.items() if "." in key}}
    table.add_preset(
        Preset(name, summary or f"defined in {origin}", reference or origin, {**fields, "params": params}), origin
    )


def _registering(
    kind: type[Allocator | Reducer], check: Callable[..., Any], name: str, params: Any, by_place: bool, summary: str
) -> Callable[[F], F]:
    """Makes what decorates the function of an allocator or a reducer. check: makes it the checked one (calling.py)."""

    def register(function: F) -> F:
        origin, given = _origin(function), _params(params, f"{kind.stage} '{name}'")
        about = name, summary or _first_line(function), origin
        table.add(table.Plugin(kind(*about, check(name, function), params=given, by_place=by_place), origin))
        return function

    _called(kind.stage, name)
    return register


def _called(stage: str, name: Any) -> None:
    if callable(name):
        raise PluginError(f'write @pykvedge.{stage}("name"), with the name to register')


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
