"""Writes tests/fuzz, the first inputs of the fuzzers, from files that are right: small models, a session, plans.

    python3 scripts/dev.py python scripts/fuzz_seeds.py [FOLDER]

Those of the session target are written by native/fuzz/make_seeds.cpp, those of the others in C by hand, byte by byte.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzz import SEEDS, build
from fuzz_wire import WIRE
from llama_source import ended
from modelgen.tiny import default_spec, write_tiny
from PIL import Image

import pykvedge
from pykvedge.models import gguf
from pykvedge.models.prompt import Message
from pykvedge.plans import profile
from pykvedge.plans.presets import PRESETS
from pykvedge.runtime.sessionfile import Note

MODELS = ("llava", "qwen2vl", "gemma3", "deepseek2")
MMPROJS = ("llava", "qwen2vl", "gemma3v", "internvl", "pixtral", "kimivl")


def header(path: Path) -> bytes:
    """The bytes before the tensors' data."""
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


def samples() -> dict[str, bytes]:
    line = {"id": 1, "images": ["a.png"], "question": "What is it?", "answer": "grey", "choices": ["grey", "red"]}
    talk = {
        "messages": [
            {"role": "user", "content": "<image> Hm?"},
            {"role": "assistant", "content": "Grey."},
            {"role": "user", "content": "Sure?"},
        ],
        "images": ["a.png"],
        "answer": "yes",
        "metric": "exact",
        "max_tokens": 4,
    }
    task = {"context": "{image#1} and", "images_path": ["a.png"], "choice_list": ["yes", "no"]}
    mile = {
        "meta_data": {"task_instruction": ["Look."], "question_type": "multi-choice"},
        "data": [{"sample_id": 0, "task_instruction_id": 0, "task_instance": task, "response": "yes"}],
    }
    llava = [
        {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Grey."}],
        },
        {"image": "a.png", "question": "What?", "answer": "Grey."},
    ]
    vet = {"v1_0": {"imagename": "a.png", "question": "What?", "answer": "Grey.", "capability": ["rec"]}}
    forms: dict[str, Any] = {"milebench": mile, "llava": llava, "mm-vet": vet}
    out = {f"dataset/{name}": json.dumps(form).encode() for name, form in forms.items()}
    return out | {"dataset/jsonl": b"".join(json.dumps(one).encode() + b"\n" for one in (line, talk))}


def pictures() -> dict[str, bytes]:
    ramp = Image.linear_gradient("L").resize((12, 8))
    grey = {
        "grey.png": ramp,
        "colour.jpg": ramp.convert("RGB"),
        "alpha.webp": ramp.convert("RGBA"),
        "plain.bmp": ramp.convert("RGB"),
        "table.gif": ramp.convert("P"),
        "table.png": ramp.convert("P"),
        "deep.png": ramp.convert("I;16"),
    }
    out = {}
    for name, image in grey.items():
        file = io.BytesIO()
        kind = "JPEG" if name.endswith("jpg") else name.rpartition(".")[2].upper()
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned
        image.save(file, kind, **({"exif": exif} if kind == "JPEG" else {}))
        out[f"image/{name}"] = file.getvalue()
    return out


def native() -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    out = {}
    for target, size in (("arrays", 120), ("stages", 400), ("images", 600)):
        out |= {f"{target}/{i}": rng.integers(0, 256, size, dtype=np.uint8).tobytes() for i in range(4)}
    for name in PRESETS:
        text = (
            "".join(f"{key}={value}\n" for key, value in pykvedge.plan(name, 0.3).as_text().items())
            if name != "full"
            else "budget=7\n"
        )
        out[f"plan/{name}"] = text.encode()
    out["plan/heads"] = b"allocator=heads\n!\n" + bytes((1, 3, 5, 0)) + bytes(range(1, 9))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=SEEDS)
    folder: Path = parser.parse_args().folder
    programs = build()
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="kvedge-seeds-") as scratch:
        files = headers(Path(scratch)) | plans() | conversations() | samples() | pictures() | native() | WIRE
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "session").mkdir(parents=True)
    subprocess.run([programs / "make_seeds", folder / "session"], check=True)
    print(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
