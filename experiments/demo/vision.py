"""The vision tower, as llama.cpp computes its `clip` graph (pre-LN, no class token), and its patch losses."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvedge_lab.demo_tasks.font import CODE_CHARS
from kvedge_lab.demo_tasks.scenes import CELL, COLOURS, GRID, IMAGE_SIZE, SHAPES, Scene

N_PATCHES = GRID * GRID
COLOUR_NAMES = tuple(COLOURS)
# What each patch must tell during the vision phase. 0 means "nothing here", except for row and column.
PATCH_TARGETS = {
    "kind": 1 + len(SHAPES) + len(CODE_CHARS),
    "colour": 1 + len(COLOURS),
    "ordinal": 1 + 6 + 6,
    "same": 1 + 6,
    "last": 2,
    "row": GRID,
    "column": GRID,
}


class VisionConfig:
    width, heads, layers, hidden = 128, 4, 3, 384
    projector_hidden = 256
    eps = 1e-5


def patch_labels(scene: Scene) -> np.ndarray:
    """Returns the targets of every patch, uint8 [144, len(PATCH_TARGETS)]."""
    labels = np.zeros((GRID, GRID, len(PATCH_TARGETS)), np.uint8)
    labels[..., 5] = np.arange(GRID)[:, None]
    labels[..., 6] = np.arange(GRID)[None, :]
    for k, item in enumerate(scene.items):
        same = len(scene.where(shape=item.shape))
        last = int(k == len(scene.items) - 1)
        kind, colour = 1 + SHAPES.index(item.shape), 1 + COLOUR_NAMES.index(item.colour)
        labels[item.row, item.col, :5] = (kind, colour, 1 + k, same, last)
    for k, char in enumerate(scene.code):
        kind, last = 1 + len(SHAPES) + CODE_CHARS.index(char), int(k == len(scene.code) - 1)
        labels[scene.code_row, scene.code_col + k, :5] = (kind, 0, 7 + k, 0, last)
    return labels.reshape(N_PATCHES, -1)


def patchify(images: Tensor) -> Tensor:
    """Returns normalised patches [n, 144, 1200] of uint8 [n, 240, 240, 3], in the order of the convolution."""
    n = images.shape[0]
    x = images.view(n, GRID, CELL, GRID, CELL, 3).permute(0, 1, 3, 5, 2, 4)
    return x.reshape(n, N_PATCHES, 3 * CELL * CELL).float().div_(127.5).sub_(1.0)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Plain attention: in bfloat16 on a CPU, its backward pass is several times faster than the fused one."""
    with torch.autocast("cpu", enabled=False):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores + mask
        return scores.softmax(-1) @ v


class VisionBlock(nn.Module):
    def __init__(self, c: type[VisionConfig]) -> None:
        super().__init__()
        self.heads = c.heads
        self.ln1, self.ln2 = nn.LayerNorm(c.width, c.eps), nn.LayerNorm(c.width, c.eps)
        self.q, self.k, self.v, self.o = (nn.Linear(c.width, c.width) for _ in range(4))
        self.up, self.down = nn.Linear(c.width, c.hidden), nn.Linear(c.hidden, c.width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        h = self.ln1(x)
        q, k, v = (m(h).view(n, t, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(attention(q, k, v).transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class VisionTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        c = VisionConfig
        self.patch = nn.Linear(3 * CELL * CELL, c.width, bias=False)
        self.position = nn.Parameter(torch.randn(N_PATCHES, c.width) * 0.1)
        self.pre_ln, self.post_ln = nn.LayerNorm(c.width, c.eps), nn.LayerNorm(c.width, c.eps)
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c.layers))

    def forward(self, patches: Tensor) -> Tensor:
        x = self.pre_ln(self.patch(patches) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.post_ln(x)


class PatchHeads(nn.Module):
    """Linear read-outs of the patch targets, only used in training."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = list(PATCH_TARGETS.values())
        self.linear = nn.Linear(VisionConfig.width, sum(self.sizes))

    def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss, and the accuracy of each target on patches that show something (row, column: all)."""
        shown = labels[..., 0] > 0
        loss, accuracy = features.new_zeros(()), []
        for k, logits in enumerate(self.linear(features).split(self.sizes, -1)):
            target = labels[..., k]
            each = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none")
            each = each.view_as(target)
            where = torch.ones_like(shown) if k >= 5 else shown
            loss = loss + each[where].mean() + 0.5 * each[~shown].mean()
            accuracy.append((logits.argmax(-1) == target)[where].float().mean())
        return loss, torch.stack(accuracy)


assert IMAGE_SIZE == GRID * CELL
