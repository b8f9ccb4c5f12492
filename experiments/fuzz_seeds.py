"""Writes the first inputs of the fuzzers for GGUF and kvedge's own formats: small models, conversations, plans.

    python3 scripts/dev.py python experiments/fuzz_seeds.py

The inputs are in tests/fuzz. native/fuzz/make_seeds.cpp writes the inputs of the session target. Folders that are not
in MADE contain files of other programs, and requests written by hand; they stay unchanged.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import scriptpath  # noqa: F401
from fuzz import SEEDS, build
from fuzz_readers import ONE, whole_model
from llama_source import ended
from modelgen.tiny import default_spec, write_tiny

import pykvedge
from pykvedge.models import gguf
from pykvedge.models.prompt import Message
from pykvedge.plans import profile
from pykvedge.plans.presets import PRESETS
from pykvedge.runtime.sessionfile import Note

MADE = ("gguf", "mmproj", "plan_json", "profile", "note", "session", "session_file", "plan")
MODELS = ("llava", "qwen2vl", "gemma3", "deepseek2")
MMPROJS = ("llava", "qwen2vl", "gemma3v", "internvl", "pixtral", "kimivl")


def header(path: Path) -> bytes:
    """Returns the bytes before the tensors' data."""
    return path.read_bytes()[: gguf.read_header(path).data_start]


def headers(folder: Path) -> dict[str, bytes]:
    out = {}
    for kind in sorted({*MODELS, *MMPROJS}):
        spec = replace(default_spec(kind), n_vocab=400, head_size=32, n_layers=min(2, default_spec(kind).n_layers))
        model, mmproj = write_tiny(kind, folder / kind, spec=spec)
        if kind in MODELS:
            out[f"gguf/{kind}"] = header(model)
        if mmproj and kind in MMPROJS:
            out[f"mmproj/{kind}"] = header(mmproj)
    return out


def plans() -> dict[str, bytes]:
    """Returns plans and profiles as JSON."""
    out = {f"plan_json/{name}": pykvedge.plan(name, 0.3).to_json().encode() for name in PRESETS if name != "full"}
    out["plan_json/pairs"] = (
        pykvedge.plan("lookm", 64, recent=8, sinks=4, pruner="residual", image_tokens=0.5).to_json().encode()
    )
    heads = profile.Profile("visual-heads", np.arange(1.0, 9.0).reshape(2, 4), (), "0" * 64, 1, {})
    prefix = profile.Profile(
        "prefix", np.linspace(0, 1, 6).reshape(2, 3), (0.1, 0.5, 1.0), "0" * 64, 2, {"made": {"by": "x"}}
    )
    keys = profile.Profile("key-redundancy", np.full((2, 2), 0.25), (), "0" * 64, 1, {"model": {"name": "m"}})
    shares = profile.Profile("head-budgets", np.array([[0.5, 0.125], [0.25, 0.125]]), (), "0" * 64, 1, {})
    return out | {f"profile/{one.kind}": one.to_json().encode() for one in (heads, prefix, keys, shares)}


def conversations() -> dict[str, bytes]:
    plan = pykvedge.plan("snapkv", 0.5)
    said = [Message("system", "Be brief."), Message("user", "What is this?"), Message("assistant", "A cat.")]
    notes = {
        "long": Note(plan, "f16", 512, 64, 40, 30, 12.5, [3], said),
        "one": Note(plan, "q8_0:q4_0", 64, 8, 1, 1, 1.0, [], said[1:2]),
    }
    return {f"note/{name}": note.encode() for name, note in notes.items()}


def saved(folder: Path) -> dict[str, bytes]:
    """Returns session files of conversations with a model of the target session_file."""
    out = {}
    for method in ("lookm", "snapkv"):
        with pykvedge.Session(whole_model("llava"), None, pykvedge.plan(method, 0.5), threads=1, n_ctx=256) as session:
            session.ask("What is this?", [], ONE).read()
            session.save(folder / "talk.kvs")
        out[f"session_file/{method}"] = (folder / "talk.kvs").read_bytes()
    return out


def native_plans() -> dict[str, bytes]:
    """Returns every method's plan in the form of the C interface: one key and value on each line."""
    out = {}
    for name in PRESETS:
        text = (
            "".join(f"{key}={value}\n" for key, value in pykvedge.plan(name, 0.3).as_text().items())
            if name != "full"
            else "budget=7\n"
        )
        out[f"plan/{name}"] = text.encode()
    out["plan/heads"] = b"allocator=heads\n!\n" + bytes((1, 3, 5, 0)) + bytes(range(1, 9))
    return out


def written(folder: Path, files: dict[str, bytes]) -> None:
    """Writes files into the folder. files: {name: data}."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder, programs = SEEDS, build()
    for target in MADE:
        shutil.rmtree(folder / target, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="kvedge-seeds-") as scratch:
        written(folder, headers(Path(scratch)) | plans() | conversations() | native_plans())
        written(folder, saved(Path(scratch)))  # saved by a model that was just written
    (folder / "session").mkdir(parents=True)
    subprocess.run([programs / "make_seeds", folder / "session"], check=True)
    print(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
