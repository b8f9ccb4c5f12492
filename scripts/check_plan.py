"""Compare `kvedge fit` with measured runs: peak resident memory of `kvedge chat`, for shapes and methods.

    python scripts/check_plan.py DIR...     each with model.gguf and mmproj.gguf, as make_shape_model.py writes them

Exit code 1 if a plan is off by more than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORDS = "There is a garden with a wall of old stones behind the house. "


def _kvedge(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "pykvedge", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"check_plan: {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _compare(folder: Path, method: str, budget: str, picture: Path, args: argparse.Namespace) -> dict[str, Any]:
    files = [folder / "model.gguf", "--mmproj", folder / "mmproj.gguf"]
    common = ["--method", method, "--budget", budget, "--threads", args.threads, "--json"]
    images = ["--image", picture] * args.images
    prompt = WORDS * args.sentences
    run = _kvedge("chat", "--model", *files, *common, *images, "--max-tokens", 1, "--quiet", prompt)
    tokens = run["tokens"]
    size = f"{args.width}x{args.height}"
    text = tokens["prompt"] - tokens["image"]
    plan = _kvedge("plan", *files, *common, "--images", args.images, "--image-size", size, "--text", text)
    planned, measured = plan["bytes"]["peak_prefill"], run["rss"]["peak_bytes"]
    return {
        "model": folder.name,
        "method": f"{method} {budget}",
        "prompt_tokens": tokens["prompt"],
        "image_tokens_planned": plan["images"] * plan["image_tokens"],
        "image_tokens": tokens["image"],
        "planned_bytes": planned,
        "measured_bytes": measured,
        "off": planned / measured - 1,
        "kv_planned_bytes": plan["bytes"]["kv_prompt"],
        "kv_bytes": run["kv"]["full_bytes"],
    }


def main() -> None:
    """Runs every shape by every method, and prints a row for each as it comes."""
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--method", nargs="+", default=["full:1.0", "lookm:0.2"], metavar="NAME:BUDGET")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--width", type=int, default=560)
    parser.add_argument("--height", type=int, default=420)
    parser.add_argument("--sentences", type=int, default=4, help="of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON list instead of a table")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "picture.png"
        Image.linear_gradient("L").resize((args.width, args.height)).convert("RGB").save(picture)
        if not args.as_json:
            print("| model | method | prompt (image) | planned MiB | measured MiB | off |\n|---|---|--:|--:|--:|--:|")
        for model in args.folders:
            for chosen in args.methods:
                method, _, budget = chosen.partition(":")
                row = _compare(model, method, budget or "0.2", picture, args)
                rows.append(row)
                if not args.as_json:
                    print(
                        f"| {row['model']} | {row['method']} | {row['prompt_tokens']} ({row['image_tokens']}) "
                        f"| {row['planned_bytes'] / 2**20:.0f} | {row['measured_bytes'] / 2**20:.0f} "
                        f"| {row['off']:+.1%} |",
                        flush=True,
                    )
    if args.as_json:
        print(json.dumps(rows))
    sys.exit(any(abs(row["off"]) > args.tolerance for row in rows))


if __name__ == "__main__":
    main()
