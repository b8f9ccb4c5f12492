"""The options that several commands share, each declared once, so a name means the same in every command."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from pykvedge.cli import completion, configured, paths
from pykvedge.cli.command import option
from pykvedge.errors import UsageError
from pykvedge.models.offload import Offload
from pykvedge.plans.making import changed
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugin_files import load_file
from pykvedge.plans.presets import DEFAULT_METHOD, STREAM_METHOD
from pykvedge.reference.kvtypes import KEEP_TYPES, NAMES, ROTATES

_PLAN_SETTINGS = (
    "recent", "sinks", "text_prior", "critical", "critical_half", "scorer", "allocator", "reducer", "decode", "pruner",
    "image_tokens",
)  # fmt: skip
_LARGEST_PLAN = 1 << 20  # bytes
MODEL_HELP = "The language model: a file, its folder, or USER/REPO[:QUANT]. Default: the packaged demo model."
_BUDGET_HELP = (
    "KV pairs to keep: a share of the prompt (0.2), or a number per layer and KV head (128). Default: "
    "0.2; 0.5 for methods kvedge and mixkv."
)


class FilePath(click.Path):
    """A path that is not empty and not too long for the system."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        path, given = super().convert(value, param, context), os.fspath(value)
        if not given:
            self.fail("the path is empty", param, context)
        paths.check_local(given)
        try:
            os.lstat(given)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                self.fail(f"the path '{given[:40]}...' is invalid: {error.strerror}", param, context)
        return path


class Whole(click.ParamType):
    """A whole number within bounds."""

    name = "number"

    def __init__(self, least: int = 1, most: int = 10**9) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        number: int = click.INT.convert(value, param, context)
        option_name = param.opts[0] if param is not None else "it"
        if number < self._least:
            raise UsageError(f"{option_name} must be at least {self._least}, not {number}")
        if number > self._most:
            raise UsageError(f"{option_name} must be at most {self._most}, not {number}")
        return number


class RunningProcess(click.ParamType):
    """The number of a process that runs."""

    name = "process"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        from pykvedge.system import memory

        number: int = click.IntRange(1).convert(value, param, context)
        if not memory.is_running(number):
            self.fail(f"process {number} does not exist", param, context)
        return number


PATH = FilePath()


class LayerCount(click.ParamType):
    """A number of layers, or "auto"."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int | str:
        return value if value == "auto" else click.INT.convert(value, param, context)


# ------------------------------------------------------------------------------------------------------------
# The model and the images

MODEL = option("--model", "-m", group="Model", common=True, config=True, type=PATH, metavar="MODEL",
               shell_complete=completion.files_or_models, help=MODEL_HELP)  # fmt: skip
MMPROJ = option("--mmproj", "-mm", group="Model", common=True, config=True, type=PATH, metavar="FILE.gguf",
                help="The image encoder (mmproj file) of the model, or 'none'. Default: the mmproj file in the "
                     "model's folder.")  # fmt: skip
HUB = (
    option("-hf", "--hf-repo", "hf_repo", group="Model", common=True, metavar="USER/REPO[:QUANT]",
           shell_complete=completion.models,
           help="A model by name. The first use downloads the model and its image encoder into the cache (`kvedge "
                "list`). Default QUANT: Q4_K_M, else Q8_0."),
    option("--hf-file", "-hff", group="Model", metavar="PATH",
           help="The model's file in the repository, if QUANT does not select one file."),
    option("--hf-mmproj", group="Model", metavar="PATH",
           help="The image encoder's file in the repository, or 'none'. Default: chosen automatically."),
    option("--offline", group="Model", is_flag=True,
           help="Use only models in the cache, and make no network request."),
)  # fmt: skip
IMAGE = option(
    "--image", "images", group="Picture", common=True, type=PATH, multiple=True, metavar="PATH",
    help="An image to ask about; repeatable. Formats: jpg, png, webp, bmp, gif, and pdf: all pages, or some: "
         "'report.pdf[3-7]'.",
)  # fmt: skip

IMAGE_LIMITS = (
    option("--image-min-tokens", group="Picture", config=True, type=Whole(), metavar="N",
           help="Enlarge each image before encoding until it has at least N tokens. Only for encoders that take "
                "images of any size."),
    option("--image-max-tokens", group="Picture", config=True, type=Whole(), metavar="N",
           help="Shrink each image before encoding until it has at most N tokens. Only for encoders that take images "
                "of any size."),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------
# What is kept

_KEPT = "What is kept"
METHOD = option("--method", group=_KEPT, common=True, config=True, metavar="NAME",
                shell_complete=completion.methods,
                help=f"The compression method (`kvedge methods` lists them). Default: {DEFAULT_METHOD}.")  # fmt: skip
BUDGET = option("--budget", group=_KEPT, common=True, config=True, metavar="AMOUNT", help=_BUDGET_HELP)
PLUGIN = option(
    "--plugin", "plugins", group=_KEPT, type=PATH, multiple=True, metavar="FILE",
    help="A plugin with your own methods or stages: a .py file or a shared library; repeatable.",
)  # fmt: skip
SET = option("--set", "changes", group=_KEPT, multiple=True, metavar="STAGE.NAME=VALUE",
             shell_complete=completion.settings,
             help="A setting of a stage, for example scorer.window=16; repeatable.")  # fmt: skip
# options that change parts of a method
CHANGES = (
    option("--recent", group=_KEPT, metavar="AMOUNT",
           help="The number of last tokens that are always kept: a number (16), a share of the prompt (0.1), or auto."),
    option("--sinks", group=_KEPT, type=int, metavar="N", help="The number of first tokens that are always kept."),
    option("--text-prior/--no-text-prior", group=_KEPT, default=None, help="Keep text before image tokens."),
    option("--critical", group=_KEPT, metavar="NORM",
           help="Select the first half of the budget by score, and the rest by attention times the norm of the "
                "value's output: l1, l2 or none."),
    option("--critical-half", group=_KEPT, metavar="OF",
           help="The half of --critical counts protected tokens (budget) or does not count them (free)."),
    option("--scorer", group=_KEPT, metavar="NAME", shell_complete=completion.members,
           help="Use another scorer in the method. See `kvedge methods NAME`."),
    option("--allocator", group=_KEPT, metavar="NAME", shell_complete=completion.members, help="Use another "
    "allocator."),
    option("--reducer", group=_KEPT, metavar="NAME", shell_complete=completion.members,
           help="How to reduce the KV pairs that are not kept: evict, averaged, pivotal, weighted, ..."),
    option("--decode", group=_KEPT, metavar="NAME", shell_complete=completion.members,
           help="Use another policy for KV pairs during decoding."),
    option("--image-tokens", "image_tokens", group="Picture", metavar="AMOUNT",
           help="Tokens of each image or image tile to read: a share (0.5) or a number (288). Default: all."),
    option("--pruner", group="Picture", metavar="NAME", shell_complete=completion.members,
           help="The pruner that chooses the tokens of --image-tokens: residual (the default), grid, dart, random."),
    SET,
)  # fmt: skip
PLAN = option(
    "--plan", "plan_file", group=_KEPT, type=PATH, metavar="FILE.json",
    help="A plan file, as `kvedge methods NAME --json` prints. It replaces --method and the options that change a "
         "method.",
)  # fmt: skip
COMPOSITION = (METHOD, BUDGET, *CHANGES, PLAN, PLUGIN)
PROFILE = option(
    "--profile", group=_KEPT, type=PATH, multiple=True, metavar="FILE.json",
    help="A profile from `kvedge calibrate`, for methods that need one; repeatable. Default: found automatically.",
)  # fmt: skip

KEEP_TYPE = option(
    "--keep-type", group=_KEPT, config=True, type=click.Choice(KEEP_TYPES),
    help="The type in which --keep stores KV rows: f16 (the default, exact) or q8_0 (half the size, rounded).",
)  # fmt: skip
KEEP = (
    option("--keep", group=_KEPT, common=True, config=True, type=click.Choice(("ram", "disk")),
           help="Also keep all uncompressed KV rows, in memory (ram) or in a file (disk). A later message is then "
                "answered as if the whole conversation were one prompt."),
    option("--keep-folder", group=_KEPT, config=True, type=PATH, metavar="PATH",
           help="The folder for the file of --keep disk. Default: ~/.cache/kvedge/keep."),
    option("--keep-space", group=_KEPT, config=True, metavar="SIZE",
           help="The largest size of all rows of --keep. Default: 20GiB."),
    KEEP_TYPE,
)  # fmt: skip
AGE = option(
    "--age", group=_KEPT, type=float, metavar="SHARE",
    help="With --keep: each message reduces the KV pairs of images that it does not ask about to this share (0.5). A "
         "question about an image restores its pairs.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------
# Memory and devices

_MACHINE = "Memory and devices"
CTX = option("--ctx", "-c", also=("--ctx-size",), group=_MACHINE, common=True, config=True, type=Whole(), metavar="N",
             help="The largest number of tokens in a conversation. Default: up to 4096.")  # fmt: skip
THREADS = option("--threads", "-t", group=_MACHINE, common=True, config=True, type=Whole(), metavar="N",
                 help="The number of processor threads. Default: one per physical core; one less in decoding if that "
                      "is faster.")  # fmt: skip
DEVICES = (
    option("--gpu-layers", "-ngl", also=("--n-gpu-layers",), group=_MACHINE, common=True, config=True,
           type=LayerCount(), metavar="N",
           help="The number of layers on GPUs and other machines: a number, -1 for all, or auto for as many as fit."),
    option("--device", "-dev", group=_MACHINE, config=True, default="auto", show_default=True, metavar="NAMES",
           help="Devices for the layers: auto, none, or names from `kvedge doctor`, for example CUDA0."),
    option("--rpc", group=_MACHINE, config=True, default="", metavar="HOST:PORT",
           help="Machines that run `kvedge rpc-server` and hold layers on their devices; separate several with "
                "commas."),
)  # fmt: skip
PARENT = option("--parent-pid", group=_MACHINE, type=RunningProcess(), metavar="PID",
                help="End when the process PID ends, or when stdin is a pipe and closes.")  # fmt: skip
KV_TYPE = option(
    "--kv-type", group=_MACHINE, config=True, default="f16", show_default=True, metavar="TYPE",
    shell_complete=completion.of(lambda: NAMES),
    help=f"The type in which keys and values are stored: {', '.join(NAMES)}, or K:V, for example q8_0:q4_0.",
)  # fmt: skip
KV_ROTATE = option(
    "--kv-rotate", group=_MACHINE, default="auto", show_default=True, type=click.Choice(ROTATES), metavar="WHEN",
    help="Rotate rows before they are stored as q8_0, q4_0 or tq3, to reduce the rounding error of large channels: "
         "on, off, or auto (llama.cpp's rule: on if head sizes are multiples of 64).",
)  # fmt: skip
CACHE = (
    option("--cache", group="Picture", config=True, type=PATH, metavar="DIR",
           help="A folder that caches encoded images for later runs. Several runs may share the folder."),
    option("--cache-size", group="Picture", config=True, metavar="SIZE",
           help="The largest size of the folder of --cache, for example 500MiB. Default: 4GiB."),
)  # fmt: skip
LOOKUP = option(
    "--lookup", group="Answer", is_flag=True,
    help="Draft tokens of the answer from earlier text, and verify several at once. The answer is the same, and "
         "sooner if it repeats earlier text.",
)  # fmt: skip
EXACT = option(
    "--exact", group="Answer", is_flag=True,
    help="With --keep: draft answers with the compressed cache and verify them with the full cache. The answers "
         "equal those of --method full.",
)  # fmt: skip
JSON = option("--json", "as_json", common=True, is_flag=True, help="Print one JSON object.")
QUIET = option("--quiet", "-q", common=True, is_flag=True, help="Print only errors on stderr.")
VERBOSE = option("--verbose", "-v", is_flag=True, help="Print llama.cpp's log on stderr.")


def taking(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a decorator that adds these options to a command, in the order of its help."""

    def decorate(command: Any) -> Any:
        for one in reversed(options):
            command = one(command)
        return command

    return decorate


# ------------------------------------------------------------------------------------------------------------
# Values of the options


def load_plugins(given: Mapping[str, Any]) -> None:
    for file in given["plugins"]:
        load_file(file)


def changes(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings of --set by full name. Raises UsageError for a malformed one or two values of a name."""
    found: dict[str, str] = {}
    for name, value in map(_parsed, given["changes"]):
        if found.setdefault(name, value) != value:
            raise UsageError(f"--set gives {name} two values, {found[name]} and {value}; omit one")
    return found


def chosen_plan(given: Mapping[str, Any], saved: Plan | None = None) -> Plan:
    """Makes the plan of --method and its changes, or of --plan. Raises UsageError and what making a plan raises.

    saved: the plan of a saved conversation; typed options change it, the configuration does not.
    """
    settings = {k: given[k] for k in _PLAN_SETTINGS if given[k] is not None}
    settings.update(changes(given))
    if saved is not None:
        method, budget = (None if name in configured.in_effect() else given[name] for name in ("method", "budget"))
        if method is None and given["plan_file"] is None:
            return changed(saved, budget, **settings)
    if given["plan_file"] is None:
        unnamed = STREAM_METHOD if given.get("stream") else DEFAULT_METHOD
        method = unnamed if given["method"] is None else given["method"]
        return make_plan(method, given["budget"], **settings)
    if settings or given["method"] is not None or given["budget"] is not None:
        raise UsageError(
            "--plan excludes --method, --budget and the options that change a method; change the plan file, or omit "
            "--plan"
        )
    return read_plan(given["plan_file"])


def chooses_plan(given: Mapping[str, Any]) -> bool:
    """Returns whether an option, and not only the configuration, says what to keep."""
    names = {"method", "budget", "plan_file", *_PLAN_SETTINGS} - set(configured.in_effect())
    return bool(given["changes"]) or any(given[name] is not None for name in names)


def _parsed(change: str) -> tuple[str, str]:
    key, equals, value = change.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"--set takes STAGE.NAME=VALUE, for example scorer.window=16, not '{change}'")
    return key.strip(), value.strip()


def read_plan(path: Path) -> Plan:
    """Reads a plan from a JSON file. Raises UsageError if the file is unreadable or no plan."""
    try:
        with paths.expanded(path).open("rb") as file:
            data = file.read(_LARGEST_PLAN + 1)  # a device has no end
        if len(data) > _LARGEST_PLAN:
            raise UsageError(f"{path} is not a plan: the file is larger than {_LARGEST_PLAN >> 20} MiB")
        return Plan.from_json(data.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a plan: the file is not UTF-8 text") from None


def running(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of a session from CTX, THREADS, KV_TYPE, KV_ROTATE and DEVICES, if the command has them."""
    from pykvedge.native import crash

    if "rpc" in given:
        crash.arm()
    out = {k: given[k] for k in ("gpu_layers", "device", "rpc", "kv_type", "kv_rotate") if k in given}
    if "ctx" in given:
        out["n_ctx"] = given["ctx"] or 0
    return {**out, "threads": given["threads"] or 0}


def cache(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of CACHE. Raises UsageError for an invalid size, or a size without --cache."""
    if given["cache"] is None:
        if given["cache_size"] is not None:
            raise UsageError("--cache-size needs --cache: add --cache DIR")
        return {}
    out: dict[str, Any] = {"cache": paths.expanded(given["cache"])}
    return out if given["cache_size"] is None else {**out, "cache_size": size("--cache-size", given["cache_size"])}


def keep(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of KEEP. Raises UsageError for an invalid size, or an option without --keep."""
    names = ("keep_folder", "keep_space", "keep_type", "age")
    out: dict[str, Any] = {name: given[name] for name in names if given.get(name) is not None}
    if given["keep"] is None:
        for name in [*out, *["exact"] * bool(given.get("exact"))]:
            raise UsageError(f"--{name.replace('_', '-')} needs --keep: add --keep ram or --keep disk")
        return {}
    if "keep_folder" in out:
        if given["keep"] != "disk":
            raise UsageError("--keep-folder needs --keep disk: add --keep disk, or omit --keep-folder")
        out["keep_folder"] = os.fspath(paths.expanded(out["keep_folder"]))
    if "keep_space" in out:
        out["keep_space"] = size("--keep-space", out["keep_space"])
    return {"keep": given["keep"], **out}


def size(name: str, text: str) -> int:
    """Parses a number of bytes >= 1, as in 500MiB, 1.5GiB or 4GB. Raises UsageError for any other text."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,3})?) ?(?:([KMGT])(I?))?B?", text.strip().upper(), re.ASCII)
    unit = found[2] if found else None
    scale = (1024 if found and found[3] else 1000) ** ("KMGT".index(unit) + 1) if unit else 1
    n_bytes = int(float(found[1]) * scale) if found else 0
    if n_bytes < 1:
        raise UsageError(f"{name} takes a number of bytes, for example 500MiB or 4GiB, not '{text}'")
    return n_bytes


def image_limits(given: Mapping[str, Any]) -> dict[str, int]:
    """Returns the settings of IMAGE_LIMITS."""
    return {name: given[name] or 0 for name in ("image_min_tokens", "image_max_tokens")}


def offload(given: Mapping[str, Any], n_ctx: int = 0) -> Offload:
    """Returns the Offload of DEVICES. n_ctx: tokens for which "auto" leaves room."""
    from pykvedge.native import crash
    from pykvedge.runtime.settings import Settings

    crash.arm()
    return Settings(gpu_layers=given["gpu_layers"], device=given["device"], rpc=given["rpc"], n_ctx=n_ctx).offload


def pixels(text: str, most: int) -> tuple[int, int]:
    """Parses width and height of --image-size. Raises UsageError for an invalid text, or a side above `most`."""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.lower(), re.ASCII)
    width, height = map(int, found.groups()) if found else (0, 0)
    if not (0 < width <= most and 0 < height <= most):
        raise UsageError(f"--image-size takes WIDTHxHEIGHT in pixels up to {most}, for example 336x336, not '{text}'")
    return width, height


def listed(name: str, text: str) -> list[str]:
    """Splits "A,B" into its parts, each once. Raises UsageError if there is no part."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError(f"{name} is empty; give at least one value")
    return names
