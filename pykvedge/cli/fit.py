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
from pykvedge.system.shown import counted

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
           help="The number of images in the prompt, without --image. Default: 1 if the model has an image encoder."),
    option("--image-size", group="Picture", common=True, metavar="WxH",
           help="The size of each image in pixels, without --image. Default: 1024x768."),
    *options.IMAGE_LIMITS,
    option("--encoder-tokens", group="Picture", type=click.IntRange(1, 10**6), metavar="N",
           help="The number of tokens that the encoder makes from each image, if you know it."),
    option("--text", "text_tokens", group="Answer", common=True, type=click.IntRange(1, 10**8), default=64,
           show_default=True, metavar="N",
           help="The number of text tokens in the prompt."),
    *options.COMPOSITION,
    options.CTX,
    options.THREADS,
    *options.DEVICES,
    options.KV_TYPE,
    option("--keep", group="What is kept", config=True, type=click.Choice(("ram", "disk")),
           help="Also count the rows of `kvedge chat --keep`, in memory or in a file."),
    options.KEEP_TYPE,
    options.JSON,
)  # fmt: skip
def fit(file: Path | None, **given: Any) -> None:
    """Estimate the memory of a conversation before loading the model.

    It also says which option makes an image cheaper: --image-max-tokens (before the encoder) or --image-tokens (after).
    The figures come from the metadata of the files: weights, image encoder, compute buffers, and the KV cache of stock
    llama.cpp, of the whole prompt, and compressed. It says whether these fit this machine, and how many images would
    fit. With GPUs or --rpc it also says which layers go there and their memory; --gpu-layers auto finds how many fit.
    For a model by name (-hf) only the headers are fetched. An encoder that cuts images into tiles is loaded for a
    moment, to count their tokens.

    \b
    Examples:
      kvedge fit model.gguf --images 4
      kvedge fit model.gguf --images 8 --image-size 1920x1080 --budget 0.1
      kvedge fit -hf user/repo:Q4_K_M --images 4      before the download
      kvedge fit model.gguf --text 8000 --ctx 16384 --json
      kvedge fit model.gguf --text 16000 --method snapkv --gpu-layers auto
      kvedge fit model.gguf --image report.pdf --image-tokens 0.25 --budget 0.1
      kvedge fit model.gguf --image photo.jpg --method mixkv
    """
    from pykvedge.fit.footprint import footprint
    from pykvedge.system import memory

    if file is not None and given["model"] is not None:
        raise UsageError(f"{file} and --model both name a model; pass one of them")
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
            raise UsageError(
                "--encoder-tokens excludes --image-min-tokens and --image-max-tokens; omit one or the other"
            )
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
        raise UsageError(
            "--image excludes --images and --image-size, because the files give number and size; omit one or the other"
        )
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
        verdict = "fits" if share.fits else "does not fit: use fewer --gpu-layers, or auto"
        lines.append(
            f"{share.device.name} takes {what}: weights {readable(share.weights)}, KV cache of the prompt "
            f"{readable(share.kv_prompt)} and of the answer {readable(share.kv_kept)}, working memory "
            f"{readable(share.working)}; {readable(share.usable)} are available: {verdict}"
        )
    if lines:
        lines.append("during compression the host also holds a copy of the keys and values of these layers")
    return lines


def _verdict(f: Footprint, placement: Placement, out: dict[str, Any]) -> str:
    """Returns one line: whether the conversation fits, and the sizes of the KV cache."""
    needed, available = (out["bytes"][name] for name in ("needed", "available"))
    cache = f"KV {readable(f.kv_prompt)} -> {readable(f.kv_kept)} ({out['method']} {out['budget']})"
    if available is None:
        return f"Needs {readable(needed)}, {cache}; the available memory is unknown"
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
        ("KV cache, prefill", f.kv_stock, f.kv_prompt, f.kv_prompt),
        ("scores, one compressed layer", 0, 0, f.scores_and_layer),
        ("Gram matrices", 0, 0, f.grams),
        ("KV cache, decode", f.kv_stock, f.kv_prompt, f.kv_kept),
        ("whole rows, in memory", 0, 0, f.whole_memory),
        ("whole rows, in a file", 0, 0, f.whole_file),
        ("peak, prefill", f.peak_stock, f.peak_full, f.peak_prefill),
        ("total, decode", f.peak_stock, f.answer_full, f.after_compression),
    ]
    columns = ("stock llama.cpp", "kvedge, all kept", request.plan.method)
    alike = request.all_images in (0, request.n_images * request.image_tokens)
    what = f"{counted(request.n_images, 'image')} of {'' if alike else 'up to '}"
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
        notes.append(f"The prompt has {f.prompt_tokens} tokens, more than the context of {n_ctx}: set a larger --ctx.")
    if not request.keep and f.kept_tokens < f.prompt_tokens and f.peak_bounded < f.peak_prefill:
        notes.append(
            f"With --bounded, if model and method allow it: KV cache {readable(f.kv_bounded)} during prefill, "
            f"compute buffers {readable(f.compute_bounded)}, peak {readable(f.peak_bounded)}."
        )
    notes += _placed(placement)
    return "\n".join([
        wrapped(_verdict(f, placement, out)), wrapped(about), *lines, *map(wrapped, notes), *_most(request, out)
    ])  # fmt: skip


def _given_back(f: Footprint) -> str:
    first = "the buffers of the image encoder before prefill, and " if f.encoder_compute else ""
    text = f"kvedge frees {first}the compute buffers after prefill."
    if f.reclaimable:
        text += f" {readable(f.reclaimable)} of file pages are not counted, because the system may drop them."
    if f.whole_file:
        text += (
            f" The rows of --keep are in memory until they are written; then {readable(f.whole_file)} of these rows "
            f"are in a file whose pages the system may drop."
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
        (f"{method}, one prompt", most["one_prompt"], "all rows until the prompt is complete"),
        (f"{method}, --bounded", most.get("bounded"), "at most one layer has all rows"),
        (f"{method}, one per message", most["one_per_message"], "each message is compressed at its end"),
        (
            "limit of the training length",
            max(0, (out["n_ctx_train"] - request.text_tokens) // request.image_tokens),
            "",
        ),
    ]
    shown = [f"  {name:<29}{n:>8}  {why}".rstrip() for name, n, why in rows if n is not None]
    return [f"number of images of {request.image_tokens} tokens that fit in memory:", *shown]
