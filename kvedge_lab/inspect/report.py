"""Writes the findings: pictures, one HTML page that needs nothing beside it, and the numbers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvedge_lab.inspect.collect import Findings
from pykvedge.errors import UsageError

REPORT, NUMBERS = "report.html", "data.npz"


@dataclass(frozen=True)
class Drawing:
    name: str  # of its file, without .png
    title: str
    note: str
    png: bytes


def drawings(findings: Findings) -> Iterator[Drawing]:
    """All pictures, in the order of the report. Raises LibraryError without matplotlib."""
    from kvedge_lab.inspect import figures
    from kvedge_lab.inspect.overlay import kept_patches

    figures.require_matplotlib()
    for method in findings.kept:
        total = int(findings.budgets(method).sum())
        kept = total / (findings.n_tokens * sum(len(layer) for layer in findings.kept[method]))
        for i, shown in enumerate(findings.shown, 1):
            if shown.places is not None:
                note = (
                    f"Brightness: share of the layer's KV heads that keep the patch. In all {100 * kept:.1f} % is kept."
                )
                title = f"{method}: what is kept of {shown.picture.name}"
                yield Drawing(f"kept-{method}-image-{i}", title, note, _png(kept_patches(findings, method, shown)))
        yield Drawing(f"budgets-{method}", f"{method}: KV pairs by layer and head",
                      f"{total} pairs in all.", _png(figures.budgets(findings, method)))  # fmt: skip
    yield Drawing("redundancy", "Redundancy of the keys, head by head",
                  "Mean cosine similarity of two different keys of the prompt (MixKV, fig. 2).",
                  _png(figures.redundancy(findings)))  # fmt: skip
    yield Drawing("lorenz", "How unevenly attention falls on the tokens",
                  "Attention received, averaged over the heads, most important tokens first (PrefixKV, fig. 2).",
                  _png(figures.lorenz(findings)))  # fmt: skip
    yield Drawing("spectrum", "Energy by frequency along the tokens",
                  "Orthonormal DCT-II of keys and values; the dotted line is FlashCache's cut-off (its fig. 1).",
                  _png(figures.spectrum(findings)))  # fmt: skip
    yield Drawing("outliers", "Energy above the cut-off",
                  "FlashCache gives a layer budget in proportion to this (its fig. 4).",
                  _png(figures.outliers(findings)))  # fmt: skip


def _png(picture: Any) -> bytes:
    """A matplotlib figure or a pillow image as PNG."""
    out = io.BytesIO()
    if hasattr(picture, "savefig"):
        picture.savefig(out, format="png", dpi=110)
    else:
        picture.save(out, format="PNG")
    return out.getvalue()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvedge inspect: {{ f.model }}</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { max-width: 100%; border: 1px solid #ddd } figure { margin: 2rem 0 } figcaption { color: #555 }
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
<img alt="{{ d.title }}" src="data:image/png;base64,{{ d.data }}"><figcaption>{{ d.note }}</figcaption></figure>
{% endfor %}</body></html>
"""


def table(findings: Findings) -> list[list[str]]:
    """A row per layer: its number, mean redundancy, Gini, outlier ratio, and pairs per head for each method."""
    budgets = {m: findings.budgets(m) for m in findings.kept}
    gini = findings.gini
    rows = []
    for i, number in enumerate(findings.layers):
        row = [
            str(number),
            f"{np.nanmean(findings.redundancy[i]):.3f}",
            f"{gini[i]:.3f}",
            f"{findings.outliers[i]:.3f}",
        ]
        for per_head in budgets.values():
            low, high = int(per_head[i].min()), int(per_head[i].max())
            row.append(str(low) if low == high else f"{low} - {high}")
        rows.append(row)
    return rows


def page(findings: Findings, pictures: list[Drawing]) -> str:
    import jinja2

    shown = [{"title": d.title, "note": d.note, "data": base64.b64encode(d.png).decode()} for d in pictures]
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(f=findings, rows=table(findings), drawings=shown)


def write(findings: Findings, folder: Path, with_figures: bool = True) -> list[Path]:
    """Writes everything into a folder, which is made. Returns the files. Raises UsageError, LibraryError."""
    pictures = list(drawings(findings)) if with_figures else []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / NUMBERS]
        np.savez_compressed(written[0], **findings.arrays())
        for d in pictures:
            written.append(folder / f"{d.name}.png")
            written[-1].write_bytes(d.png)
        if pictures:
            written.insert(0, folder / REPORT)
            written[0].write_text(page(findings, pictures), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
    return written
