"""Conversations on a device of ggml's against the same on the host: what each method keeps, and what it answers.

    python3 scripts/dev.py python scripts/try_device.py vulkan
    python3 scripts/dev.py python scripts/try_device.py vulkan -DVulkan_INCLUDE_DIR=... --method full --method adakv
    python3 scripts/dev.py python scripts/try_device.py cuda -DCMAKE_CUDA_ARCHITECTURES=86 --model model.gguf

Builds that backend as a module in build/BACKEND, where it is not yet, and loads it beside the libraries that there are.
Without --model it asks tiny models of random weights, one with heads that have flash attention on every device and one
with heads that have not. Software devices count: Vulkan on Mesa's lavapipe needs Mesa 25, headers of Vulkan 1.4 and
GGML_VK_VISIBLE_DEVICES=0, and compiles its shaders for minutes the first time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from build_stock import cmake, find_build
from llama_source import ROOT, SourceError, ended, log
from modelgen.tiny import default_spec, write_tiny

sys.path.insert(0, str(ROOT / "tests"))
METHODS = ("full", "knorm", "snapkv", "adakv", "lookm")
WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. "
MESSAGES = ((WORDS * 5, ()), (WORDS * 2, ()))


def build(backend: str, given: list[str]) -> Path:
    """Builds the module of a backend; returns its file. Raises SourceError."""
    tree, folder = find_build() / "llama.cpp", ROOT / "build" / backend
    off = dict.fromkeys(("NATIVE", "CPU", "RPC"), "OFF")
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "GGML_BACKEND_DL": "ON",
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


def cases(model: Path | None, methods: list[str], folder: Path) -> list[dict[str, Any]]:
    """Lists conversations for the worker."""
    import pykvedge

    models = {"given": model}
    if model is None:
        wide = replace(default_spec("llama"), head_size=64, n_heads=8, n_heads_kv=4)
        models = {
            "heads of 64": write_tiny("llama", folder / "wide", spec=wide)[0],
            "heads of 32": write_tiny("llama", folder / "narrow")[0],
        }
    return [
        {
            "name": f"{name}, {method}",
            "model": str(path),
            "mmproj": None,
            "profile": None,
            "plan": pykvedge.plan(method, None if method == "full" else 0.4).to_json(),
            "messages": MESSAGES,
        }
        for name, path in models.items()
        for method in methods
    ]


def talk(cases: list[dict[str, Any]], settings: dict[str, Any], module: Path | None) -> list[dict[str, Any]]:
    """Runs conversations in a process of their own. Raises SourceError where it fails."""
    job = {"cases": cases, "settings": {"kv_type": "f16", **settings}, "module": module and str(module)}
    worker = [sys.executable, str(ROOT / "tests" / "device_worker.py")]
    done = subprocess.run(worker, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SourceError(f"the conversations with {settings or 'the host'} ended with code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(case: dict[str, Any], host: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    """Makes a row of the table."""
    from attached import differing

    alike = [a == b for a, b in zip(host["answers"], device["answers"], strict=True)]
    # what follows another answer is another conversation
    turns = alike.index(False) + 1 if False in alike else len(alike)
    return {
        "case": case["name"],
        "other_pairs": max(differing(a, b) for a, b in zip(host["held"][:turns], device["held"], strict=False)),
        "same_answers": sum(alike),
        "answers": len(host["answers"]),
        "device_bytes": device["device_bytes"][-1],
        "devices": device["devices"],
    }


def main() -> int:
    """Prints a table. Exit code: 1 where nothing lay on a device, or heads kept other pairs than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", help="vulkan, cuda, metal, ... as in GGML_VULKAN")
    parser.add_argument("--module", type=Path, help="the backend's library, if it was built elsewhere")
    parser.add_argument("--device", default="auto", help="its name, where there are several (default %(default)s)")
    parser.add_argument("--model", type=Path, help="a GGUF file instead of tiny models")
    parser.add_argument("--method", action="append", default=[], help=f"repeatable (default {', '.join(METHODS)})")
    parser.add_argument("--json", action="store_true")
    args, options = parser.parse_known_args()
    if any(not option.startswith("-D") or "=" not in option for option in options):
        parser.error(f"options of the backend's build are -DNAME=VALUE, not {' '.join(options)}")
    module = args.module or build(args.backend, options)
    if not module.is_file():
        raise SourceError(f"{module} is no file")
    with tempfile.TemporaryDirectory() as folder:
        asked = cases(args.model, args.method or list(METHODS), Path(folder))
        log(f"{len(asked)} conversations on the host")
        host = talk(asked, {"device": "none"}, None)
        log(f"{len(asked)} conversations on {args.device}, with {module.name}")
        device = talk(asked, {"device": args.device}, module)
    rows = [compare(*three) for three in zip(asked, host, device, strict=True)]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['case']:24} {row['other_pairs']:8.4f} other pairs, {row['same_answers']} of {row['answers']} "
                  f"answers alike, {row['device_bytes']:9} bytes on {', '.join(row['devices'])}")  # fmt: skip
    return int(any(row["other_pairs"] > 0.05 or not row["device_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(ended(main))
