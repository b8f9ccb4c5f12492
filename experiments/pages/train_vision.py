"""Phase 1: trains only the vision tower, on the content of each cell."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from demo.checkpoint import Clock, Log, load_checkpoint, save_checkpoint
from demo.optim import Optimizers
from demo.train_text import average_gradients
from demo.train_vision import schedule
from torch import Tensor, nn

from kvedge_lab.page_tasks.pages import CELL, COLUMNS, draw_page, render

from .vision import TOWER_TARGETS, Heads, Tower, TowerConfig, labels


def draw_pages(seed: tuple[int, ...], cells: int, held_out: bool = False) -> tuple[list[np.ndarray], Tensor]:
    """Draws pieces of pages of one size, at least `cells` cells together, and their targets [cells, targets].

    Most pieces are one or two lines: the tower tells nearby content, and attention to far patches costs time.
    """
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([1, 3, 5, 11], p=[0.5, 0.2, 0.2, 0.1]))
    images, wanted = [], []
    while len(images) * rows * COLUMNS < cells:
        page = draw_page(rng, held_out)
        image, told = render(page), labels(page).reshape(page.height, COLUMNS, -1)
        for top in range(int(rows == 1), page.height - rows + 1, max(rows - 1, 2)):
            images.append(image[top * CELL : (top + rows) * CELL])
            wanted.append(told[top : top + rows].reshape(-1, told.shape[-1]))
    return images, torch.from_numpy(np.concatenate(wanted))


def shares(right: list[float]) -> str:
    return " ".join(f"{name} {100 * one:.1f}" for name, one in zip(TOWER_TARGETS, right, strict=True))


def train_vision(folder: Path, steps: int, cells: int, seed: int, rank: int = 0) -> Path:
    """Trains the tower, or continues. Returns its checkpoint. cells: in a step of each process."""
    torch.manual_seed(seed)
    path = folder / "vision.pt"
    tower, heads = Tower(), Heads(TowerConfig.out, TOWER_TARGETS)
    optim, both, log = Optimizers([tower, heads], 0.01, 2e-3), nn.ModuleList((tower, heads)), Log(folder / "train.log")
    parts = {"tower": tower, "heads": heads, "optim": optim}
    start = load_checkpoint(path, parts)
    clock, began = Clock(60.0), time.time()
    for step in range(start, steps):
        images, wanted = draw_pages((seed, 1, step, rank), cells)
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = heads(tower(images).flatten(0, 1), wanted)
        loss.backward()
        average_gradients(both)
        optim.step(schedule(step / steps))
        if rank == 0 and step % 25 == 0:
            log(f"vision {step} loss {loss.item():.3f} {shares(right)} {time.time() - began:.0f}s")
        if rank == 0 and clock.due():
            save_checkpoint(path, parts, step + 1)
    if rank == 0 and start < steps:
        save_checkpoint(path, parts, steps)
        images, wanted = draw_pages((seed, 99), 12000, held_out=True)
        with torch.no_grad():
            log(f"vision held-out: {shares(heads(tower(images).flatten(0, 1), wanted)[1])}")
    return path
