"""The text model, as llama.cpp computes its llama architecture (RMS norm, RoPE, GQA, SwiGLU), and the projector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .vision import VisionConfig, attention


@dataclass(frozen=True)
class TextConfig:
    vocab: int
    width: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    layers: int = 5
    hidden: int = 384
    rope_base: float = 10000.0
    eps: float = 1e-5
    context: int = 4096


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def rope_table(positions: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine, [batch, 1, tokens, size / 2]."""
    rate = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = positions[:, None, :, None].float() * rate
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pairs of neighbouring dimensions (llama.cpp's "norm" type)."""
    cos, sin = (t.to(x.dtype) for t in table)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class TextBlock(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.c = c
        self.ln1, self.ln2 = RMSNorm(c.width, c.eps), RMSNorm(c.width, c.eps)
        self.q = nn.Linear(c.width, c.heads * c.head_size, bias=False)
        self.k = nn.Linear(c.width, c.kv_heads * c.head_size, bias=False)
        self.v = nn.Linear(c.width, c.kv_heads * c.head_size, bias=False)
        self.o = nn.Linear(c.heads * c.head_size, c.width, bias=False)
        self.gate = nn.Linear(c.width, c.hidden, bias=False)
        self.up = nn.Linear(c.width, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)
        with torch.no_grad():
            self.o.weight.mul_(0.3)
            self.down.weight.mul_(0.3)

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [b, heads, t, size], keys and values [b, kv_heads, t, size]."""
        b, t, _ = x.shape
        h = self.ln1(x)
        q, k, v = (m(h).view(b, t, -1, self.c.head_size).transpose(1, 2) for m in (self.q, self.k, self.v))
        return rotate(q, table), rotate(k, table), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        b, t, _ = x.shape
        x = x + self.o(attended.transpose(1, 2).reshape(b, t, -1))
        h = self.ln2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes a block. Also returns the rotated queries and keys, for the attention loss."""
        q, k, v = self.project(x, table)
        groups = self.c.heads // self.c.kv_heads
        b, h, t, d = q.shape
        # One matrix product per KV head: the query heads of its group are stacked along the tokens.
        stacked = q.reshape(b, self.c.kv_heads, groups * t, d)
        out = attention(stacked, k, v, mask.repeat(1, 1, groups, 1)).view(b, h, t, d)
        return self.finish(x, out), q, k


class TextModel(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.width)
        self.blocks = nn.ModuleList(TextBlock(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_table(positions, self.c.head_size, self.c.rope_base)


class Projector(nn.Module):
    """LLaVA-1.5's two layers. The second starts small, so that image and word embeddings have one scale (RMS 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mm0 = nn.Linear(VisionConfig.width, VisionConfig.projector_hidden)
        self.mm2 = nn.Linear(VisionConfig.projector_hidden, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.mm2(F.gelu(self.mm0(features), approximate="tanh"))

    @torch.no_grad()
    def match_scale(self, features: Tensor) -> None:
        rms = self(features).pow(2).mean().sqrt()
        self.mm2.weight.div_(rms)
        self.mm2.bias.div_(rms)
