"""The figures, drawn with matplotlib (extra "inspect")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge_lab.inspect.collect import GAMMA, Findings
from pykvedge.errors import LibraryError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raises LibraryError, with what to install, where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise LibraryError(
            "figures are drawn with matplotlib: pip install 'kvedge[inspect]', or pass --no-figures"
        ) from None


def _figure(width: float = 7.0, height: float = 4.2, columns: int = 1) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _lines(axes: Any, findings: Findings, rows: np.ndarray, x: np.ndarray) -> None:
    from matplotlib import colormaps

    colours = colormaps["viridis"](np.linspace(0, 0.95, len(rows)))
    named = {round(i) for i in np.linspace(0, len(rows) - 1, min(len(rows), 8))}  # a legend of 32 lines says nothing
    for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        axes.plot(x, row, color=colour, linewidth=1.2, label=f"layer {findings.layers[i]}" if i in named else None)
    axes.legend(fontsize="small")


def _heat(axes: Any, findings: Findings, values: np.ndarray, label: str, **limits: float) -> None:
    image = axes.imshow(values, aspect="auto", cmap="magma", interpolation="nearest", **limits)
    axes.set(xlabel="KV head", ylabel="layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_yticks(range(len(findings.layers)), [str(n) for n in findings.layers])
    axes.figure.colorbar(image, ax=axes, label=label)


def redundancy(findings: Findings) -> Figure:
    """Heat map: mean cosine similarity of a head's keys (MixKV, fig. 2)."""
    figure, axes = _figure()
    _heat(axes, findings, findings.redundancy, "mean similarity of two keys", vmin=0, vmax=1)
    return figure


def spectrum(findings: Findings) -> Figure:
    """Energy by frequency along the tokens, keys and values (FlashCache, fig. 1)."""
    figure, panels = _figure(10.0, columns=2)
    x = np.arange(findings.n_tokens) / findings.n_tokens
    for axes, rows, what in zip(panels, (findings.spectrum_k, findings.spectrum_v), ("keys", "values"), strict=True):
        _lines(axes, findings, np.maximum(rows, 1e-9), x)
        axes.axvline(GAMMA, color="grey", linestyle=":", linewidth=1)
        axes.set(yscale="log", xlabel="frequency (share of the bins)", ylabel="share of energy", title=what)
    return figure


def outliers(findings: Findings) -> Figure:
    """Bars: the share of each layer's energy above the cut-off, keys plus values (FlashCache, fig. 4)."""
    figure, axes = _figure()
    axes.bar([str(n) for n in findings.layers], findings.outliers, color="#4c72b0")
    axes.set(xlabel="layer", ylabel=f"energy above {GAMMA:g} of the frequencies, K + V")
    return figure


def lorenz(findings: Findings) -> Figure:
    """Importance held by the most important tokens, layer by layer, and its Gini coefficient (PrefixKV, fig. 2)."""
    from kvedge_lab.inspect.measures import lorenz as curve

    figure, (axes, bars) = _figure(10.0, columns=2)
    _lines(
        axes, findings, np.stack([curve(row) for row in findings.importance]), np.linspace(0, 1, findings.n_tokens + 1)
    )
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="share of the tokens, most important first", ylabel="share of the attention they received")
    bars.bar([str(n) for n in findings.layers], findings.gini, color="#4c72b0")
    bars.set(xlabel="layer", ylabel="Gini coefficient", ylim=(0, 1))
    return figure


def budgets(findings: Findings, method: str) -> Figure:
    """Heat map: KV pairs that each layer and KV head keeps."""
    figure, axes = _figure()
    _heat(axes, findings, findings.budgets(method), "KV pairs kept", vmin=0)
    return figure
