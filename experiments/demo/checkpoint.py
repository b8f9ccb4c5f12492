"""What a run leaves: its log, and checkpoints, written beside the old one so that a killed run finds a whole file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

Learner = TypeVar("Learner", bound=nn.Module)


class Log:
    """Writes lines to stderr, and to a file that stays with the weights."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Clock:
    """Says when the next checkpoint is due."""

    def __init__(self, every_s: float) -> None:
        self.every, self.last = every_s, time.time()

    def due(self) -> bool:
        if time.time() - self.last < self.every:
            return False
        self.last = time.time()
        return True


def save_checkpoint(path: Path, parts: dict[str, Any], step: int) -> None:
    """Every batch is drawn from (seed, step), so the step is the whole state of the random numbers."""
    scratch = path.with_suffix(".tmp")
    torch.save({"step": step, **{k: p.state_dict() for k, p in parts.items()}}, scratch)
    scratch.replace(path)


def load_checkpoint(path: Path, parts: dict[str, Any]) -> int:
    """Fill the parts from the file, if there is one; the step to go on from."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


def load_learner(folder: Path, learner: Learner) -> Learner:
    """Fill a new learner with the trained weights of the folder."""
    learner.load_state_dict(torch.load(folder / "text.pt", map_location="cpu", weights_only=True)["learner"])
    return learner.eval()
