"""Phase 2: trains the text model on the frozen tower, with two training-only losses."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from demo.checkpoint import Clock, Log, load_checkpoint, save_checkpoint
from demo.optim import Optimizers
from demo.rows import IGNORE
from demo.train_text import Goal, attention_loss, average_gradients
from demo.train_vision import schedule
from torch import Tensor, nn

from kvedge_lab.page_tasks.pages import Page, draw_page, render

from .rows import LABELS, Batch, Encoded, collate, draw_row
from .text import PageConfig, PageModel
from .tokenizer import pieces
from .vision import Heads, Tower, labels

# Layers: after CELLS_TELL, cells tell their content; after ANSWERS_TELL, an answer's position tells its source; in
# ATTEND_IN, two heads attend to the source.
CELLS_TELL, ANSWERS_TELL, ATTEND_IN, ATTEND_HEADS = 3, 5, 6, (0, 2)
TELL_WEIGHT, ATTEND_WEIGHT = 0.1, 0.3


@dataclass(frozen=True)
class Plan:
    """The training plan: steps, tokens of a batch, encoded pages to keep, and the learning rates."""

    steps: int
    tokens: int = 2400
    bank: int = 300
    fresh: int = 2  # new pages in each step
    full_share: float = 0.1  # share of batches with all empty cells
    muon_lr: float = 0.008
    adam_lr: float = 3e-3
    seed: int = 1

    def most_pages(self, step: int) -> int:
        return 3 if step < 0.3 * self.steps else 4 if step < 0.6 * self.steps else 8


class Learner(nn.Module):
    """Text model and read-outs, with the loss of a batch."""

    def __init__(self, config: PageConfig) -> None:
        super().__init__()
        self.text = PageModel(config)
        self.tell = Heads(config.width, LABELS)
        self.seek = Heads(config.width, LABELS)
        # Evens out the scale of the tower's features; the converter folds it into the merger.
        self.register_buffer("scale", torch.ones(()))

    def embed(self, batch: Batch) -> Tensor:
        x = self.text.embed(batch.ids.clamp(min=0))
        return x.index_put((batch.cell_at[:, 0], batch.cell_at[:, 1]), (batch.features * self.scale).to(x.dtype))

    def states(self, batch: Batch) -> Tensor:
        """Returns the last hidden states, [rows, tokens, width]."""
        x, table = self.embed(batch), self.text.table(batch.positions)
        for block in self.text.blocks:
            x, _, _ = block(x, table, batch.mask)
        return self.text.norm(x)

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        x, table = self.embed(batch), self.text.table(batch.positions)
        tell = seek = attend = x.new_zeros(())
        shown: dict[str, float] = {}
        for k, block in enumerate(self.text.blocks):
            x, q, key = block(x, table, batch.mask)
            if k == CELLS_TELL:
                tell, right = self.tell(x[batch.cell_at[:, 0], batch.cell_at[:, 1]], batch.labels)
                shown |= {name: right[LABELS.index(name)] for name in ("word", "key", "longest", "page")}
            if k == ANSWERS_TELL:
                seek, _ = self.seek(x[batch.source_at[:, 0], batch.source_at[:, 1]], batch.source_labels)
            if k == ATTEND_IN:
                attend = attention_loss(q, key, batch.mask, Goal(batch.source_at, batch.source_token, ATTEND_HEADS))
        learnt = batch.targets != IGNORE
        logits = self.text.head(self.text.norm(x[learnt])).float()
        token = F.cross_entropy(logits, batch.targets[learnt])
        right = (logits.argmax(-1) == batch.targets[learnt]).float().mean()
        loss = token + TELL_WEIGHT * (tell + seek) + ATTEND_WEIGHT * attend
        parts = {"token": token, "tell": tell, "seek": seek, "attend": attend, "right": right}
        return loss, {n: v.item() for n, v in parts.items()} | shown


@torch.no_grad()
def encode_pages(tower: Tower, pages: Sequence[Page], dtype: torch.dtype = torch.bfloat16) -> list[Encoded]:
    out = []
    for page in pages:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            features = tower([render(page)])[0].float()
        out.append(Encoded(page, features, labels(page)))
    return out


class Bank:
    """Encoded pages. Each step replaces only some, because the tower takes longer than a step of the text model."""

    def __init__(self, tower: Tower, plan: Plan, rank: int, start: int) -> None:
        self.tower, self.plan, self.rank = tower, plan, rank
        self.pages = self._draw(start, plan.bank)

    def _draw(self, step: int, amount: int) -> list[Encoded]:
        rng = np.random.default_rng((self.plan.seed, 3, self.rank, step, amount))
        return encode_pages(self.tower, [draw_page(rng) for _ in range(amount)])

    def batch(self, step: int, several: bool) -> Batch:
        """Draws one or several pages for each row. Most batches have some of the empty cells, some have all."""
        rng = np.random.default_rng((self.plan.seed, 4, self.rank, step, int(several)))
        count = int(rng.integers(2, self.plan.most_pages(step) + 1)) if several else 1
        plain = -1 if count <= 4 and rng.random() < self.plan.full_share else int(rng.integers(0, 60))
        per_row = count * (95 + (260 if plain < 0 else plain)) + 190
        rows = []
        for _ in range(max(1 + (not several), self.plan.tokens // per_row)):
            drawn = rng.choice(len(self.pages), count, replace=False)
            rows.append(draw_row(rng, [self.pages[n] for n in drawn], plain))
        return collate(rows)

    def refresh(self, step: int) -> None:
        for n, page in enumerate(self._draw(step, self.plan.fresh)):
            self.pages[(step * self.plan.fresh + n) % len(self.pages)] = page


def load_tower(folder: Path) -> Tower:
    tower = Tower().requires_grad_(False).eval()
    tower.load_state_dict(torch.load(folder / "vision.pt", map_location="cpu", weights_only=True)["tower"])
    return tower


def make_learner(seed: int, tower: Tower) -> Learner:
    torch.manual_seed(seed)
    learner = Learner(PageConfig(vocab=len(pieces())))
    rng = np.random.default_rng(seed)
    features = torch.cat([one.features for one in encode_pages(tower, [draw_page(rng) for _ in range(6)])])
    learner.scale.fill_(1 / features.pow(2).mean().sqrt())
    return learner


def train_text(folder: Path, plan: Plan, rank: int = 0) -> Path:
    """Trains, or continues. plan.steps counts from the beginning, and the rate decays towards the last step."""
    path, tower = folder / "text.pt", load_tower(folder)
    learner = make_learner(plan.seed, tower)
    optim = Optimizers([learner], plan.muon_lr, plan.adam_lr)
    parts = {"learner": learner, "optim": optim}
    start = load_checkpoint(path, parts)
    bank, clock, began = Bank(tower, plan, rank, start), Clock(120.0), time.time()
    log, sums = Log(folder / "train.log"), dict[str, float]()
    for step in range(start, plan.steps):
        for several in (False, True):
            with torch.autocast("cpu", torch.bfloat16):
                loss, shown = learner(bank.batch(step, several))
            (loss / 2).backward()
            for name, value in shown.items():
                key = ("many." if several else "one.") + name
                sums[key] = sums.get(key, 0.0) + value
        average_gradients(learner)
        optim.step(schedule(step / plan.steps, warm=0.01))
        bank.refresh(step)
        if rank == 0 and (step + 1) % 25 == 0:
            line = {"step": step + 1, "s": round(time.time() - began)}
            log(json.dumps(line | {n: round(v / 25, 3) for n, v in sums.items()}))
            sums = {}
        if rank == 0 and clock.due():
            save_checkpoint(path, parts, step + 1)
    if rank == 0 and start < plan.steps:
        save_checkpoint(path, parts, plan.steps)
    return path
