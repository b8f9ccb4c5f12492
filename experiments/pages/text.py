"""The text model, as llama.cpp computes its qwen2vl architecture: M-RoPE, biased queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from demo.text import RMSNorm, TextBlock, TextConfig
from modelgen.layers import mrope_sections
from torch import Tensor, nn

from .vision import rotate_halves

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PageConfig(TextConfig):
    width: int = 256
    kv_heads: int = 1
    layers: int = 10
    eps: float = 1e-6
    context: int = 8192


def mrope_table(positions: Tensor, size: int, base: float) -> Tables:
    """Returns cosine and sine [batch, 1, tokens, size / 2] of positions [batch, tokens, 3]: time, row and column."""
    rate = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    section = torch.repeat_interleave(torch.arange(3), torch.tensor(mrope_sections(size)[:3]))
    angle = positions[..., section].float().unsqueeze(1) * rate
    return angle.cos(), angle.sin()


class PageBlock(TextBlock):
    def __init__(self, c: PageConfig) -> None:
        super().__init__(c)
        for part in (self.q, self.k, self.v):
            part.bias = nn.Parameter(torch.zeros(part.out_features))

    def project(self, x: Tensor, table: Tables) -> tuple[Tensor, Tensor, Tensor]:
        b, t, _ = x.shape
        h = self.ln1(x)
        q, k, v = (m(h).view(b, t, -1, self.c.head_size).transpose(1, 2) for m in (self.q, self.k, self.v))
        return rotate_halves(q, *table), rotate_halves(k, *table), v


class PageModel(nn.Module):
    def __init__(self, c: PageConfig) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.width)
        self.blocks = nn.ModuleList(PageBlock(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def table(self, positions: Tensor) -> Tables:
        return mrope_table(positions, self.c.head_size, self.c.rope_base)
