"""Calls plugin functions: turns their errors into one line, and checks what they return."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykvedge.errors import PluginError
from pykvedge.system.signals import lifted

if TYPE_CHECKING:
    import numpy as np

    from pykvedge.reference.stages.base import Head, ImageRows, Layer, Prompt, Settings


def guarded(what: str, function: Callable[..., Any], *arguments: Any, file: str | None = "") -> Any:
    """Calls function(*arguments). Raises PluginError for any exception, also SystemExit; prints go to stderr.

    file: the file of the plugin's code, by default the file of the function; None: any file.
    """
    import numpy as np

    try:
        with lifted(), redirect_stdout(sys.stderr), np.errstate(all="ignore"):
            return function(*arguments)
    except KeyboardInterrupt:
        raise
    except PluginError as error:
        if not file:
            raise
        raise PluginError(f"{error}{_line(error, file)}") from error
    except BaseException as error:
        where = getattr(getattr(function, "__code__", None), "co_filename", "") if file == "" else file
        if isinstance(error, SyntaxError) and error.filename and error.filename == where:
            text, at = error.msg, f" ({Path(error.filename).name}:{error.lineno})"
        else:
            text, at = _text(error), _line(error, where) or place(function)
        text = f": {text}" if text else ""
        raise PluginError(f"{what} failed: {type(error).__name__}{text}{at}") from error


def _text(error: BaseException) -> str:
    """Returns the text of a plugin's exception, or "" if the exception fails to give one."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def _line(error: BaseException, file: str | None) -> str:
    """Returns " (file:line)" of the last line in `file` (None: any file) that the error passed, or ""."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if file is None or frame.filename == file]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def place(function: Any) -> str:
    """Returns " (file:line)" of a function's definition, or "" if the function is not written in Python."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def view(layer: Layer, n_queries: int, column_sums: bool) -> Layer:
    """Returns the layer as a plugin sees it in a running model: the queries and column sums that it asks for."""
    import numpy as np

    sums = layer.column_sums if column_sums else None
    if column_sums and sums is None:
        from pykvedge.reference.stages.scorer.cumulative import score

        sums = score(layer, {"share": "head"})
    if sums is not None:
        sums = sums.astype(np.float32)
    n_queries = min(n_queries, layer.q.shape[1])
    return replace(layer, q=layer.q[:, layer.q.shape[1] - n_queries :], column_sums=sums)


def checked_scorer(
    name: str, function: Any, queries: Callable[[Settings], int], column_sums: bool
) -> Callable[[Layer, Settings], np.ndarray]:
    """Returns the checked scorer: [Hkv, T] float64 that float32 can represent. It raises PluginError."""
    what = f"scorer '{name}'"

    def score(layer: Layer, settings: Settings) -> np.ndarray:
        import numpy as np

        seen = view(layer, queries(settings), column_sums)
        out = _numbers(what, function, guarded(what, function, seen, settings), layer.k.shape[:2], "KV heads, tokens")
        with np.errstate(over="ignore"):
            out = out.astype(np.float32).astype(np.float64)
        if np.isnan(out).any():
            head, token = np.argwhere(np.isnan(out))[0]
            raise PluginError(
                f"{what} gave NaN for layer {layer.index}, KV head {head}, token {token}{place(function)}"
            )
        return out

    return score


def checked_allocator(name: str, function: Any) -> Callable[[Prompt, Settings], np.ndarray]:
    """Returns the checked allocator: [L, Hkv] int64 that meet the budget. It raises PluginError."""
    what = f"allocator '{name}'"

    def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
        import numpy as np

        n_layers, n_heads, n_tokens = prompt.scores.shape
        seen = replace(prompt, scores=prompt.scores.astype(np.float32).astype(np.float64), layers=())
        returned = guarded(what, function, seen, settings)
        out = _numbers(what, function, returned, (n_layers, n_heads), "layers, KV heads")
        if out.dtype.kind not in "iu":
            raise PluginError(f"{what} must return whole numbers (an integer dtype), not {out.dtype}{place(function)}")
        total = n_layers * n_heads * prompt.budget
        if out.min() < 1 or out.max() > n_tokens:
            wrong = int(out.min()) if out.min() < 1 else int(out.max())
            raise PluginError(
                f"{what} gives a KV head a budget of {wrong} KV pairs; a KV head of {n_tokens} tokens needs a budget "
                f"of 1 to {n_tokens}{place(function)}"
            )
        if int(out.sum()) != total:
            raise PluginError(
                f"{what} gives {int(out.sum())} KV pairs in total, but the total must be {total}: {prompt.budget} "
                f"for each of {n_layers} x {n_heads} KV heads{place(function)}"
            )
        return out.astype(np.int64)

    return allocate


def checked_reducer(name: str, function: Any) -> Callable[[Head, Settings], tuple[np.ndarray, np.ndarray]]:
    """Returns the checked reducer: finite rows [n, d] float64. It raises PluginError."""
    what = f"reducer '{name}'"

    def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        pair = guarded(what, function, head, settings)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise PluginError(f"{what} must return two arrays, keys and values, not {_kind(pair)}{place(function)}")
        rows = []
        for given, whole, of in zip(pair, (head.k, head.v), ("keys", "values"), strict=True):
            shape = (len(head.kept), whole.shape[1])
            out = _numbers(f"{what}, {of}:", function, given, shape, "kept tokens, head size")
            out = out.astype(np.float64)
            if not np.isfinite(out).all():
                raise PluginError(f"{what} gave NaN or infinite {of}{place(function)}")
            rows.append(out)
        return rows[0], rows[1]

    return reduce


def checked_pruner(name: str, function: Any) -> Callable[[ImageRows, int, Settings], tuple[np.ndarray, np.ndarray]]:
    """Returns the checked pruner: row numbers [m] int64, rows to read [m, D] float32. It raises PluginError."""
    what = f"pruner '{name}'"

    def prune(image: ImageRows, n: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        whole = image.rows
        returned = guarded(what, function, replace(image, rows=whole.copy()), n, settings)
        pair = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        expected = f"1 to {n} different row numbers in ascending order"
        try:
            kept = np.asarray(pair[0])
        except (TypeError, ValueError):
            raise PluginError(f"{what} must return {expected}, not {_kind(pair[0])}{place(function)}") from None
        if kept.ndim != 1 or kept.dtype.kind not in "iu" or not 1 <= len(kept) <= n:
            kind = f"{kept.dtype} {list(kept.shape)}" if kept.dtype != object else _kind(pair[0])
            raise PluginError(f"{what} must return {expected}, not {kind}{place(function)}")
        kept = kept.astype(np.int64)
        if (np.diff(kept) <= 0).any() or kept[0] < 0 or kept[-1] >= len(whole):
            raise PluginError(f"{what} must return {expected}, from 0 to {len(whole) - 1}{place(function)}")
        if pair[1] is None:
            return kept, whole[kept]
        rows = _numbers(f"{what}, rows:", function, pair[1], (len(kept), whole.shape[1]), "rows, width")
        with np.errstate(over="ignore"):
            rows = rows.astype(np.float32)
        if not np.isfinite(rows).all():
            raise PluginError(f"{what} gave NaN or infinite rows{place(function)}")
        return kept, rows

    return prune


def _numbers(what: str, function: Any, given: Any, shape: tuple[int, ...], meaning: str) -> np.ndarray:
    import numpy as np

    expected = f"an array {list(shape)} of numbers ({meaning})"
    try:
        out = np.asarray(given)
    except (TypeError, ValueError):
        raise PluginError(f"{what} must return {expected}, not {_kind(given)}{place(function)}") from None
    if out.dtype.kind not in "biuf":
        kind = _kind(given) if out.dtype == object else str(out.dtype)
        raise PluginError(f"{what} must return {expected}, not {kind}{place(function)}")
    if out.shape != shape:
        raise PluginError(f"{what} must return {expected}, not {list(out.shape)}{place(function)}")
    return out


def _kind(value: Any) -> str:
    return "None (a return statement may be missing)" if value is None else f"a {type(value).__name__}"
