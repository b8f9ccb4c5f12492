"""Write a random-weight model with the exact shape of a real one: DIR/model.gguf and DIR/mmproj.gguf.

For measurements of speed and memory: it answers nonsense, but it has the sizes, the tokenizer's vocabulary
size and the number of image tokens of the original. The paths go to stdout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from modelgen.shapes import SHAPES
from modelgen.text import Model, text_model
from modelgen.vision import vision_model
from modelgen.writer import F16, Q4_0, Q8_0, write_gguf

QUANTS = {"q4_0": Q4_0, "q8_0": Q8_0, "f16": F16}
VISION_QUANTS = {"q8_0": Q8_0, "f16": F16}
# Header and tokenizer: the largest vocabulary here takes about 6 MB.
_HEADER_ROOM = 16 << 20


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


class _ListShapes(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        for name, shape in SHAPES.items():
            print(_describe(name, shape.about, shape.image_tokens))
        parser.exit()


def _describe(name: str, about: str, image_tokens: str) -> str:
    text = SHAPES[name].text()
    heads = f"{text.n_heads}/{text.n_heads_kv} heads of {text.head_size}"
    size = f"{text.n_layers} layers, {text.n_embd} wide, {heads}, ff {text.n_ff}"
    rest = f"vocabulary {text.vocab.size}, image tokens {image_tokens}"
    return f"{name:<15} {about}\n{'':<15} {size}, {rest}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", metavar="SHAPE", choices=SHAPES, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--list", nargs=0, action=_ListShapes, help="describe the shapes and exit")
    add = parser.add_argument
    add("--quant", choices=QUANTS, default="q4_0", help="type of the text weights (default: q4_0)")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write; made if missing")
    add("--vision", choices=("auto", "none"), default="auto", help="none: write no mmproj.gguf")
    add("--mmproj-quant", choices=VISION_QUANTS, default="q8_0", help="of the vision weights (default: q8_0)")
    add("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    add("--force", action="store_true", help="overwrite files that exist")
    add("--json", action="store_true", help="print one JSON object instead of the paths")
    return parser


def _models(args: argparse.Namespace) -> dict[str, Model]:
    shape = SHAPES[args.shape]
    text = replace(shape.text(), weight=QUANTS[args.quant])
    models = {"model": text_model(text)}
    if args.vision != "none":
        vision = replace(shape.vision, weight=VISION_QUANTS[args.mmproj_quant], out_std=text.embedding_std)
        models["mmproj"] = vision_model(vision)
    return models


def _check_target(folder: Path, models: dict[str, Model], force: bool) -> None:
    for name in models:
        if (folder / f"{name}.gguf").exists() and not force:
            raise FileExistsError(f"{folder / name}.gguf exists: give --force to overwrite it")
    folder.mkdir(parents=True, exist_ok=True)
    need = sum(_HEADER_ROOM + sum(tensor.nbytes for tensor in tensors) for _, tensors in models.values())
    free = shutil.disk_usage(folder).free
    if need > free:
        sizes = f"{need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
        raise OSError(f"not enough disk space in {folder}: {sizes}")


def _write(args: argparse.Namespace, models: dict[str, Model]) -> dict[str, object]:
    start = time.perf_counter()
    report: dict[str, object] = {"shape": args.shape, "quant": args.quant}
    for number, (name, (meta, tensors)) in enumerate(models.items()):
        path = args.output / f"{name}.gguf"
        write_gguf(path, meta, tensors, seed=args.seed + number)
        report[name] = str(path)
        report[f"{name}_bytes"] = path.stat().st_size
        report[f"{name}_parameters"] = sum(tensor.elements for tensor in tensors)
    report["seconds"] = round(time.perf_counter() - start, 2)
    return report


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        models = _models(args)
        _check_target(args.output, models, args.force)
        report = _write(args, models)
        print(json.dumps(report) if args.json else "\n".join(str(report[name]) for name in models))
    except OSError as error:
        message = error.args[0] if len(error.args) == 1 else f"cannot write: {error}"
        print(f"make_shape_model.py: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmake_shape_model.py: stopped, nothing half-written is left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
