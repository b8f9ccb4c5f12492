"""Writes the findings: pictures, a self-contained HTML page, and the numbers."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvedge_lab import drawing
from kvedge_lab.inspect.collect import Findings
from pykvedge.errors import UsageError

REPORT, NUMBERS = "report.html", "data.npz"


@dataclass(frozen=True)
class Drawing:
    name: str  # of its file, without ending
    title: str
    note: str
    figure: Any  # matplotlib's

    @functools.cached_property
    def png(self) -> bytes:
        """The picture for the page. Drawing takes half a second."""
        return self.data("png")

    def data(self, form: str) -> bytes:
        """Returns the picture as png, svg or pdf."""
        out = io.BytesIO()
        drawing.save(self.figure, out, form)
        return out.getvalue()


def drawings(findings: Findings) -> Iterator[Drawing]:
    """Yields all pictures, in the order of the report. Needs matplotlib."""
    from kvedge_lab.inspect import figures, overlay

    for i, image in enumerate(findings.images, 1):
        if image.places is None:
            continue
        name = image.picture.name
        note = (
            "All layers together. The brightest patch is the one that most heads of a method keep; percent: pairs of "
            "the image that are kept."
        )
        together = figures.tiles(overlay.by_method(findings, image))
        yield Drawing(f"kept-image-{i}", f"What is kept of {name}", note, together)
        for method in findings.kept:
            yield Drawing(f"kept-{method}-image-{i}", f"{method}: what each layer keeps of {name}",
                          "Brightness: share of the layer's KV heads that keep the patch.",
                          figures.tiles(overlay.by_layer(findings, method, image)))  # fmt: skip
    totals = ", ".join(f"{method} {int(findings.budgets(method).sum())}" for method in findings.kept)
    yield Drawing("budgets", "KV pairs by layer and head", f"Pairs in all: {totals}.", figures.budgets(findings))
    yield Drawing("redundancy", "Redundancy of the keys, head by head",
                  "Mean cosine similarity of two different keys of the prompt (MixKV, fig. 2).",
                  figures.redundancy(findings))  # fmt: skip
    yield Drawing("lorenz", "How unevenly attention falls on the tokens",
                  "Attention received, averaged over the heads, most important tokens first (PrefixKV, fig. 2).",
                  figures.lorenz(findings))  # fmt: skip
    yield Drawing("spectrum", "Energy by frequency along the tokens",
                  "Orthonormal DCT-II of keys and values; the dotted line is FlashCache's cut-off (its fig. 1).",
                  figures.spectrum(findings))  # fmt: skip
    yield Drawing("outliers", "Energy above the cut-off",
                  "FlashCache gives a layer budget in proportion to this (its fig. 4).",
                  figures.outliers(findings))  # fmt: skip


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvedge inspect: {{ f.model }}</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { max-width: 100% } figure { margin: 2rem 0 } figcaption { color: #555 }
td, th { padding: .1rem .8rem; text-align: right } th:first-child, td:first-child { text-align: left }
</style></head><body>
<h1>What the KV cache holds</h1>
<p><b>{{ f.model }}</b>, {{ f.n_tokens }} tokens ({{ f.image_mask.sum() }} of images), {{ f.layers | length }} layers.
Prompt: <q>{{ f.prompt }}</q></p>
<table><tr><th>layer</th><th>redundancy</th><th>Gini</th><th>outlier ratio</th>
{% for m in f.kept %}<th>{{ m }}: pairs per head</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for d in drawings %}<figure><h2>{{ d.title }}</h2>
<img alt="{{ d.title }}" style="width: {{ 140 * d.figure.get_figwidth() }}px"
src="data:image/png;base64,{{ base64(d.png).decode() }}"><figcaption>{{ d.note }}</figcaption></figure>
{% endfor %}</body></html>
"""


def table(findings: Findings) -> list[list[str]]:
    """Returns a row per layer: its number, mean redundancy, Gini, outlier ratio, and pairs per head for each method."""
    pairs = [findings.lengths(method) for method in findings.kept]
    measured = zip(np.nanmean(findings.redundancy, axis=1), findings.gini, findings.outliers, strict=True)
    rows = []
    for i, (number, figures) in enumerate(zip(findings.layers, measured, strict=True)):
        row = [str(number), *(f"{figure:.3f}" for figure in figures)]
        for per_head in pairs:
            low, high = min(per_head[i]), max(per_head[i])
            row.append(str(low) if low == high else f"{low} - {high}")
        rows.append(row)
    return rows


def page(findings: Findings, pictures: list[Drawing]) -> str:
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(f=findings, rows=table(findings), drawings=pictures, base64=base64.b64encode)


def write(findings: Findings, folder: Path, with_figures: bool = True, form: str = "png") -> list[Path]:
    """Writes everything into a folder, which is created. Returns the files. Raises UsageError.

    form: of the pictures beside the page: png, svg or pdf.
    """
    pictures = list(drawings(findings)) if with_figures else []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / NUMBERS]
        np.savez_compressed(written[0], **findings.arrays())
        for d in pictures:
            written.append(folder / f"{d.name}.{form}")
            written[-1].write_bytes(d.png if form == "png" else d.data(form))
        if pictures:
            written.insert(0, folder / REPORT)
            written[0].write_text(page(findings, pictures), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
    return written
