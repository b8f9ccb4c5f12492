"""Measures kvedge against llama.cpp on a device of this machine, for docs/results/devices.md: first token, answers,
later messages, device memory, and the cost of a compression there.

    python3 scripts/dev.py build -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90     # once; macOS needs no option
    python3 scripts/dev.py python scripts/measure_device.py --output devices.json --plot devices.svg

Without --model, two models with random weights are written: one with as many KV heads as query heads (1.4 B), one with
fewer (2 B). Each --run is a separate run of `kvedge bench`, where stock, full and all methods take turns. A run that
does not fit, or would begin after --minutes, is left out with a note. Nothing is fetched from a network. A later
message has 32 tokens and follows the answer.

Columns: *_vs_stock: llama.cpp's seconds divided by kvedge's; more than 1 is faster. first_token: prefill and
compression. device_peak_vs_cache: (peak of device memory - llama.cpp's memory without its cache) / that cache.
device_fetched_row: bytes from the device for each pending row of a KV head. *_ms: the compression and its steps.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from llama_source import ended, log

from pykvedge.cli.tables import markdown

SHAPES = ("llava-1.4b", "qwen2-vl-2b")
METHODS = "snapkv,kvedge,lookm,flashcache"
RUNS = (f"2048x5:{METHODS}", f"16384x3:{METHODS}", "65536x1:snapkv,kvedge")
LATER = 32
STEPS = [f"device_{step}_ms" for step in ("measure", "choose", "gather", "merge", "upload")]
COLUMNS = ["model", "tokens", "variant", "first_token_s", "first_token_vs_stock", "decode_vs_stock", "later_vs_stock",
           "device_peak_vs_cache", "device_compressed", "device_fetched_row", "device_operations", "compress_ms",
           *STEPS]  # fmt: skip


def run_of(text: str) -> tuple[int, int, str]:
    """Parses TOKENSxROUNDS:METHODS."""
    found = re.fullmatch(r"(\d+)x(\d+):([\w,-]+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is not TOKENSxROUNDS:METHODS, as in {RUNS[0]}")
    return int(found[1]), int(found[2]), found[3]


def models(args: argparse.Namespace, folder: Path) -> list[Path]:
    """Returns the models to measure. Without --model, writes the missing models of SHAPES."""
    if args.model:
        return args.model
    script = Path(__file__).with_name("make_shape_model.py")
    for shape in SHAPES:
        if not (folder / shape / "model.gguf").is_file():
            log(f"writing a model of the shape of {shape}")
            command = [sys.executable, str(script), shape, "--vision", "none", "-o", str(folder / shape)]
            subprocess.run(command, stdout=sys.stderr, check=True)
    return [folder / shape / "model.gguf" for shape in SHAPES]


def bench(args: argparse.Namespace, model: Path, run: tuple[int, int, str], left_s: float) -> list[dict[str, Any]]:
    """Measures one model and one length. Returns no rows if the run fails or takes more than left_s seconds."""
    tokens, rounds, methods = run
    command = [sys.executable, "-m", "pykvedge", "bench", "--model", model, "--images", 0, "--tokens", tokens]
    command += ["--method", methods, "--budget", args.budget, "--generate", args.generate, "--repeat", rounds]
    command += ["--later", LATER, "--device-peak", "--device", args.device, "--rpc", args.rpc, "--json"]
    command += [] if args.device == "CPU" else ["--gpu-layers", -1]
    try:
        done = subprocess.run(
            [str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False, timeout=left_s
        )
        measured = done.returncode in (0, 1) and done.stdout
        out = json.loads(done.stdout) if measured else {"rows": [], "left_out": ["it failed"]}
    except subprocess.TimeoutExpired:
        out = {"rows": [], "left_out": ["there was no time left"]}
    for line in out["left_out"]:
        log(f"{model.parent.name}, {tokens} tokens: {line}")
    return out["rows"]


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draws the plot of `kvedge bench --plot` for all runs."""
    from kvedge_lab.bench import plot
    from kvedge_lab.bench.table import Row

    names = [field.name for field in fields(Row)]
    plot.write(path, [Row(**{name: row[name] for name in names}) for row in rows], [])


def cells(row: dict[str, Any]) -> list[str]:
    """Returns the cells of one line of the table."""
    return [f"{v:.2f}" if isinstance(v, float) else "" if v is None else str(v) for v in map(row.get, COLUMNS)]


def main() -> int:
    """Prints a table and writes JSON. Exit code 1: nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, action="append", default=[], help="a GGUF file instead of the two; repeatable")
    add("--folder", type=Path, help="where the two are, or are written, and stay; else in a temporary folder")
    add("--device", default="auto", help="as kvedge chat has it; CPU: the device's code on the processor")
    add("--rpc", default="", help="RPC servers instead, HOST:PORT")
    add("--run", type=run_of, action="append", metavar="TOKENSxROUNDS:METHODS",
        help=f"a length of the prompt, how often, and by what; repeatable (default {' '.join(RUNS)})")  # fmt: skip
    add("--budget", default="0.2", help="(default %(default)s)")
    add("--generate", type=int, default=64, help="tokens of the answer (default %(default)s)")
    add("--minutes", type=float, default=9.0, help="no run begins after so many (default %(default)s)")
    add("--output", type=Path, help="where the rows go as JSON, after every run")
    add("--plot", type=Path, help="a picture of them, after every run: .svg, .html, or .png with matplotlib")
    add("--json", action="store_true")
    args = parser.parse_args()
    end, rows = time.monotonic() + 60 * args.minutes, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        there = models(args, args.folder or Path(folder))
        for run in args.run or map(run_of, RUNS):
            for model in there:
                if (left := end - time.monotonic()) > 0:
                    rows += bench(args, model, run, left)
                else:
                    log(f"{model.parent.name}, {run[0]} tokens left out: there was no time left")
                if args.output:
                    args.output.write_text(json.dumps(rows, indent=1))
                if args.plot and rows:
                    draw(args.plot, rows)
    if rows:
        print(json.dumps(rows, indent=2) if args.json else markdown([COLUMNS, *map(cells, rows)]))
        for row in rows:
            if row["device_problem"]:
                log(f"{row['model']}, {row['tokens']} tokens, {row['variant']}: {row['device_problem']}")
    return int(not rows)


if __name__ == "__main__":
    sys.exit(ended(main))
