"""Phase 2: trains projector and text model on the frozen vision tower, with two training-only losses."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvedge_lab.demo_tasks.scenes import GRID, render

from .checkpoint import Clock, Log, load_checkpoint, save_checkpoint
from .optim import Optimizers
from .rows import IGNORE, Batch, RowMaker, collate, draw_row
from .text import Projector, TextConfig, TextModel
from .tokenizer import Tokenizer
from .train_vision import schedule
from .vision import PATCH_TARGETS, VisionConfig, VisionTower, patch_labels, patchify

PROBE_AFTER, ATTEND_IN, ATTEND_HEADS, COMPARE_IN, COMPARE_HEAD = 1, 3, (0, 2), 1, 1
PROBE_WEIGHT, ATTEND_WEIGHT, COMPARE_WEIGHT = 0.1, 0.3, 0.1
PROBE_SIZES = {
    "image": 8,
    "kind": PATCH_TARGETS["kind"],
    "colour": PATCH_TARGETS["colour"],
    "region": 9,
    "ordinal": PATCH_TARGETS["ordinal"],
    "same": PATCH_TARGETS["same"],
    "last": 2,
    "before": PATCH_TARGETS["colour"],
}


@dataclass(frozen=True)
class Plan:
    """The training plan: steps, images per prompt at most, plain patches, and the learning rates."""

    steps: int
    max_images: int = 4
    late_images: int = 8
    late_from: float = 0.5
    tokens: int = 3200
    full_share: float = 0.1
    muon_lr: float = 0.008
    adam_lr: float = 3e-3
    seed: int = 1


class Learner(nn.Module):
    """Projector, text model and the probe, with the loss of a batch."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.projector = Projector(config.width)
        self.text = TextModel(config)
        self.probe = nn.Linear(config.width, sum(PROBE_SIZES.values()))
        self.tokenizer = Tokenizer()

    def embed(self, batch: Batch, features: Tensor) -> Tensor:
        x = self.text.embed(batch.ids.clamp(min=0))
        image = self.projector(features[batch.patch_of[:, 0], batch.patch_of[:, 1]])
        return x.index_put((batch.patch_at[:, 0], batch.patch_at[:, 1]), image.to(x.dtype))

    def forward(self, batch: Batch, features: Tensor) -> tuple[Tensor, dict[str, float]]:
        x = self.embed(batch, features)
        table = self.text.table(batch.positions)
        probe = attend = compare = x.new_zeros(())
        for k, block in enumerate(self.text.blocks):
            x, q, key = block(x, table, batch.mask)
            if k == PROBE_AFTER:
                probe = self.probe_loss(x, batch)
            if k == ATTEND_IN:
                goal = Goal(batch.source_at, batch.source_tokens, ATTEND_HEADS)
                attend = attention_loss(q, key, batch.mask, goal)
            if k == COMPARE_IN and len(batch.pairs):
                goal = Goal(batch.pairs[:, :2], batch.pairs[:, 2:3], (COMPARE_HEAD,))
                compare = attention_loss(q, key, batch.mask, goal)
        learnt = batch.targets != IGNORE
        logits = self.text.head(self.text.norm(x[learnt])).float()
        token = F.cross_entropy(logits, batch.targets[learnt])
        right = (logits.argmax(-1) == batch.targets[learnt]).float().mean()
        shown = {"token": token, "probe": probe, "attend": attend, "compare": compare, "right": right}
        loss = token + PROBE_WEIGHT * probe + ATTEND_WEIGHT * attend + COMPARE_WEIGHT * compare
        return loss, {n: v.item() for n, v in shown.items()}

    def probe_loss(self, x: Tensor, batch: Batch) -> Tensor:
        """Loss of the probe: patches, and positions that predict an answer, must tell what the patch shows."""
        labels = probe_labels(batch)
        image = x[batch.patch_at[:, 0], batch.patch_at[:, 1]]
        answer = x[batch.source_at[:, 0], batch.source_at[:, 1]]
        shown = labels[:, 1] > 0
        loss = x.new_zeros(())
        for states, target in ((image[shown], labels[shown]), (answer, labels[batch.source_labels])):
            for k, part in enumerate(self.probe(states).float().split(list(PROBE_SIZES.values()), -1)):
                if (target[:, k] != IGNORE).any():
                    loss = loss + F.cross_entropy(part, target[:, k], ignore_index=IGNORE)
        return loss


def probe_labels(batch: Batch) -> Tensor:
    labels = torch.from_numpy(np.stack([patch_labels(s) for s in batch.scenes])).long()
    of = labels[batch.patch_of[:, 0], batch.patch_of[:, 1]]
    region = of[:, 5] * 3 // GRID * 3 + of[:, 6] * 3 // GRID
    kind, colour, ordinal, same, last = of[:, :5].unbind(-1)
    return torch.stack((batch.patch_image, kind, colour, region, ordinal, same, last, batch.patch_before), -1)


@dataclass(frozen=True)
class Goal:
    """Tokens [n, 2] of a batch that should attend to tokens [n, m] of their row (-1: none), in these heads."""

    at: Tensor
    to: Tensor
    heads: tuple[int, ...]


def attention_loss(q: Tensor, k: Tensor, mask: Tensor, goal: Goal) -> Tensor:
    """Returns -log of the attention that the heads give to their goal."""
    row, token = goal.at[:, 0], goal.at[:, 1]
    groups = q.shape[1] // k.shape[1]
    loss = q.new_zeros(())
    seen = mask[row, 0, token].float()
    for head in goal.heads:
        query, keys = q[row, head, token], k[:, head // groups]
        parts = [query[row == b] @ keys[b].T for b in range(keys.shape[0])]
        share = (torch.cat(parts).float() * q.shape[-1] ** -0.5 + seen).softmax(-1)
        found = share.gather(1, goal.to.clamp(min=0)) * (goal.to >= 0)
        loss = loss - (found.sum(-1) + 1e-4).log().mean()
    return loss / len(goal.heads)


def draw_batch(maker: RowMaker, plan: Plan, key: tuple[int, ...], several: bool) -> Batch:
    """Draws one or several images for each row. Most batches have some of the plain patches, some have all."""
    rng = np.random.default_rng((plan.seed, 2, *key, int(several)))
    late = key[-1] >= plan.late_from * plan.steps
    count = int(rng.integers(2, (plan.late_images if late else plan.max_images) + 1)) if several else 1
    background = 144 if rng.random() < plan.full_share else int(rng.integers(6, 40))
    per_row = count * (background + 16) + 230
    return collate([draw_row(maker, rng, count, background) for _ in range(max(2, plan.tokens // per_row))])


def image_features(tower: VisionTower, batch: Batch) -> Tensor:
    images = torch.from_numpy(np.stack([render(s) for s in batch.scenes]))
    with torch.no_grad():
        return torch.cat([tower(patchify(part)) for part in images.split(32)])


def average_gradients(learner: nn.Module) -> None:
    if not dist.is_initialized():
        return
    grads = [p.grad for p in learner.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))


def load_tower(folder: Path) -> VisionTower:
    tower = VisionTower().requires_grad_(False).eval()
    tower.load_state_dict(torch.load(folder / "vision.pt", map_location="cpu", weights_only=True)["tower"])
    return tower


def make_learner(seed: int, tower: VisionTower) -> Learner:
    torch.manual_seed(seed)
    learner = Learner(TextConfig(vocab=len(Tokenizer())))
    sample = draw_batch(RowMaker(Tokenizer()), Plan(1, seed=seed), (0, 10**6), True)
    learner.projector.match_scale(image_features(tower, sample))
    assert tower.patch.out_features == VisionConfig.width
    return learner


def train_text(folder: Path, plan: Plan, rank: int = 0) -> Path:
    """Trains, or continues. plan.steps counts from the beginning, and the rate decays towards the last step."""
    path = folder / "text.pt"
    tower = load_tower(folder)
    learner = make_learner(plan.seed, tower)
    optim = Optimizers([learner], plan.muon_lr, plan.adam_lr)
    parts = {"learner": learner, "optim": optim}
    start = load_checkpoint(path, parts)
    maker, clock, began = RowMaker(Tokenizer()), Clock(120.0), time.time()
    log, sums = Log(folder / "train.log"), {}
    for step in range(start, plan.steps):
        for several in (False, True):
            with torch.autocast("cpu", torch.bfloat16):
                batch = draw_batch(maker, plan, (rank, step), several)
                loss, shown = learner(batch, image_features(tower, batch))
            (loss / 2).backward()
            for name, value in shown.items():
                key = ("many." if several else "one.") + name
                sums[key] = sums.get(key, 0.0) + value
        average_gradients(learner)
        optim.step(schedule(step / plan.steps, warm=0.01))
        if rank == 0 and (step + 1) % 25 == 0:
            line = {"step": step + 1, "s": round(time.time() - began)}
            log(json.dumps(line | {n: round(v / 25, 3) for n, v in sums.items()}))
            sums = {}
        if rank == 0 and clock.due():
            save_checkpoint(path, parts, step + 1)
    if rank == 0 and start < plan.steps:
        save_checkpoint(path, parts, plan.steps)
    return path
