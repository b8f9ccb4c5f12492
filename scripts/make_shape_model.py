"""Write a random-weight model with the exact shape of a real one: DIR/model.gguf and DIR/mmproj.gguf.

For measurements of speed and memory: the answers are nonsense, but the sizes, the vocabulary size and the number of
image tokens are those of the original. Some shapes also have a released vocabulary and chat template.
The paths go to stdout.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from llama_source import ended
from modelgen.layers import Model, TextSpec
from modelgen.released import Released, extract
from modelgen.shapes import SHAPES, Shape
from modelgen.text import text_model
from modelgen.tokens import Vocabulary
from modelgen.vision import vision_model
from modelgen.vit import VisionSpec
from modelgen.writer import F16, Q4_0, Q8_0, write_gguf

QUANTS = {"q4_0": Q4_0, "q8_0": Q8_0, "f16": F16}
VISION_QUANTS = {"q8_0": Q8_0, "f16": F16}
# Bytes for header and tokenizer. The largest vocabulary takes about 6 MB.
_HEADER_ROOM = 16 << 20


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


class _ListShapes(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        for name, shape in SHAPES.items():
            print(_described(name, shape))
        parser.exit()


def _described(name: str, shape: Shape) -> str:
    text = shape.text()
    heads = f"{text.n_heads}/{text.n_heads_kv} heads of {text.head_size}"
    size = f"{text.n_layers} layers, {text.n_embd} wide, {heads}, ff {text.n_ff}"
    rest = f"vocabulary {text.vocab.size}, image tokens {shape.image_tokens}"
    return f"{name:<15} {shape.about}\n{'':<15} {size}, {rest}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", metavar="SHAPE", choices=SHAPES, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--list", nargs=0, action=_ListShapes, help="describe the shapes and exit")
    add = parser.add_argument
    add("--quant", choices=QUANTS, default="q4_0", help="type of the text weights (default: q4_0)")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write; made if missing")
    add("--layers", type=int, metavar="N", help="write the first N layers of both only (default: all)")
    add("--vision-layers", type=int, metavar="N", help="of the tower, where --layers cuts the model (default: as many)")
    add("--released", type=Path, metavar="DIR", help="the vocabularies of llama.cpp's source lie here already")
    add("--vision", choices=("auto", "none"), default="auto", help="none: write no mmproj.gguf")
    add("--mmproj-quant", choices=VISION_QUANTS, default="q8_0", help="of the vision weights (default: q8_0)")
    add("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    add("--force", action="store_true", help="overwrite files that exist")
    add("--json", action="store_true", help="print one JSON object instead of the paths")
    return parser


def _models(args: argparse.Namespace) -> dict[str, Model]:
    shape = SHAPES[args.shape]
    text = replace(shape.text(), weight=QUANTS[args.quant])
    if shape.released is not None:
        text = replace(text, vocab=_vocabulary(shape.released, args.released, text.vocab.size))
    vision = replace(shape.vision, weight=VISION_QUANTS[args.mmproj_quant], out_std=text.embedding_std)
    if args.layers is not None:
        text, vision = _cut(text, vision, args.layers, args.vision_layers or args.layers)
    models = {"model": text_model(text)}
    if args.vision != "none":
        models["mmproj"] = vision_model(vision)
    return models


def _cut(text: TextSpec, vision: VisionSpec, n: int, n_vision: int) -> tuple[TextSpec, VisionSpec]:
    """Keeps the first layers of both models. The first layers replace removed layers in `deepstack`."""
    meta = {key: value[:n] if isinstance(value, list) else value for key, value in text.meta.items()}
    deepstack = vision.deepstack
    if deepstack and deepstack[-1] >= n_vision:
        deepstack = tuple(range(min(n_vision, len(deepstack))))
        meta["qwen3vl.n_deepstack_layers"] = len(deepstack)
    text = replace(text, n_layers=min(n, text.n_layers), meta=meta)
    return text, replace(vision, n_layers=min(n_vision, vision.n_layers), deepstack=deepstack)


def _vocabulary(released: Released, folder: Path | None, size: int) -> Vocabulary:
    if folder is not None:
        return released.read(folder, size)
    with tempfile.TemporaryDirectory() as made:
        return released.read(extract(Path(made)), size)


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


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    models = _models(args)
    _check_target(args.output, models, args.force)
    report = _write(args, models)
    print(json.dumps(report) if args.json else "\n".join(str(report[name]) for name in models))


if __name__ == "__main__":
    sys.exit(ended(main))
