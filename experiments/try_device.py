"""Compares conversations on a device of ggml with the same on the host: the kept pairs and the answers of each method.

    python3 scripts/dev.py python experiments/try_device.py vulkan
    python3 scripts/dev.py python experiments/try_device.py vulkan -DVulkan_INCLUDE_DIR=... --model demo --method adakv
    python3 scripts/dev.py python experiments/try_device.py cuda -DCMAKE_CUDA_ARCHITECTURES=86 --model model.gguf
    python3 scripts/dev.py python experiments/try_device.py cuda --built-in      # after dev.py build -DGGML_CUDA=ON

Builds the backend as a module in build/BACKEND, if it is missing, and loads it beside the installed libraries; or uses
a backend in the libraries (--built-in).
Without --model it asks the packaged model about a picture, and tiny models with random weights: with heads that have
flash attention on every device, and as many KV heads as query heads; with heads that do not, and half as many; with
M-RoPE. First, llama.cpp alone and kvedge's uncompressed cache read the same prompt on the device: the distance of the
logits, and the number of graph splits of both. Software devices count too: Vulkan on Mesa's lavapipe needs Mesa 25,
headers of Vulkan 1.4 and GGML_VK_VISIBLE_DEVICES=0, and compiles its shaders for minutes the first time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401
from build_stock import cmake, find_build
from llama_source import ROOT, SourceError, ended, log
from modelgen.tiny import default_spec, write_tiny

sys.path.insert(0, str(ROOT / "tests"))
WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. "
MESSAGES = ((WORDS * 5, ()), (WORDS * 2, ()))
QUESTIONS = (("What is the code?", (str(ROOT / "examples" / "scene-1.png"),)), ("What shape is red?", ()))
OTHERS, KL = 0.05, 1e-4  # limits of what rounding explains: share of other pairs, nats


@dataclass(frozen=True)
class Tried:
    """A model and the questions for it."""

    name: str
    model: Path
    mmproj: Path | None = None
    messages: Any = MESSAGES


def build(backend: str, given: list[str]) -> Path:
    """Builds the module of a backend and returns its file. Raises SourceError."""
    tree, folder = find_build() / "llama.cpp", ROOT / "build" / backend
    off = dict.fromkeys(("NATIVE", "CPU", "RPC"), "OFF")
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "GGML_BACKEND_DL": "ON",
        "CMAKE_PROJECT_llama.cpp_INCLUDE": (ROOT / "cmake" / "OwnOperations.cmake").as_posix(),
        f"GGML_{backend.upper()}": "ON",
        **{f"GGML_{name}": value for name, value in off.items()},
        **{f"LLAMA_BUILD_{part}": "OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")},
        **dict(option.removeprefix("-D").split("=", 1) for option in given),
    }
    cmake(tree, folder, options, f"ggml-{backend}")
    found = [*folder.glob(f"bin/*ggml-{backend}.*")]
    if not found:
        raise SourceError(f"{folder} holds no module of {backend} after its build")
    return found[0]


def models(asked: list[str], folder: Path) -> list[Tried]:
    """Returns the models to try: the named models, or the packaged model and tiny models."""
    import pykvedge

    data = Path(pykvedge.__file__).parent / "data"
    demo = Tried("demo", data / "demo-model.gguf", data / "demo-mmproj.gguf", QUESTIONS)
    if asked:
        return [demo if name == "demo" else Tried(Path(name).stem, Path(name)) for name in asked]
    wide = replace(default_spec("llama"), head_size=64, n_heads=8, n_heads_kv=8)
    return [
        demo,
        Tried("heads of 64", write_tiny("llama", folder / "wide", spec=wide)[0]),
        Tried("heads of 32", write_tiny("llama", folder / "narrow")[0]),
        Tried("M-RoPE", write_tiny("qwen2vl", folder / "mrope")[0]),
    ]


def cases(tried: list[Tried], methods: list[str], folder: Path) -> list[dict[str, Any]]:
    """Returns the conversations for the worker."""
    from attached import case_of
    from profilefiles import write_profile

    def profile_file(model: Path, kind: str) -> Path:
        return write_profile(model, kind, folder)

    return [
        {"name": f"{of.name}, {method}", **case_of(of, method, of.messages, profile_file)}
        for of in tried
        for method in methods
    ]


def work(worker: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a job in a separate process, because devices stay until a process ends. Raises SourceError if it fails."""
    command = [sys.executable, str(ROOT / "tests" / worker)]
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SourceError(f"{worker} ended with code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def talk(asked: list[dict[str, Any]], device: str, module: Path | None) -> list[dict[str, Any]]:
    """Runs conversations on a device. Raises SourceError if they fail."""
    log(f"{len(asked)} conversations on {'the host' if device == 'none' else device}")
    settings = {"kv_type": "f16", "device": device}
    return work("device_worker.py", {"cases": asked, "settings": settings, "module": module and str(module)})


def against_stock(of: Tried, module: Path | None) -> dict[str, Any]:
    """Reads the same prompt with llama.cpp and kvedge's uncompressed cache. Returns a row of the second table."""
    import pykvedge

    log(f"llama.cpp and kvedge with {of.name}")
    plans = [pykvedge.plan("full").to_json()]
    job = {"model": str(of.model), "module": module and str(module), "kv_type": "f16", "plans": plans, "prompt": 300}
    return {"case": of.name, **work("device_logits.py", job)[0]}


def compare(case: dict[str, Any], host: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the first table."""
    from attached import differing

    alike = [a == b for a, b in zip(host["answers"], device["answers"], strict=True)]
    # after different answers, the conversations differ
    turns = alike.index(False) + 1 if False in alike else len(alike)
    return {
        "case": case["name"],
        "other_pairs": max(differing(a, b) for a, b in zip(host["held"][:turns], device["held"], strict=False)),
        "same_answers": sum(alike),
        "answers": len(host["answers"]),
        "device_bytes": device["device_bytes"][-1],
        "devices": device["devices"],
    }


def show(rows: list[dict[str, Any]], logits: list[dict[str, Any]]) -> None:
    """Prints both tables."""
    for row in rows:
        print(f"{row['case']:28} {row['other_pairs']:8.4f} other pairs, {row['same_answers']} of {row['answers']} "
              f"answers alike, {row['device_bytes']:9} bytes on {', '.join(row['devices'])}")  # fmt: skip
    for row in logits:
        print(f"{row['case']:28} KL of the uncompressed cache to llama.cpp {row['kl']:.1e}, graphs in as many parts: "
              f"{'yes' if same_parts(row) else 'no'}, {row['splits']['kvedge']}")  # fmt: skip


def same_parts(row: dict[str, Any]) -> bool:
    """Returns whether kvedge's graphs have as many splits as llama.cpp's."""
    return row["splits"]["kvedge"] == row["splits"]["stock"]


def main() -> int:
    """Prints tables. Exit code 1: no rows were on a device, or rounding does not explain the differences."""
    import pykvedge

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", help="vulkan, cuda, metal, ... as in GGML_VULKAN")
    parser.add_argument("--module", type=Path, help="the backend's library, if it was built elsewhere")
    parser.add_argument("--built-in", action="store_true", help="kvedge was built with it: no module is made or loaded")
    parser.add_argument("--device", default="auto", help="its name, where there are several (default %(default)s)")
    parser.add_argument(
        "--model", action="append", default=[], help="'demo' or a GGUF file, repeatable (default: above)"
    )
    methods = list(pykvedge.methods())
    parser.add_argument("--method", action="append", choices=methods, metavar="NAME", help="repeatable (default: all)")
    parser.add_argument("--json", action="store_true")
    args, options = parser.parse_known_args()
    if any(not option.startswith("-D") or "=" not in option for option in options):
        parser.error(f"options of the backend's build are -DNAME=VALUE, not {' '.join(options)}")
    module = None if args.built_in else args.module or build(args.backend, options)
    if module and not module.is_file():
        raise SourceError(f"{module} is no file")
    with tempfile.TemporaryDirectory() as folder:
        tried = models(args.model, Path(folder))
        asked = cases(tried, args.method or methods, Path(folder))
        logits = [against_stock(of, module) for of in tried]
        host, device = talk(asked, "none", None), talk(asked, args.device, module)
    rows = [compare(*three) for three in zip(asked, host, device, strict=True)]
    if args.json:
        print(json.dumps({"conversations": rows, "logits": logits}, indent=2))
    else:
        show(rows, logits)
    odd = any(row["other_pairs"] > OTHERS or not row["device_bytes"] for row in rows)
    return int(odd or any(row["kl"] > KL or not same_parts(row) for row in logits))


if __name__ == "__main__":
    sys.exit(ended(main))
