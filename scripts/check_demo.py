"""Measure GGUF files of the demo model in llama.cpp, on held-out samples, greedily.

    python scripts/check_demo.py MODEL MMPROJ --samples 200

Prints JSON: percent exact and mean ROUGE-L of each task and turn; with --torch OUT (a folder of train_demo.py) also
the share of answers that the PyTorch model gives alike. The llama.cpp is the one that the llama_cpp bindings load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.gguf_run import GgufModel, gguf_accuracy

from pykvedge.lab.demo_tasks.evalset import samples
from pykvedge.lab.demo_tasks.tasks import TASKS


def agreement(model: GgufModel, folder: Path, count: int, images: int) -> dict[str, float]:
    """Counts the percent of a task's samples, in both turns, that PyTorch and llama.cpp answer with the same text."""
    from demo.evaluate import generate
    from demo.train_text import load_learner, load_tower

    learner, tower = load_learner(folder, 1), load_tower(folder)
    table = {}
    for task in TASKS:
        chosen = [s for turn in (False, True) for s in itertools.islice(samples(task, 1, images, turn), count // 2)]
        same = sum(generate(learner, tower, s) == model.answer_sample(s) for s in chosen)
        table[task] = 100 * same / len(chosen)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("mmproj", type=Path)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--images", type=int, default=4, help="images of the needle tasks")
    parser.add_argument("--torch", type=Path, help="folder of the PyTorch checkpoints to compare with")
    parser.add_argument("--agreement-samples", type=int, default=50)
    args = parser.parse_args()
    model = GgufModel(args.model, args.mmproj)
    table = gguf_accuracy(model, args.samples, args.images)
    result: dict[str, object] = {n: {"exact": e, "rouge_l": round(r, 4)} for n, (e, r) in table.items()}
    if args.torch is not None:
        result["agreement"] = agreement(model, args.torch, args.agreement_samples, args.images)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
