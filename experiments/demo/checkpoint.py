"""The log and the checkpoints of a run. Only a complete checkpoint replaces the old one, so a kill does no harm."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

Learner = TypeVar("Learner", bound=nn.Module)


class Log:
    """Writes lines to stderr, and to a file beside the weights."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Clock:
    """Tells when the next checkpoint is due."""

    def __init__(self, every_s: float) -> None:
        self.every, self.last = every_s, time.time()

    def due(self) -> bool:
        if time.time() - self.last < self.every:
            return False
        self.last = time.time()
        return True


def save_checkpoint(path: Path, parts: dict[str, Any], step: int) -> None:
    """Saves the parts. Batches are drawn from (seed, step), so the step is the whole random state."""
    scratch = path.with_suffix(".tmp")
    torch.save({"step": step, **{k: p.state_dict() for k, p in parts.items()}}, scratch)
    scratch.replace(path)


def load_checkpoint(path: Path, parts: dict[str, Any]) -> int:
    """Loads the parts from the file, if it exists. Returns the step to continue from, 0 without a file."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


def load_learner(folder: Path, learner: Learner) -> Learner:
    """Loads the trained weights of the folder into a new learner."""
    learner.load_state_dict(torch.load(folder / "text.pt", map_location="cpu", weights_only=True)["learner"])
    return learner.eval()
