"""Random operations of the C interface and of unpatched llama.cpp: both must give the same logits.

    .venv/bin/python scripts/random_walk.py MODEL.gguf [--steps 100000] [--seed N] [--rpc HOST:PORT]

Operations: prompts and answers of several sequences in common batches; copies of a sequence or a part; cuts; clears.
kvedge also compresses with plans that keep everything, and saves and loads sequences. With --rpc, kvedge's model and
rows are on that server. Both sides compute in float32. If the weights of MODEL are float32, only rounding differs;
other weights round activations to f16 or less, which enlarges small differences. A walk of many steps is many walks of
2000 steps with consecutive seeds, so that a failed walk can be repeated quickly.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from llama_source import ROOT, SourceError, ended, log

from kvedge_lab.eval.metrics import divergence, log_softmax

WORKER = Path(__file__).with_name("walk_worker.py")
STEPS = 2000  # steps of one walk
TOLERANCE = 1e-8  # KL of the next token's distribution, in nats; a thousand times the measured value


def largest_divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest KL(reference || other) of rows of logits, in nats."""
    return max(divergence(p, q) for p, q in zip(log_softmax(reference), log_softmax(other), strict=True))


def walk(
    model: Path, steps: int, seed: int, stock: Path, env: dict[str, str], server: str = ""
) -> tuple[int, float]:
    """Returns the number of compared logits and the largest divergence. server: HOST:PORT of kvedge's rows; "": host.

    Raises SourceError when a side fails.
    """
    outside = {k: v for k, v in env.items() if k != "KVEDGE_LIB_DIR"}
    sides = {"stock": {**outside, "LLAMA_CPP_LIB_PATH": str(stock)}, "ours": env}
    with tempfile.TemporaryDirectory(prefix="kvedge-walk-") as folder:
        found = []
        for side, its_env in sides.items():
            out = Path(folder) / f"{side}.npy"
            command = [sys.executable, str(WORKER), side, str(model), str(out), str(steps), str(seed)]
            command += [server] if server and side == "ours" else []
            done = subprocess.run(command, env=its_env, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SourceError(f"{side}, seed {seed}: code {done.returncode}: {done.stderr[-2000:]}")
            found.append(np.load(out))
    if found[0].shape != found[1].shape or not np.isfinite(found[1]).all():
        raise SourceError(f"seed {seed}: {found[0].shape} and {found[1].shape} logits, or some that are no numbers")
    return len(found[0]), largest_divergence(*found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rpc", default="", metavar="HOST:PORT", help="where kvedge's model and rows lie")
    args = parser.parse_args()
    stock = Path(os.environ.get("KVEDGE_STOCK_DIR", ROOT / "build" / "stock" / "lib"))
    failed = 0
    for i, done in enumerate(range(0, args.steps, STEPS)):
        n, worst = walk(args.model, min(STEPS, args.steps - done), args.seed + i, stock, dict(os.environ), args.rpc)
        failed += worst > TOLERANCE
        log(f"seed {args.seed + i}: {n} logits, divergence up to {worst:.2e}{' FAILED' if worst > TOLERANCE else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(ended(main))
