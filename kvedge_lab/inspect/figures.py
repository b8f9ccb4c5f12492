"""Draws the figures with matplotlib (extra "inspect")."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from PIL.Image import Image as PillowImage

from kvedge_lab import drawing
from kvedge_lab.inspect.collect import GAMMA, Findings
from kvedge_lab.inspect.measures import lorenz as curve

ACROSS = 4  # tiles in a row
_styled = rc_context(drawing.RULES)  # decorator: the style of all pictures


def _figure(height: float, rows: int = 1, columns: int = 1, **layout: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(drawing.COLUMN, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **layout).ravel()


def _lines(axes: Any, findings: Findings, rows: np.ndarray, x: np.ndarray) -> None:
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(rows)))
    named = {round(i) for i in np.linspace(0, len(rows) - 1, min(len(rows), 6))}  # a legend of 32 lines is unreadable
    for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        axes.plot(x, row, color=colour, linewidth=0.9, label=f"layer {findings.layers[i]}" if i in named else None)


def _heat(axes: Any, findings: Findings, values: np.ndarray, **limits: float) -> Any:
    image = axes.imshow(values, aspect="auto", cmap="magma", interpolation="nearest", **limits)
    axes.set(xlabel="KV head")
    axes.xaxis.get_major_locator().set_params(integer=True)
    step = -(-len(findings.layers) // 16)  # there is room for 16 numbers
    axes.set_yticks(range(0, len(findings.layers), step), [str(n) for n in findings.layers[::step]])
    return image


@_styled
def redundancy(findings: Findings) -> Figure:
    """Heat map: mean cosine similarity of a head's keys (MixKV, fig. 2)."""
    figure, (axes,) = _figure(2.2)
    image = _heat(axes, findings, findings.redundancy, vmin=0, vmax=1)
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="mean similarity of two keys")
    return figure


@_styled
def spectrum(findings: Findings) -> Figure:
    """Energy by frequency along the tokens, for keys and values (FlashCache, fig. 1)."""
    figure, panels = _figure(3.6, rows=2, sharex=True)
    x = np.arange(findings.n_tokens) / findings.n_tokens
    for axes, rows, what in zip(panels, (findings.spectrum_k, findings.spectrum_v), ("keys", "values"), strict=True):
        _lines(axes, findings, np.maximum(rows, 1e-9), x)
        axes.axvline(GAMMA, color="grey", linestyle=":", linewidth=1)
        axes.set(yscale="log", ylabel="share of energy")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(what)
    panels[-1].set_xlabel("frequency, share of the bins")
    drawing.legend(figure, panels)
    return figure


@_styled
def outliers(findings: Findings) -> Figure:
    """Bars: the share of each layer's energy above the cut-off, keys plus values (FlashCache, fig. 4)."""
    figure, (axes,) = _figure(1.8)
    _bars(axes, findings, findings.outliers)
    axes.set_ylabel(f"energy above {GAMMA:g}, K + V")
    return figure


@_styled
def lorenz(findings: Findings) -> Figure:
    """Importance in the most important tokens, per layer, and its Gini coefficient (PrefixKV, fig. 2)."""
    figure, (axes, bars) = _figure(4.0, rows=2, height_ratios=(3, 2))
    x = np.linspace(0, 1, findings.n_tokens + 1)
    _lines(axes, findings, np.stack([curve(row) for row in findings.importance]), x)
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="share of the tokens, most important first", ylabel="share of attention received")
    drawing.legend(figure, [axes])
    _bars(bars, findings, findings.gini)
    bars.set(ylabel="Gini coefficient", ylim=(0, 1))
    return figure


def _bars(axes: Any, findings: Findings, values: np.ndarray) -> None:
    axes.bar([str(n) for n in findings.layers], values, color=drawing.COLOURS[0])
    axes.set_xlabel("layer")
    step = -(-len(findings.layers) // 16)
    axes.set_xticks(range(0, len(findings.layers), step))


@_styled
def budgets(findings: Findings) -> Figure:
    """Heat maps: KV pairs that each layer and KV head keeps; the methods side by side on one scale."""
    found = {method: findings.budgets(method) for method in findings.kept}
    across = min(len(found), 3)
    down = -(-len(found) // across)
    figure, panels = _figure(1.9 * down, down, across, sharey=True)
    most = max(counts.max() for counts in found.values())
    for axes in panels[len(found) :]:
        axes.remove()
    for axes, (method, counts) in zip(panels, found.items(), strict=False):
        image = _heat(axes, findings, counts, vmin=0, vmax=most)
        axes.set_title(method)
    for axes in panels[: len(found) : across]:
        axes.set_ylabel("layer")
    figure.colorbar(image, ax=panels[: len(found)].tolist(), label="KV pairs kept")
    return figure


@_styled
def tiles(labelled: list[tuple[str, PillowImage]]) -> Figure:
    """Pictures of one size side by side, each with its label above."""
    across = min(len(labelled), ACROSS)
    down = -(-len(labelled) // across)
    width, height = labelled[0][1].size
    figure, panels = _figure(down * (drawing.COLUMN / across * height / width + 0.2), down, across)
    for axes in panels:
        axes.set_axis_off()
    for axes, (label, picture) in zip(panels, labelled, strict=False):
        axes.imshow(np.asarray(picture), interpolation="nearest")
        axes.set_title(label, fontsize=drawing.TEXT, loc="center")
    return figure
