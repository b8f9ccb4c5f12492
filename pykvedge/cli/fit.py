"""The command `kvedge fit` prints the memory that a conversation needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvedge.cli import completion, options
from pykvedge.cli.command import command, option
from pykvedge.cli.modelfiles import headers, page_size, pictures
from pykvedge.cli.tables import wrapped
from pykvedge.errors import UnsupportedError, UsageError
from pykvedge.reference.kvtypes import KvType
from pykvedge.system.memory import readable

if TYPE_CHECKING:
    from pykvedge.fit.footprint import Files, Footprint, Request
    from pykvedge.fit.imagework import ImageWork
    from pykvedge.models.gguf import Header
    from pykvedge.models.imagetokens import ImageGrid
    from pykvedge.models.placement import ConversationSize, Placement
    from pykvedge.plans.plan import Plan

_COUNT = click.IntRange(0, 10**6)


@command()
@click.argument("file", required=False, type=options.PATH, metavar="[MODEL]", shell_complete=completion.files_or_models)
@options.taking(
    options.MODEL,
    options.MMPROJ,
    *options.HUB,
    options.IMAGE,
    option("--images", "n_images", group="Picture", common=True, type=_COUNT, metavar="N",
           help="Images in the prompt, if there are none at hand. Default: 1 with an image encoder."),
    option("--image-size", group="Picture", common=True, metavar="WxH",
           help="Pixels of each image. Default: those of --image, or 1024x768."),
    *options.IMAGE_LIMITS,
    option("--encoder-tokens", group="Picture", type=click.IntRange(1, 10**6), metavar="N",
           help="Tokens that the encoder makes of each image, if you know."),
    option("--text", "text_tokens", group="Answer", common=True, type=click.IntRange(1, 10**8), default=64,
           show_default=True, metavar="N",
           help="Tokens of text in the prompt."),
    *options.COMPOSITION,
    options.CTX,
    options.THREADS,
    *options.DEVICES,
    options.KV_TYPE,
    option("--keep", group="What is kept", config=True, type=click.Choice(("ram", "disk")),
           help="Count whole rows behind the kept ones, in memory or in a file."),
    options.KEEP_TYPE,
    options.JSON,
)  # fmt: skip
def fit(file: Path | None, **given: Any) -> None:
    """Tell what memory a conversation takes, before it is loaded.

    It also says where an image is made cheaper: before the encoder, by --image-max-tokens, or after, by --image-tokens.
    The figures come from the metadata of the files: weights, image encoder, compute buffers, and the KV cache of stock
    llama.cpp, of the whole prompt, and compressed. It says whether these fit this machine, and how many images would
    fit. With GPUs or --rpc it also says which layers go there and their memory; --gpu-layers auto finds how many fit.
    For a model by name (-hf) only the headers are fetched. An encoder that cuts images into tiles is loaded for a
    moment, to count their tokens.

    \b
    Examples:
      kvedge fit model.gguf --images 4
      kvedge fit model.gguf --images 8 --image-size 1920x1080 --budget 0.1
      kvedge fit -hf user/repo:Q4_K_M --images 4      before gigabytes are fetched
      kvedge fit model.gguf --text 8000 --ctx 16384 --json
      kvedge fit model.gguf --text 16000 --method snapkv --gpu-layers auto
      kvedge fit model.gguf --image report.pdf --image-tokens 0.25 --budget 0.1
      kvedge fit model.gguf --image photo.jpg --method mixkv
    """
    from pykvedge.fit.footprint import footprint
    from pykvedge.system import memory

    if file is not None and given["model"] is not None:
        raise UsageError(f"{file} and --model name a model each; pass one")
    options.load_plugins(given)
    KvType.parse(given["kv_type"])
    plan = options.chosen_plan(given)
    model, mmproj = headers({**given, "model": given["model"] or file})
    files, request, placement, work = _request(model, mmproj, plan, given)
    found, available = footprint(files, request), memory.available_bytes()
    needed = found.peak_prefill - found.reclaimable
    images = _images_that_fit(files, request, available)
    out = {
        "model": str(model.path),
        "mmproj": str(mmproj.path) if mmproj else None,
        "method": request.plan.method,
        "budget": request.plan.budget.value,
        "images": request.n_images,
        "image_tokens": request.image_tokens,
        "n_ctx_train": files.shape.n_ctx_train,
        "bytes": asdict(found) | {"needed": needed, "available": available},
        "gpu_layers": placement.gpu_layers,
        "devices": [share.as_json() for share in placement.shares],
        "fits": None if available is None else needed <= available and placement.fits,
        "most_images": images,
        "image_work": work.as_json() if work else None,
    }
    if given["as_json"]:
        click.echo(json.dumps(out))
        return

    click.echo(_table(found, request, placement, out))
    if work is not None:
        click.echo(wrapped(work.line()))


def _images_that_fit(files: Files, request: Request, available: int | None) -> dict[str, int]:
    from pykvedge.fit.footprint import most_images, most_turns

    if not request.image_tokens or available is None:
        return {}
    kinds = {"stock": "stock", "one_prompt": "compressed", "bounded": "bounded"}
    if request.keep:
        del kinds["bounded"]  # the bounded way drops rows for good
    images = {name: max(most_images(files, request, available, kind), 0) for name, kind in kinds.items()}
    return images | {"one_per_message": most_turns(files, request, available)}


def _request(
    header: Header, projector: Header | None, plan: Plan, given: dict[str, Any]
) -> tuple[Files, Request, Placement, ImageWork | None]:
    from pykvedge.fit.footprint import Files, Request, Weights, encoder_compute, program_bytes
    from pykvedge.fit.imagework import image_work
    from pykvedge.models.shape import ModelShape
    from pykvedge.native import llamacpp

    sizes = _sizes(given, projector)
    shape, program = ModelShape.of(header), program_bytes(header)  # before the encoder leaves traces in memory
    encoder = 0
    grids: list[ImageGrid] = []
    if projector is not None:
        encoder, grids = projector.file_size, _grids(header, projector, sizes, given)
    elif given["n_images"] or given["images"] or given["encoder_tokens"] or any(options.image_limits(given).values()):
        raise UsageError("images need the image encoder of the model: pass it with --mmproj")
    n_images = len(sizes) if given["images"] else given["n_images"]
    n_images = int(projector is not None) if n_images is None else n_images
    of_parts = [grid.tokens for grid in grids] or [(given["encoder_tokens"] or 0,)]
    read = [sum(plan.image_tokens.count(n) for n in tokens if n) for tokens in of_parts]
    largest = max(grids, key=lambda grid: grid.n_patches * grid.parts, default=None)
    how = options.running(given)
    threads = how["threads"] or llamacpp.default_threads()
    kept = options.keep(given).get("keep_type", "f16")
    request = Request(plan, n_images, max(read), given["text_tokens"], how["n_ctx"], how["kv_type"], threads,
                      given["keep"] or "", sum(read) if len(read) > 1 else 0, kept)  # fmt: skip
    placement = options.offload(given).placement(header, _conversation_size(request))
    weights = Weights.of(header, placement.away)
    if not projector or not largest or not n_images:
        return Files(shape, weights, program, encoder), request, placement, None
    files = Files(shape, weights, program, encoder, encoder_compute(projector, largest))
    prompt = request.text_tokens + sum(grid.n_tokens for grid in grids) * n_images // len(grids)
    return files, request, placement, image_work(projector, header, largest, prompt)


def _grids(model: Header, projector: Header, sizes: list[tuple[int, int]], given: dict[str, Any]) -> list[ImageGrid]:
    """Returns the encoder's output size for each picture; [] if --encoder-tokens gives the number of tokens."""
    from pykvedge.models import imagecount
    from pykvedge.models.imagetokens import image_grid, token_limits
    from pykvedge.runtime.settings import Settings

    asked = Settings.of(options.image_limits(given)).image_limits  # the checks of a session
    limits = token_limits(projector, *asked)
    if given["encoder_tokens"]:
        if any(asked):
            raise UsageError("--encoder-tokens says how many tokens there are; leave the limits of them out")
        return []
    try:
        return [image_grid(projector, *size, limits) for size in sizes]
    except UnsupportedError:
        if not imagecount.is_here(model, projector):
            raise
        return imagecount.count(model, projector, sizes, asked)


def _conversation_size(request: Request) -> ConversationSize:
    from pykvedge.library.native_plan import plan_budget, score_bytes
    from pykvedge.models.placement import ConversationSize
    from pykvedge.runtime.llama_context import N_UBATCH

    n = request.prompt_tokens
    observes = score_bytes(request.plan, n, [(1, 1, 8)]) > 0
    return ConversationSize(n, plan_budget(request.plan, n), KvType.parse(request.kv_type), N_UBATCH, observes)


def _sizes(given: dict[str, Any], projector: Header | None) -> list[tuple[int, int]]:
    """Returns the width and height of every picture and page."""
    if given["images"] and (given["image_size"] or given["n_images"] is not None):
        raise UsageError("--image says how many images there are, and how large; leave --images and --image-size out")
    from pykvedge.models.images import scaled_size

    limits = options.image_limits(given)
    if given["images"]:
        return [(p.width, p.height) for p in pictures(given["images"], projector, limits)]
    size = options.pixels(given["image_size"] or "1024x768", 10**5)
    if projector is None:
        return [size]
    return [scaled_size(*size, page_size(projector, limits).pixels)]


def _placed(placement: Placement) -> list[str]:
    """Returns a line per device: its layers and their memory."""
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


def _verdict(f: Footprint, placement: Placement, out: dict[str, Any]) -> str:
    """Returns one line: whether the conversation fits, and the sizes of the KV cache."""
    needed, available = (out["bytes"][name] for name in ("needed", "available"))
    cache = f"KV {readable(f.kv_prompt)} -> {readable(f.kv_kept)} ({out['method']} {out['budget']})"
    if available is None:
        return f"Needs {readable(needed)}, {cache}; how much memory is available cannot be told"
    memory = f"needs {readable(needed)} of {readable(available)}"
    if out["fits"]:
        return f"Fits: {cache}, {memory}"
    full = [share.device.name for share in placement.shares if not share.fits]
    why = f"; too many layers on {', '.join(full)}" if full else ""
    return f"Does not fit: {memory}{why}; {cache}"


def _table(f: Footprint, request: Request, placement: Placement, out: dict[str, Any]) -> str:
    rows: list[tuple[Any, ...]] = [
        ("program and its libraries", *[f.program] * 3),
        ("weights, from the file", *[f.weights] * 3),
        ("weights, rearranged", *[f.repacked] * 3),
        ("image encoder", *[f.encoder] * 3),
        ("encoding an image", *[f.encoder_compute] * 3),
        ("compute buffers", f.compute_stock, f.compute, f.compute),
        ("KV cache, while it reads", f.kv_stock, f.kv_prompt, f.kv_prompt),
        ("scores, a compressed layer", 0, 0, f.scores_and_layer),
        ("Gram matrices", 0, 0, f.grams),
        ("KV cache, while it answers", f.kv_stock, f.kv_prompt, f.kv_kept),
        ("whole rows, in memory", 0, 0, f.whole_memory),
        ("whole rows, in a file", 0, 0, f.whole_file),
        ("peak, while it reads", f.peak_stock, f.peak_full, f.peak_prefill),
        ("while it answers", f.peak_stock, f.answer_full, f.after_compression),
    ]
    columns = ("stock llama.cpp", "kvedge, all kept", request.plan.method)
    alike = request.all_images in (0, request.n_images * request.image_tokens)
    what = f"{request.n_images} image{'s' * (request.n_images != 1)} of {'' if alike else 'up to '}"
    what += f"{request.image_tokens} tokens and "
    about = (
        f"{Path(out['model']).name}: {what if request.n_images else ''}{request.text_tokens} tokens of text, "
        f"{f.prompt_tokens} in all, of which {request.plan.method} {request.plan.budget} keeps {f.kept_tokens}; "
        f"stock context {f.n_ctx}"
    )
    shown = [(name, *(readable(n) if n else "-" for n in figures)) for name, *figures in rows if any(figures)]
    lines = [f"{name:<29}" + "".join(f"{x:>17}" for x in figures) for name, *figures in [("", *columns), *shown]]
    notes, n_ctx = [_given_back(f)], request.n_ctx or out["n_ctx_train"]
    if f.prompt_tokens > n_ctx:
        notes.append(f"kvedge refuses a prompt of {f.prompt_tokens} tokens in a context of {n_ctx}: set --ctx.")
    if not request.keep and f.kept_tokens < f.prompt_tokens and f.peak_bounded < f.peak_prefill:
        notes.append(
            f"With --bounded, where model and method allow it: KV cache {readable(f.kv_bounded)} while the prompt is "
            f"read, compute buffers {readable(f.compute_bounded)}, peak {readable(f.peak_bounded)}."
        )
    notes += _placed(placement)
    return "\n".join([
        wrapped(_verdict(f, placement, out)), wrapped(about), *lines, *map(wrapped, notes), *_most(request, out)
    ])  # fmt: skip


def _given_back(f: Footprint) -> str:
    first = "what encoding an image took before the prompt is read, and " if f.encoder_compute else ""
    text = f"kvedge gives back {first}the compute buffers when the prompt is complete."
    if f.reclaimable:
        text += f" The system may drop {readable(f.reclaimable)} of file pages, which are not counted as needed."
    if f.whole_file:
        text += (
            f" Whole rows are in memory until they are written; then {readable(f.whole_file)} of them are in a file "
            "that the system may drop."
        )
    return text


def _most(request: Request, out: dict[str, Any]) -> list[str]:
    """Returns lines with the number of images that memory holds, with reasons."""
    most = out["most_images"]
    if not most:
        return []
    method = request.plan.method
    rows = [
        ("stock llama.cpp", most["stock"], ""),
        (f"{method}, one prompt", most["one_prompt"], "all rows are there until it is complete"),
        (f"{method}, --bounded", most.get("bounded"), "at most one layer has all rows"),
        (f"{method}, one a message", most["one_per_message"], "each is compressed before the next"),
        ("the model was trained for", max(0, (out["n_ctx_train"] - request.text_tokens) // request.image_tokens), ""),
    ]
    shown = [f"  {name:<29}{n:>8}  {why}".rstrip() for name, n, why in rows if n is not None]
    return [f"images of {request.image_tokens} tokens that memory holds:", *shown]
