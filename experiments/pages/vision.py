"""The vision tower of the second model, as llama.cpp computes Qwen2-VL's, and its losses.

Any page size; rotary positions of rows and columns; 2 x 2 patches of 8 x 8 pixels become one token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from demo.vision import VisionConfig, attention
from torch import Tensor, nn

from kvedge_lab.page_tasks.pages import CELL, CHARS, COLOURS, COLUMNS, LEXICON, MAX_PAGES, Page

PATCH, MERGED = CELL // 2, 4
MEAN, STD = 0.5, 0.5
SLOTS = ("", "head", "number", "word 1", "word 2", "word 3", "label", "price", "left", "bar", "code word", "code")
# What each cell must tell; 0: nothing of this kind. The tower tells the first six. Only the text model tells the page,
# as its number from 0, plus 1.
TARGETS = {
    "char": 1 + len(CHARS),
    "word": 1 + len(LEXICON),
    "index": 1 + 8,
    "colour": 1 + len(COLOURS),
    "end": 2,  # end of a bar
    "last": 2,  # last character of a text
    "slot": len(SLOTS),
    "key": 1 + 8 + len(LEXICON),
    "longest": 3,
    "page": 1 + MAX_PAGES,
}
TOWER_TARGETS = ("char", "word", "index", "colour", "end", "last")


class TowerConfig(VisionConfig):
    width, heads, layers, hidden = 128, 4, 3, 256
    out = 256
    eps = 1e-6


def labels(page: Page) -> np.ndarray:
    """Returns the targets of every cell, int64 [cells, targets]. The page number stays 0."""
    out = np.zeros((page.height, COLUMNS, len(TARGETS)), np.int64)
    told = {name: out[..., k] for k, name in enumerate(TARGETS)}
    for text in page.texts():
        row, at = text.row, slice(text.column, text.column + len(text.text))
        told["char"][row, at] = [1 + CHARS.index(char) for char in text.text]
        told["word"][row, at] = 1 + LEXICON.index(text.text) if text.text in LEXICON else 0
        told["index"][row, at] = np.arange(1, 1 + len(text.text))
        told["last"][row, at.stop - 1] = 1
        told["slot"][row, at] = SLOTS.index(text.slot)
    most = max((row.bar.length for row in page.rows if row.bar), default=0)
    for row in page.rows:
        at = row.key.row
        if row.bar:
            bar = slice(row.bar.column, row.bar.column + row.bar.length)
            told["colour"][at, bar], told["slot"][at, bar] = 1 + list(COLOURS).index(row.bar.colour), SLOTS.index("bar")
            told["end"][at, bar.stop - 1] = 1
        shown = told["slot"][at] > 0
        told["key"][at, shown] = int(row.key.text) if row.key.text.isdigit() else 9 + LEXICON.index(row.key.text)
        if row.bar:
            told["longest"][at, shown] = 1 + (row.bar.length == most)
    return out.reshape(-1, len(TARGETS))


@functools.cache
def _order(rows: int) -> tuple[np.ndarray, Tensor]:
    """Returns the patches of a page in the tower's order, the four of a cell together: their numbers and (y, x)."""
    at = [(2 * r + dy, 2 * c + dx) for r in range(rows) for c in range(COLUMNS) for dy in (0, 1) for dx in (0, 1)]
    return np.array([y * 2 * COLUMNS + x for y, x in at]), torch.tensor(at)


def patchify(images: Sequence[np.ndarray]) -> Tensor:
    """Returns normalised patches [n, patches, 192] of pictures of one size, in the order of the convolution."""
    x = torch.from_numpy(np.stack(images))
    n, h, w, _ = x.shape
    x = x.view(n, h // PATCH, PATCH, w // PATCH, PATCH, 3).permute(0, 1, 3, 5, 2, 4).reshape(n, -1, 3 * PATCH**2)
    return (x[:, torch.from_numpy(_order(h // CELL)[0])].float() / 255 - MEAN) / STD


@functools.cache
def rotary(rows: int) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine [patches, head / 2]: half of the pairs turns with the row, half with the column."""
    size = TowerConfig.width // TowerConfig.heads
    rate = 10000.0 ** (-torch.arange(0, size // 2, 2).float() / (size // 2))
    angle = (_order(rows)[1][:, :, None].float() * rate).flatten(1)
    return angle.cos(), angle.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of dimensions i and i + size / 2 (llama.cpp's "neox" type, and its M-RoPE)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        c = TowerConfig
        self.ln1, self.ln2 = nn.LayerNorm(c.width, c.eps), nn.LayerNorm(c.width, c.eps)
        self.q, self.k, self.v, self.o = (nn.Linear(c.width, c.width) for _ in range(4))
        self.up, self.down = nn.Linear(c.width, c.hidden), nn.Linear(c.hidden, c.width)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        n, t, d = x.shape
        h = self.ln1(x)
        q, k, v = (m(h).view(n, t, TowerConfig.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        fast = F.scaled_dot_product_attention  # its backward pass is slow in bfloat16
        seen = (attention if torch.is_grad_enabled() else fast)(rotate_halves(q, *table), rotate_halves(k, *table), v)
        x = x + self.o(seen.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Tower(nn.Module):
    """Turns patches into tokens of the text model's width. Includes the merger."""

    def __init__(self) -> None:
        super().__init__()
        c = TowerConfig
        self.patch = nn.Linear(3 * PATCH**2, c.width, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(c.layers))
        self.post_ln = nn.LayerNorm(c.width, c.eps)
        merged = 4 * c.width
        self.projector = nn.ModuleDict({"mm0": nn.Linear(merged, merged), "mm2": nn.Linear(merged, c.out)})

    def forward(self, images: Sequence[np.ndarray]) -> Tensor:
        """Returns [n, cells, out] for pictures of one size."""
        x, table = self.patch(patchify(images)), rotary(images[0].shape[0] // CELL)
        for block in self.blocks:
            x = block(x, table)
        x = self.post_ln(x).reshape(len(images), -1, 4 * TowerConfig.width)
        return self.projector["mm2"](F.gelu(self.projector["mm0"](x), approximate="tanh"))


class Heads(nn.Module):
    """Linear read-outs of targets, only used in training."""

    def __init__(self, width: int, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.places = [list(TARGETS).index(name) for name in names]
        self.linear = nn.Linear(width, sum(TARGETS[name] for name in names))

    def forward(self, x: Tensor, wanted: Tensor, plain: float = 0.2) -> tuple[Tensor, list[float]]:
        """Returns the loss of states [n, width], and the accuracy of each target on cells where it is not 0.

        plain: the weight of cells where the target is 0.
        """
        loss, right = x.new_zeros(()).float(), []
        parts = self.linear(x).float().split([TARGETS[name] for name in self.names], -1)
        for logits, k in zip(parts, self.places, strict=True):
            target = wanted[:, k]
            each, shown = F.cross_entropy(logits, target, reduction="none"), target > 0
            if shown.any():
                loss = loss + each[shown].mean()
                right.append((logits.argmax(-1) == target)[shown].float().mean().item())
            else:
                right.append(1.0)
            if plain and not shown.all():
                loss = loss + plain * each[~shown].mean()
        return loss, right
