"""Phase 1: trains only the vision tower, on the patch targets."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from kvedge_lab.demo_tasks.scenes import draw_scene, render

from .checkpoint import Clock, Log, load_checkpoint, save_checkpoint
from .optim import Optimizers
from .vision import PATCH_TARGETS, PatchHeads, VisionTower, patch_labels, patchify


def draw_batch(seed: tuple[int, ...], size: int, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    scenes = [draw_scene(rng, held_out) for _ in range(size)]
    images = torch.from_numpy(np.stack([render(s) for s in scenes]))
    return images, torch.from_numpy(np.stack([patch_labels(s) for s in scenes])).long()


def schedule(done: float, warm: float = 0.02, floor: float = 0.03) -> float:
    """Returns the learning-rate factor at a share of the work: short warm-up, flat, linear decay in the second half."""
    return min(1.0, done / warm + 0.01, max(floor, (1 - done) * 2))


def shares(accuracy: torch.Tensor) -> str:
    """Returns percent right, per patch target."""
    return " ".join(f"{n} {100 * a:.1f}" for n, a in zip(PATCH_TARGETS, accuracy.tolist(), strict=True))


def held_out_accuracy(tower: VisionTower, heads: PatchHeads, seed: int) -> str:
    images, labels = draw_batch((seed, 99), 256, held_out=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        parts = zip(images.split(64), labels.split(64), strict=True)
        accuracy = torch.stack([heads(tower(patchify(i)), t)[1] for i, t in parts])
    return shares(accuracy.mean(0))


def train_vision(folder: Path, steps: int, batch: int, seed: int, log: Log) -> Path:
    """Trains the tower, or continues. Returns its checkpoint."""
    torch.manual_seed(seed)
    path = folder / "vision.pt"
    tower, heads = VisionTower(), PatchHeads()
    optim = Optimizers([tower, heads], muon_lr=0.01, adam_lr=2e-3)
    parts = {"tower": tower, "heads": heads, "optim": optim}
    start = load_checkpoint(path, parts)
    clock, began = Clock(120.0), time.time()
    for step in range(start, steps):
        images, labels = draw_batch((seed, 1, step), batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss, accuracy = heads(tower(patchify(images)), labels)
        loss.backward()
        optim.step(schedule(step / steps))
        if step % 50 == 0:
            log(f"vision {step} loss {loss.item():.3f} {shares(accuracy)} {time.time() - began:.0f}s")
        if clock.due():
            save_checkpoint(path, parts, step + 1)
    if start < steps:
        save_checkpoint(path, parts, steps)
        log(f"vision held-out: {held_out_accuracy(tower, heads, seed)}")
    return path
