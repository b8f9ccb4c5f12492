"""The command `kvedge fit` tells what a conversation will take of memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvedge.cli import options
from pykvedge.cli.options import option
from pykvedge.errors import UsageError

if TYPE_CHECKING:
    from pykvedge.lab.footprint import Files, Footprint, Request
    from pykvedge.models.placement import Placement, Talk

_COUNT = click.IntRange(0, 10**6)


@click.command()
@click.argument("file", required=False, type=options.PATH, metavar="[MODEL.gguf]")
@options.taking(
    options.MODEL,
    options.MMPROJ,
    options.IMAGE,
    option("--images", "n_images", type=_COUNT, metavar="N",
           help="Images in the prompt, if there are none at hand. Default: 1 with an image encoder."),
    option("--image-size", metavar="WxH", help="Pixels of each image. Default: those of --image, or 1024x768."),
    option("--image-tokens", type=click.IntRange(1, 10**6), metavar="N", help="Tokens of each image, if you know."),
    option("--text", "text_tokens", type=click.IntRange(1, 10**8), default=64, show_default=True, metavar="N",
           help="Tokens of text in the prompt."),
    *options.COMPOSITION,
    options.CTX,
    options.THREADS,
    *options.DEVICES,
    options.KV_TYPE,
    options.JSON,
)  # fmt: skip
def fit(file: Path | None, **given: Any) -> None:
    """Tell what a conversation will take of memory, before anything is loaded.

    The figures come from the metadata of the files: weights, image encoder, compute buffers, and the KV cache of stock
    llama.cpp, of the whole prompt, and compressed; whether that fits this machine, and how many images would. Where
    there are GPUs or --rpc, also which layers go there and what they take; --gpu-layers auto finds how many fit.

    \b
    Examples:
      kvedge fit model.gguf --mmproj mmproj.gguf --images 4
      kvedge fit model.gguf --mmproj mmproj.gguf --images 8 --image-size 1920x1080 --method snapkv --budget 0.1
      kvedge fit --model model.gguf --text 8000 --ctx 16384 --json
      kvedge fit model.gguf --text 16000 --method snapkv --gpu-layers auto
      kvedge fit model.gguf --mmproj mmproj.gguf --image photo.jpg --method mixkv --allocator prefix
    """
    from pykvedge.lab.footprint import footprint, most_images, most_turns
    from pykvedge.native import memory

    if file is not None and given["model"] is not None:
        raise UsageError(f"{file} and --model name a model each; pass one")
    options.load_plugins(given)
    model, mmproj = options.model_files(given["model"] or file, given["mmproj"])
    files, request, placement, n_train = _request(model, mmproj, given)
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
        "gpu_layers": placement.gpu_layers,
        "devices": [share.as_json() for share in placement.shares],
        "fits": None if available is None else needed <= available and placement.fits,
        "most_images": images,
    }
    click.echo(json.dumps(out) if given["as_json"] else _table(found, request, placement, out))


def _request(model: Path, mmproj: Path | None, given: dict[str, Any]) -> tuple[Files, Request, Placement, int]:
    from pykvedge.lab.footprint import Files, Request, Weights, encoder_compute, machine_simd, program_bytes
    from pykvedge.models.imagetokens import image_grid
    from pykvedge.models.modelfile import check_mmproj, check_model
    from pykvedge.models.shape import ModelShape
    from pykvedge.native import llamacpp
    from pykvedge.plans.kvtypes import KvType

    KvType.parse(given["kv_type"])
    pictures = _sizes(given)
    chosen = options.chosen_plan(given)
    header = check_model(model)
    shape = ModelShape.of(header)
    encoder = working = tokens = 0
    if mmproj is not None:
        projector = check_mmproj(mmproj, header)
        encoder, tokens = projector.file_size, given["image_tokens"]
        if not tokens:
            grids = [image_grid(projector, *size) for size in pictures]
            tokens = max(grid.n_tokens for grid in grids)
            working = max(encoder_compute(projector, grid) for grid in grids)
    elif given["n_images"] or given["images"] or given["image_tokens"]:
        raise UsageError("images need the image encoder of the model: pass it with --mmproj")
    n_images = len(given["images"]) or given["n_images"]
    n_images = int(mmproj is not None) if n_images is None else n_images
    how = options.running(given)
    threads = how["threads"] or llamacpp.default_threads()
    request = Request(chosen, n_images, tokens or 0, given["text_tokens"], how["n_ctx"], how["kv_type"], threads)
    placement = options.offload(given).placement(header, _talk(request))
    weights = Weights.of(header, machine_simd(), placement.away)
    files = Files(shape, weights, program_bytes(header), encoder, working if n_images else 0)
    return files, request, placement, shape.n_ctx_train


def _talk(request: Request) -> Talk:
    from pykvedge.models.placement import Talk
    from pykvedge.plans.kvtypes import KvType
    from pykvedge.runtime.llama_context import N_UBATCH
    from pykvedge.runtime.native_plan import score_bytes

    n = request.prompt_tokens
    observes = score_bytes(request.plan, n, [(1, 1, 8)]) > 0
    return Talk(n, min(request.plan.count(n), n), KvType.parse(request.kv_type), N_UBATCH, observes)


def _sizes(given: dict[str, Any]) -> list[tuple[int, int]]:
    """Tells the width and height of every picture."""
    from pykvedge.models.images import load_picture

    if given["images"] and (given["image_size"] or given["n_images"] is not None):
        raise UsageError("--image says how many images there are, and how large; leave --images and --image-size out")
    loaded = [load_picture(options.paths.expanded(path)) for path in given["images"]]
    return [(p.width, p.height) for p in loaded] or [options.pixels(given["image_size"] or "1024x768", 10**5)]


def _placed(placement: Placement) -> list[str]:
    """Says what each device takes, a line for each."""
    from pykvedge.native.memory import readable

    lines = []
    for share in placement.shares:
        n = len(share.layers)
        what = f"layers {share.layers[0] + 1} to {share.layers[-1] + 1} of {placement.n_layers}" if n else "no layer"
        what += " and the output" if share.output else ""
        verdict = "it fits" if share.fits else "it does not fit: fewer --gpu-layers, or auto"
        lines.append(
            f"{share.device.name} takes {what}: weights {readable(share.weights)}, KV cache of the prompt "
            f"{readable(share.kv_prompt)} and of the answer {readable(share.kv_kept)}, working memory "
            f"{readable(share.working)}; {readable(share.usable)} can be used: {verdict}"
        )
    if lines:
        lines.append("keys and values of these layers are on the host, too, while they are compressed")
    return lines


def _table(f: Footprint, request: Request, placement: Placement, out: dict[str, Any]) -> str:
    from pykvedge.native.memory import readable

    rows: list[tuple[Any, ...]] = [
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
    lines += _placed(placement)
    b = out["bytes"]
    if b["available"] is None:
        return "\n".join([*lines, f"{readable(b['needed'])} are needed; how much this machine has cannot be told"])
    verdict = "it fits" if b["needed"] <= b["available"] else "it does not fit"
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
