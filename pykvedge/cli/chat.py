"""kvedge chat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

import pykvedge
from pykvedge.cli import paths
from pykvedge.errors import UsageError, unknown
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugin_files import load_file
from pykvedge.plans.presets import default_plan
from pykvedge.plans.presets import plan as make_plan

MERGES = {"averaged": "averaged", "pivotal": "pivotal", "weighted": "weighted", "none": "evict"}
_PLAN_SETTINGS = ("recent", "sinks", "text_prior", "scorer", "allocator", "reducer", "decode")
DATA = Path(pykvedge.__file__).parent / "data"  # importlib.resources names no folder in an editable installation
_PATH = click.Path(path_type=Path)


def _option(*names: str, **settings: Any) -> Any:
    return click.option(*names, **settings)


plugin_option = _option(
    "--plugin", "plugins", type=_PATH, multiple=True, metavar="FILE",
    help="A file with methods or stages of your own, .py or a shared library; repeatable.",
)  # fmt: skip
_OPTIONS = (
    _option("--model", type=_PATH, metavar="FILE.gguf", help="The language model. Default: the packaged demo model."),
    _option("--mmproj", type=_PATH, metavar="FILE.gguf", help="The image encoder that belongs to the model."),
    _option("--image", "images", type=_PATH, multiple=True, metavar="PATH",
            help="An image to ask about; repeatable. jpg, png, webp, bmp, gif."),
    _option("--method", metavar="NAME", help="See `kvedge methods`. Default: mixkv."),
    _option("--budget", metavar="AMOUNT",
            help="What is kept: 0.2 of the prompt, or 128 KV pairs per layer and head. Default: 0.2, with mixkv 0.5."),
    _option("--recent", metavar="AMOUNT", help="Last tokens that are always kept: 16, 0.1 of the prompt, or auto."),
    _option("--sinks", type=int, metavar="N", help="First tokens that are always kept."),
    _option("--merge", metavar="KIND", help="What becomes of the others: averaged, pivotal, weighted, or none."),
    _option("--text-prior/--no-text-prior", default=None, help="Whether text outranks image tokens."),
    _option("--scorer", metavar="NAME", help="Another scorer for the method. See `kvedge methods NAME`."),
    _option("--allocator", metavar="NAME", help="Another allocator."),
    _option("--reducer", metavar="NAME", help="Another reducer; --merge under its full name."),
    _option("--decode", metavar="NAME", help="Another policy for what happens while the answer is generated."),
    _option("--set", "changes", multiple=True, metavar="STAGE.NAME=VALUE",
            help="A setting of a stage, for example scorer.window=16; repeatable."),
    _option("--plan", "plan_file", type=_PATH, metavar="FILE.json",
            help="A plan as `kvedge methods NAME --json` prints it, instead of --method and what changes it."),
    plugin_option,
    _option("--profile", type=_PATH, multiple=True, metavar="FILE.json",
            help="What `kvedge calibrate` wrote, for methods that need it; repeatable. Default: found by itself."),
    _option("--session", "session_file", type=_PATH, metavar="FILE",
            help="Go on with the conversation in this file, if it exists; it is saved there after each answer."),
    _option("--stream", is_flag=True,
            help="Read images one by one and compress after each: memory stays at --budget N, however many come."),
    _option("--ctx", type=int, metavar="N", help="Tokens that the conversation may hold. Default: up to 4096."),
    _option("--threads", type=int, metavar="N", help="Default: one per physical core."),
    _option("--gpu-layers", type=int, metavar="N", help="Layers on the GPU, -1 for all."),
    _option("--kv-type", default="f16", show_default=True, metavar="TYPE",
            help="How keys and values are stored: f16, bf16, f32, q8_0, q4_0, kivi4, kivi2, or K:V, as in q8_0:q4_0."),
    _option("--bounded", is_flag=True,
            help="Compress each layer of a prompt before the next one runs: the full cache never exists. Not with "
                 "every model and method; stderr says why not."),
    _option("--max-tokens", type=int, default=512, show_default=True, metavar="N", help="Longest answer."),
    _option("--temp", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token."),
    _option("--top-p", type=float, default=0.95, show_default=True, help="With --temp above 0."),
    _option("--top-k", type=int, default=40, show_default=True, help="With --temp above 0."),
    _option("--seed", type=int, help="Makes answers with --temp above 0 repeatable."),
    _option("--system", default="", metavar="TEXT", help="Text that opens the conversation."),
    _option("--json", "as_json", is_flag=True, help="Print one JSON object: text, tokens, memory, time."),
    _option("--undo/--no-undo", default=True,
            help="Whether a conversation copies its cache before each message, so that /undo and /retry can go back."),
    _option("--history/--no-history", default=True,
            help="Whether what is typed in a conversation is remembered, in ~/.local/state/kvedge."),
    _option("--quiet", is_flag=True, help="Nothing on stderr but errors."),
    _option("--verbose", is_flag=True, help="llama.cpp's log on stderr."),
)  # fmt: skip


def _with_options(command: Any) -> Any:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("prompt", required=False)
@_with_options
def chat(prompt: str | None, **given: Any) -> None:
    """Ask a model about images, or chat with it.

    The KV cache of the prompt is compressed by --method before the answer begins. PROMPT may also come from a pipe;
    without any, a conversation starts in which /help lists the commands.

    \b
    Examples:
      kvedge chat --model m.gguf --mmproj mm.gguf --image cat.jpg "What is the cat doing?"
      kvedge chat ... --image a.jpg --image b.jpg --method lookm --budget 0.1 "What differs?"
      kvedge chat ... --method h2o --budget 256 --sinks 4 "Summarise."
      kvedge chat ... --method snapkv --allocator ada --merge pivotal --set scorer.window=16 "What is this?"
      kvedge chat ... --plugin mine.py --method mine "What is this?"
      echo "Describe the image." | kvedge chat ... --image cat.jpg --json
      kvedge chat ... --image a.jpg --method lookm --bounded "What is it?"      where the full cache does not fit
      kvedge chat ...                        a conversation; /image PATH adds an image
      kvedge chat ... --session talk.kvs "And then?"      goes on where the last run ended
      kvedge chat ... --stream --budget 2048 --image 1.jpg --image 2.jpg ... "What happens?"      frames without end
    """
    for file in given["plugins"]:
        load_file(file)
    plan = _plan(given)
    if given["profile"] and not plan.profile_kinds():
        raise UsageError(
            f"method '{plan.method}' uses no profile; leave --profile out, or see `kvedge calibrate --help`"
        )
    model, mmproj = model_files(given["model"], given["mmproj"])
    if given["images"] and mmproj is None:
        raise UsageError("--image needs the image encoder of the model: pass it with --mmproj")
    question = _question(prompt)
    if question is None and given["as_json"]:
        raise UsageError("--json needs a PROMPT, as argument or from a pipe")
    sys.exit(_run(question, plan, model, mmproj, given))


def _run(question: str | None, plan: Plan, model: Path, mmproj: Path | None, given: dict[str, Any]) -> int:
    import threading

    from pykvedge.chat.session import Session
    from pykvedge.cli.display import Display
    from pykvedge.cli.talk.chat import Chat, Style
    from pykvedge.cli.talk.lines import history_file
    from pykvedge.cli.talk.loop import converse
    from pykvedge.models.images import load_picture
    from pykvedge.runtime.interrupt import as_event
    from pykvedge.runtime.sampling import Sampling

    sampling = Sampling(**{k: given[k] for k in ("temp", "top_p", "top_k", "seed", "max_tokens")})
    images = [paths.expanded(path) for path in given["images"]]
    # those of a stream are loaded when it is their turn; a wrong path is found now
    pictures = [path if given["stream"] and paths.is_file(path) else load_picture(path) for path in images]
    display = Display(enabled=not given["quiet"] and not given["verbose"])
    settings = {k: given[k] for k in ("gpu_layers", "kv_type", "system", "verbose", "profile", "bounded", "stream")}
    file = _session_file(given["session_file"])
    settings["undo"] = given["undo"] and question is None and not given["stream"]
    settings["measure_peak"] = given["as_json"]
    settings.update(n_ctx=positive("--ctx", given["ctx"]), threads=positive("--threads", given["threads"]))
    with as_event(threading.Event()) as cancel:
        try:
            session = Session(model, mmproj, plan, progress=display, cancel=cancel, **settings)
        finally:
            display.done()
    with session:
        if file is not None and paths.exists(file):
            if given["system"]:
                raise UsageError(f"--system opens a conversation, but the one in {file} has begun; leave it out")
            session.load(file, plan if _chooses_plan(given) else None)
        talk = Chat(session, sampling, Style(given["as_json"], given["quiet"]), display, file)
        if question is not None:
            return talk.once(question, pictures)
        return converse(talk, pictures, history_file() if given["history"] else None)


def _session_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    path = paths.expanded(path)
    if not paths.is_folder(path.parent):
        raise UsageError(f"--session {path} cannot be written: there is no folder {path.parent}")
    return path


def _chooses_plan(given: dict[str, Any]) -> bool:
    names = ("method", "budget", "merge", "plan_file", *_PLAN_SETTINGS)
    return bool(given["changes"]) or any(given[name] is not None for name in names)


def positive(option: str, value: int | None) -> int:
    """The value, 0 for none. Raises UsageError for a number below 1."""
    if value is not None and value < 1:
        raise UsageError(f"{option} must be at least 1, not {value}")
    return value or 0


def _plan(given: dict[str, Any]) -> Plan:
    settings = {k: given[k] for k in _PLAN_SETTINGS if given[k] is not None}
    merge = given["merge"]
    if merge is not None:
        if merge not in MERGES:
            raise unknown("merge", merge, MERGES)
        if settings.setdefault("reducer", MERGES[merge]) != MERGES[merge]:
            raise UsageError(f"--merge {merge} and --reducer {settings['reducer']} contradict each other; pass one")
    settings.update(_parsed(change) for change in given["changes"])
    if given["plan_file"] is None:
        if given["method"] is None:
            return default_plan(given["budget"], **settings)
        return make_plan(given["method"], given["budget"], **settings)
    if settings or given["method"] is not None or given["budget"] is not None:
        raise UsageError("--plan holds the whole plan; change the file, or use --method without --plan")
    return read_plan(given["plan_file"])


def _parsed(change: str) -> tuple[str, str]:
    key, equals, value = change.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"--set takes STAGE.NAME=VALUE, for example scorer.window=16, not '{change}'")
    return key.strip(), value.strip()


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file. Raises UsageError if it cannot be read or is none."""
    try:
        return Plan.from_json(paths.expanded(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a plan: it is not text") from None


def model_files(model: Path | None, mmproj: Path | None) -> tuple[Path, Path | None]:
    """The files that were asked for, or the packaged demo model. Raises UsageError where there is none."""
    if model is not None:
        return paths.expanded(model), paths.expanded(mmproj) if mmproj else None
    demo, demo_mmproj = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"
    if mmproj is not None or not demo.exists():
        raise UsageError(
            "no model: pass --model FILE.gguf, and --mmproj FILE.gguf to ask about images (any GGUF pair that runs on "
            "llama.cpp, for example a LLaVA-1.5 or Qwen2-VL)"
        )
    return demo, demo_mmproj if demo_mmproj.exists() else None


def _question(prompt: str | None) -> str | None:
    """The prompt, from the argument or a pipe; None when a person sits at the terminal."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    text = "" if sys.stdin is None else sys.stdin.buffer.read().decode("utf-8", "replace")
    if not text.strip():
        raise UsageError("the prompt is empty; write a question, as argument or through a pipe")
    return text.rstrip("\r\n")
