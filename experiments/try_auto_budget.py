"""Tests whether a prompt's last queries tell the budget that it needs. They do not, so there is no `--budget auto`.

    nice -n 10 python3 scripts/dev.py python experiments/try_auto_budget.py --samples 8 --save auto.jsonl

For every prompt and budget: the change of the attention output of the last 24 queries by the dropped rows (|out_kept -
out_all|^2 / |out_all|^2, mean of heads and queries, or of the last 4 queries); the dropped attention; and the answer's
divergence from the full cache. Prints, for each statistic, its rank correlation with the divergence at each budget. For
thresholds, takes the smallest budget below the threshold for each prompt, and prints, beside fixed budgets: the mean
budget, the mean of ln(1 + KL), and the share of prompts below 0.99 agreement. Validation scenes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import scriptpath  # noqa: F401
from measure_questions import DATA, GROUPS

import pykvedge
from kvedge_lab.eval.measure import CONTEXT, CONVERSATION, Cell, MeasureOptions, Preparer
from kvedge_lab.eval.reader import BRANCH, PROMPT, Reader
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import Job, evaluate
from kvedge_lab.eval.tasks import Sample, demo_samples
from pykvedge.models.vision import Vision
from pykvedge.reference.stages.window import window_weights
from pykvedge.runtime.settings import Settings

WINDOW = 24
BUDGETS = (0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
SEEN: list[pykvedge.Layer] = []


@pykvedge.scorer("seen", queries=WINDOW)
def seen(layer: pykvedge.Layer, _: object) -> np.ndarray:
    SEEN.append(replace(layer, q=layer.q.copy(), k=layer.k.copy(), v=layer.v.copy()))
    return np.zeros(layer.k.shape[:2])


def drawn(count: int, seed: int) -> list[Sample]:
    shares = [(group, task, len(range(i, count, len(tasks)))) for group, tasks in GROUPS.items()
              for i, task in enumerate(tasks)]  # fmt: skip
    return [replace(s, task=group) for group, task, n in shares for s in demo_samples(task, n, seed, 4, "validation")]


def statistics(layers: list[pykvedge.Layer], kept: list[list[list[int]]]) -> dict[str, float]:
    """Returns means over layers, query heads and queries for one budget. kept: tokens per layer and KV head."""
    errors, dropped = [], []
    for layer, heads in zip(layers, kept, strict=True):
        group = len(layer.q) // len(layer.k)
        for h, q in enumerate(layer.q):
            weights, v = window_weights(q, layer.k[h // group], WINDOW), layer.v[h // group].astype(np.float64)
            some = np.zeros_like(weights)
            some[:, heads[h // group]] = weights[:, heads[h // group]]
            sums = some.sum(axis=1, keepdims=True)
            change = some / np.maximum(sums, 1e-30) @ v - weights @ v
            errors.append((change**2).sum(axis=1) / ((weights @ v) ** 2).sum(axis=1))
            dropped.append(1 - sums[:, 0])
    of = np.array(errors)
    return {"error": of.mean(), "error, last 4": of[:, -4:].mean(), "dropped": np.mean(dropped)}


def measure_errors(samples: list[Sample], way: str) -> dict[tuple[str, float], dict[str, float]]:
    out = {}
    with pykvedge.load(threads=1) as loaded:
        loan = loaded.lend()
        vision = Vision(loan.encoder)
        reader, preparer = Reader(loan.model, vision, 1, "f16"), Preparer(loan.model, vision, compress=way)
        for sample in samples:
            one = preparer.prepare(sample)
            [(pieces, _)] = one.turns
            reader.make_room(one.n_conversation, 1, max(one.images))
            SEEN.clear()
            reader.start(pykvedge.plan("seen", 0.5))
            reader.read(pieces)
            reader.compress()
            layers = list(SEEN)
            reader.start(pykvedge.plan("kvedge", BUDGETS[0]))
            reader.read(pieces)
            for budget in BUDGETS:
                reader.copy(BRANCH)
                reader.set_plan(pykvedge.plan("kvedge", budget))
                reader.compress()
                out[sample.id, budget] = statistics(layers, reader.pairs())
                reader.back_to(PROMPT)
            preparer.release(one.turns)
        reader.close()
        loan.give_back()
    return out


def ranks(x: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(x, kind="stable"))


def report(samples: list[Sample], errors: dict, losses: dict) -> None:
    ids = [s.id for s in samples]

    def said(chosen: list[float]) -> str:
        rows = [losses[one, budget] for one, budget in zip(ids, chosen, strict=True)]
        return (f"budget {np.mean(chosen):.3f}  ln(1 + KL) {np.mean([np.log1p(kl) for kl, _ in rows]):.4f}  "
                f"below 0.99: {100 * np.mean([top < 0.99 for _, top in rows]):.0f} %")  # fmt: skip

    for budget in BUDGETS:
        print(f"  fixed: {said([budget] * len(ids))}")
    for name in errors[ids[0], BUDGETS[0]]:
        of = [np.corrcoef(ranks([errors[i, b][name] for i in ids]), ranks([losses[i, b][0] for i in ids]))[0, 1]
              for b in BUDGETS[:4]]  # fmt: skip
        print(f"  {name}: rank correlation at {BUDGETS[:4]}: {np.round(of, 2)}")
        every = [one[name] for one in errors.values()]
        for limit in np.quantile(every, np.arange(0.1, 1, 0.1)):
            chosen = [next((b for b in BUDGETS if errors[i, b][name] < limit), BUDGETS[-1]) for i in ids]
            print(f"    below {limit:.4f}: {said(chosen)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="of each kind of question (default %(default)s)")
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl", help="keep measurements there, and go on from them")
    args = parser.parse_args()
    samples, cells = drawn(args.samples, args.seed), [Cell("kvedge", pykvedge.plan("kvedge", b)) for b in BUDGETS]
    for way in (CONTEXT, CONVERSATION):
        save = args.save and args.save.with_suffix(f".{way}.jsonl")
        job = Job(DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf", samples, cells,
                  MeasureOptions(answers=False, compress=way), Settings(threads=1))  # fmt: skip
        records = Records(save, job.header(), save is not None and save.exists())
        evaluate(job, records)
        losses = {(row["id"], row["budget"]): (row["kld"] / row["tokens"], row["top1"] / row["tokens"])
                  for row in records.rows.values() if row["method"] == "kvedge"}  # fmt: skip
        print(f"{way}, {len(samples)} questions")
        report(samples, measure_errors(samples, way), losses)


if __name__ == "__main__":
    main()
