"""Runs what a plugin registered: its errors become one line, and what it returns is checked before anything uses it."""

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
    """Calls function(*arguments). What it raises, SystemExit too, is a PluginError; what it prints goes to stderr.

    file: where the plugin's code is, if not where the function is; None: wherever the error came from.
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
    """Asks an exception of a plugin what it says; that is the plugin's code, too."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def _line(error: BaseException, file: str | None) -> str:
    """Writes " (file:line)" of the file's last line that the error passed, "" if it passed none. None: of any file."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if file is None or frame.filename == file]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def place(function: Any) -> str:
    """Tells where a function is defined, as " (file:line)"; nothing for one that was not written in Python."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def view(layer: Layer, n_queries: int, column_sums: bool) -> Layer:
    """Makes the layer as a plugin sees it in a running model: as many queries, and column sums, as it asks for."""
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
    """Makes the scorer for all engines: [Hkv, T] float64 that float32 can represent. Raises PluginError."""
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
    """Makes the allocator for all engines: [L, Hkv] int64 that meet the budget. Raises PluginError."""
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
            raise PluginError(f"{what} gives a head {wrong} KV pairs; each keeps from 1 to {n_tokens}{place(function)}")
        if int(out.sum()) != total:
            raise PluginError(
                f"{what} gives {int(out.sum())} KV pairs in total; the budget is {total}, {prompt.budget} for each of "
                f"{n_layers} x {n_heads} heads{place(function)}"
            )
        return out.astype(np.int64)

    return allocate


def checked_reducer(name: str, function: Any) -> Callable[[Head, Settings], tuple[np.ndarray, np.ndarray]]:
    """Makes the reducer for all engines: rows [n, d] float64, finite. Raises PluginError."""
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
    """Makes the pruner: row numbers [m] int64 and what the model reads [m, D] float32. Raises PluginError."""
    what = f"pruner '{name}'"

    def prune(image: ImageRows, n: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        whole = image.rows
        returned = guarded(what, function, replace(image, rows=whole.copy()), n, settings)
        pair = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        expected = f"1 to {n} row numbers, ascending and each once"
        try:
            kept = np.asarray(pair[0])
        except (TypeError, ValueError):
            raise PluginError(f"{what} must return {expected}, not {_kind(pair[0])}{place(function)}") from None
        if kept.ndim != 1 or kept.dtype.kind not in "iu" or not 1 <= len(kept) <= n:
            kind = f"{kept.dtype} {list(kept.shape)}" if kept.dtype != object else _kind(pair[0])
            raise PluginError(f"{what} must return {expected}, not {kind}{place(function)}")
        kept = kept.astype(np.int64)
        if (np.diff(kept) <= 0).any() or kept[0] < 0 or kept[-1] >= len(whole):
            raise PluginError(f"{what} must return {expected}, of the {len(whole)} of the image{place(function)}")
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
    return "nothing (is there a return?)" if value is None else f"a {type(value).__name__}"
