"""kvedge against llama.cpp on a device of this machine: speed of prompts and answers, and memory there, for
docs/results/devices.md.

    python3 scripts/dev.py build -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90     # once; macOS needs no option
    python3 scripts/dev.py python scripts/measure_device.py --output devices.json

Without --model it writes two models of random weights, one with as many key as query heads (1.4 B), one with fewer
(2 B). Each length of prompt is a run of its own of `kvedge bench`, in which stock and all variants take turns; one that
does not fit, or would begin after --minutes, is said to be left out. Nothing is fetched from a network. Device memory:
what kvedge holds there after the prompt and after the answer, and, where nvidia-smi is, the most that the device said
was in use.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from llama_source import log
from measuring import show

SHAPES = ("llava-1.4b", "qwen2-vl-2b")
COLUMNS = ("model", "tokens", "variant", "prefill_vs_stock", "decode_vs_stock", "prefill_tok_s", "decode_tok_s",
           "device_prompt_bytes", "device_bytes", "device_used_mib")  # fmt: skip


class Watch:
    """Looks at what nvidia-smi says is in use, four times a second; most stays 0 where there is none."""

    def __init__(self) -> None:
        self.most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which(command[0]) and not self._over.wait(0.25):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            used = [int(word) for word in done.stdout.split() if word.isdecimal()]
            self.most = max([self.most, *used])

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most


def models(args: argparse.Namespace, folder: Path) -> list[Path]:
    """The models to measure, made where none was named."""
    if args.model:
        return args.model
    made = []
    for shape in SHAPES:
        log(f"writing a model of the shape of {shape}")
        writer = [sys.executable, str(Path(__file__).with_name("make_shape_model.py")), shape]
        subprocess.run([*writer, "--vision", "none", "-o", str(folder / shape)], check=True, stdout=subprocess.DEVNULL)
        made.append(folder / shape / "model.gguf")
    return made


def bench(args: argparse.Namespace, model: Path, tokens: int, left_s: float) -> list[dict[str, Any]]:
    """Measures one model and one length. Returns no row where the run failed or took longer than there was."""
    command = [sys.executable, "-m", "pykvedge", "bench", "--model", model, "--images", 0, "--tokens", tokens]
    command += ["--method", args.method, "--budget", args.budget, "--generate", args.generate, "--repeat", args.repeat]
    command += ["--device", args.device, "--rpc", args.rpc, "--json"]
    command += [] if args.device == "CPU" else ["--gpu-layers", -1]
    watch = Watch()
    try:
        done = subprocess.run(
            [str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False, timeout=left_s
        )
        out = (
            json.loads(done.stdout)
            if done.returncode in (0, 1) and done.stdout
            else {"rows": [], "left_out": ["it failed"]}
        )
    except subprocess.TimeoutExpired:
        out = {"rows": [], "left_out": ["there was no time left"]}
    used = watch.end()
    for line in out["left_out"]:
        log(f"{model.parent.name}, {tokens} tokens: {line}")
    return [{**row, "model": model.parent.name, "device_used_mib": used} for row in out["rows"]]


def main() -> int:
    """Prints a table and writes JSON. Exit code: 1 where nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, action="append", default=[], help="a GGUF file instead of the two; repeatable")
    add("--device", default="auto", help="as kvedge chat has it; CPU: the device's code on the processor")
    add("--rpc", default="", help="RPC servers instead, HOST:PORT")
    add("--tokens", default="2048,16384,65536", help="lengths of the prompt (default %(default)s)")
    add("--method", default="full,knorm,snapkv,lookm", help="(default %(default)s)")
    add("--budget", default="0.2", help="(default %(default)s)")
    add("--generate", type=int, default=64, help="tokens of the answer (default %(default)s)")
    add("--repeat", type=int, default=2, help="rounds (default %(default)s)")
    add("--minutes", type=float, default=9.0, help="no run begins after so many (default %(default)s)")
    add("--output", type=Path, help="where the rows go as JSON, after every run")
    add("--json", action="store_true")
    args = parser.parse_args()
    end, rows = time.monotonic() + 60 * args.minutes, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        there = models(args, Path(folder))
        for tokens in map(int, args.tokens.split(",")):
            for model in there:
                if (left := end - time.monotonic()) > 0:
                    rows += bench(args, model, tokens, left)
                else:
                    log(f"{model.parent.name}, {tokens} tokens left out: there was no time left")
                if args.output:
                    args.output.write_text(json.dumps(rows, indent=1))
    if rows:
        show([{name: row[name] for name in COLUMNS} for row in rows], args.json)
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
