"""kvedge plan."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvedge.cli.chat import model_files
from pykvedge.errors import UsageError
from pykvedge.plans.presets import default_plan
from pykvedge.plans.presets import plan as make_plan

if TYPE_CHECKING:
    from pykvedge.lab.footprint import Files, Footprint, Request

_PATH = click.Path(path_type=Path)
_COUNT = click.IntRange(0, 10**6)


@click.command()
@click.argument("model", required=False, type=_PATH, metavar="[MODEL.gguf]")
@click.option("--mmproj", type=_PATH, metavar="FILE.gguf", help="The image encoder that belongs to the model.")
@click.option("--images", type=_COUNT, metavar="N", help="Images in the prompt. Default: 1 with an image encoder.")
@click.option("--image-size", default="1024x768", show_default=True, metavar="WxH", help="Pixels of each image.")
@click.option("--image-tokens", type=click.IntRange(1, 10**6), metavar="N", help="Tokens of each image, if you know.")
@click.option("--text", "text_tokens", type=click.IntRange(1, 10**8), default=64, show_default=True, metavar="N",
              help="Tokens of text in the prompt.")  # fmt: skip
@click.option("--ctx", type=click.IntRange(1, 2**30), metavar="N", help="Context of stock llama.cpp, for comparison.")
@click.option("--method", metavar="NAME", help="See `kvedge methods`. Default: mixkv.")
@click.option("--budget", metavar="AMOUNT",
              help="0.2 of the prompt, or 128 KV pairs per layer and head. Default: 0.2, with mixkv 0.5.")  # fmt: skip
@click.option("--kv-type", default="f16", show_default=True, metavar="TYPE", help="As for chat.")
@click.option("--threads", type=click.IntRange(1, 512), metavar="N", help="Default: one per physical core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; bytes.")
def plan(model: Path | None, mmproj: Path | None, as_json: bool, **given: Any) -> None:
    """Tell what a conversation will take of memory, before anything is loaded.

    The figures come from the metadata of the files: weights, image encoder, compute buffers, and the KV cache of stock
    llama.cpp, of the whole prompt, and compressed; whether that fits this machine, and how many images would.

    \b
    Examples:
      kvedge plan model.gguf --mmproj mmproj.gguf --images 4
      kvedge plan model.gguf --mmproj mmproj.gguf --images 8 --image-size 1920x1080 --method snapkv --budget 0.1
      kvedge plan model.gguf --text 8000 --ctx 16384 --json
    """
    from pykvedge.lab.footprint import footprint, most_images, most_turns
    from pykvedge.native import memory

    model, mmproj = model_files(model, mmproj)
    files, request, n_train = _request(model, mmproj, given)
    found, available = footprint(files, request), memory.available_bytes()
    needed = found.peak_prefill - found.reclaimable
    images: dict[str, int] = {}
    if request.image_tokens and available is not None:
        kinds = {"stock": "stock", "one_prompt": "compressed", "bounded": "bounded"}
        images = {name: most_images(files, request, available, kind) for name, kind in kinds.items()}
        images["one_per_message"] = most_turns(files, request, available)
    out = {
        "model": str(model),
        "mmproj": str(mmproj) if mmproj else None,
        "method": request.plan.method,
        "budget": request.plan.budget.value,
        "images": request.n_images,
        "image_tokens": request.image_tokens,
        "n_ctx_train": n_train,
        "bytes": asdict(found) | {"needed": needed, "available": available},
        "fits": None if available is None else needed <= available,
        "most_images": images,
    }
    click.echo(json.dumps(out) if as_json else _table(found, request, out))


def _request(model: Path, mmproj: Path | None, given: dict[str, Any]) -> tuple[Files, Request, int]:
    from pykvedge.lab.footprint import Files, ModelShape, Request, encoder_compute, machine_simd, program_bytes
    from pykvedge.models.imagetokens import image_grid
    from pykvedge.models.modelfile import check_mmproj, check_model
    from pykvedge.native import llamacpp
    from pykvedge.plans.kvtypes import KvType

    KvType.parse(given["kv_type"])
    width, height = _size(given["image_size"])
    method, budget = given["method"], given["budget"]
    chosen = default_plan(budget) if method is None else make_plan(method, budget)
    header = check_model(model)
    shape = ModelShape.of(header, machine_simd())
    encoder = working = tokens = 0
    if mmproj is not None:
        projector = check_mmproj(mmproj, header)
        encoder, tokens = projector.file_size, given["image_tokens"]
        if not tokens or given["images"] != 0:
            grid = image_grid(projector, width, height) if not tokens else None
            tokens = grid.n_tokens if grid else tokens
            working = encoder_compute(projector, grid) if grid else 0
    elif given["images"] or given["image_tokens"]:
        raise UsageError("--images needs the image encoder of the model: pass it with --mmproj")
    n_images = given["images"] if given["images"] is not None else int(mmproj is not None)
    files = Files(shape, program_bytes(header), encoder, working if n_images else 0)
    threads = given["threads"] or llamacpp.default_threads()
    text, n_ctx, kind = given["text_tokens"], given["ctx"] or 0, given["kv_type"]
    return files, Request(chosen, n_images, tokens or 0, text, n_ctx, kind, threads), shape.n_ctx_train


def _size(text: str) -> tuple[int, int]:
    width, x, height = text.lower().partition("x")
    if not (x and width.isascii() and width.isdigit() and height.isascii() and height.isdigit()):
        raise UsageError(f"--image-size is WIDTHxHEIGHT, for example 1024x768, not '{text}'")
    if not (0 < int(width) <= 10**5 and 0 < int(height) <= 10**5):
        raise UsageError(f"--image-size must lie between 1x1 and 100000x100000, not '{text}'")
    return int(width), int(height)


def _table(f: Footprint, request: Request, out: dict[str, Any]) -> str:
    from pykvedge.native.memory import readable

    rows = [
        ("program and its libraries", *[f.program] * 3),
        ("weights, from the file", *[f.weights] * 3),
        ("weights, rearranged for this CPU", *[f.repacked] * 3),
        ("image encoder", *[f.encoder] * 3),
        ("encoding an image", *[f.encoder_compute] * 3),
        ("compute buffers", f.compute_stock, f.compute, f.compute),
        ("KV cache while the prompt is read", f.kv_stock, f.kv_prompt, f.kv_prompt),
        ("scores and one compressed layer", 0, 0, f.scores_and_layer),
        ("KV cache of the answer", f.kv_stock, f.kv_prompt, f.kv_kept),
        ("peak", f.peak_stock, f.peak_full, f.peak_prefill),
        ("while the answer is generated", f.peak_stock, f.answer_full, f.after_compression),
    ]
    columns = ("stock llama.cpp", "kvedge, all kept", f"{request.plan.method} {request.plan.budget}")
    what = f"{request.n_images} image{'s' * (request.n_images != 1)} of {request.image_tokens} tokens and "
    lines = [
        f"{Path(out['model']).name}: {what if request.n_images else ''}{request.text_tokens} tokens of text, "
        f"{f.prompt_tokens} in all, of which {f.kept_tokens} are kept; stock context {f.n_ctx}",
        " " * 34 + "".join(f"{name:>18}" for name in columns),
    ]
    shown = [(name, *(readable(n) if n else "-" for n in figures)) for name, *figures in rows if any(figures)]
    lines += [f"{name:<34}" + "".join(f"{x:>18}" for x in figures) for name, *figures in shown]
    first = "what encoding an image took before the prompt is read, and " if f.encoder_compute else ""
    lines.append(f"kvedge gives back {first}the compute buffers when the prompt is complete")
    if f.kept_tokens < f.prompt_tokens and f.peak_bounded < f.peak_prefill:
        lines.append(
            f"with --bounded, where model and method allow it: KV cache {readable(f.kv_bounded)} while the prompt is "
            f"read, compute buffers {readable(f.compute_bounded)}, peak {readable(f.peak_bounded)}"
        )
    b = out["bytes"]
    if b["available"] is None:
        return "\n".join([*lines, f"{readable(b['needed'])} are needed; how much this machine has cannot be told"])
    verdict = "it fits" if out["fits"] else "it does not fit"
    spare = f" (without {readable(f.reclaimable)} of file pages that the system may drop)" if f.reclaimable else ""
    lines.append(f"needs {readable(b['needed'])}{spare}, {readable(b['available'])} are available: {verdict}")
    if out["most_images"]:
        m = {k: max(v, 0) for k, v in out["most_images"].items()}
        in_training = max(0, (out["n_ctx_train"] - request.text_tokens) // request.image_tokens)
        lines.append(
            f"memory holds {m['stock']} images with stock llama.cpp; with {request.plan.method} {m['one_prompt']} in "
            f"one prompt, {m['bounded']} with --bounded, {m['one_per_message']} with one in each message; the model "
            f"was trained for {in_training}"
        )
    return "\n".join(lines)
