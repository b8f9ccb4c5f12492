"""The command `kvedge serve` answers over HTTP."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pykvedge.cli import options, paths, tuning
from pykvedge.cli.command import Number, command, option
from pykvedge.cli.modelfiles import model_files
from pykvedge.cli.progress import Display
from pykvedge.errors import UsageError
from pykvedge.system.memory import readable

_SERVER, _MACHINE = "Server", "Memory and devices"
_EXTRA = ("anyio", "httpcore", "httptools", "prometheus_client", "pydantic", "starlette", "uvicorn")
_MUCH = 256 << 20  # a picture that needs more bytes is mentioned
# Longest wait of the thread that computes tokens for another thread with Python's lock; Python's default is 5 ms.
_SWITCH_S = 0.0005
_LOOP = () if sys.platform == "win32" else ("uvloop",)


@command()
@options.taking(
    options.MODEL, options.MMPROJ, *options.HUB, *options.IMAGE_LIMITS,
    option("--allow-https-images", group="Picture", is_flag=True,
           help="Download pictures that requests name with https: URLs."),
    option("--image-folder", group="Picture", type=options.PATH, metavar="DIR",
           help="Requests may name pictures in this folder with file: URLs."),
    *options.CACHE, *options.COMPOSITION, *options.KEEP,
    option("--host", group=_SERVER, common=True, config=True, default="127.0.0.1", show_default=True,
           metavar="ADDRESS", help="The address to listen on. Other machines can connect only with a key."),
    option("--port", group=_SERVER, common=True, config=True, type=click.IntRange(0, 65535), default=8137,
           show_default=True, help="The port; 0 takes a free port and prints it."),
    option("--key-file", also=("--api-key-file",), group=_SERVER, common=True, type=options.PATH, metavar="FILE",
           help="A file of API keys: one per line, and optionally a name after the key. A request must send a key: "
                "Authorization: Bearer KEY. A conversation belongs to the key that began it."),
    option("--share-prompts", group=_SERVER, is_flag=True,
           help="Reuse a prompt of one key for all other keys. Other keys can then notice from the shorter time that "
                "the prompt was read before."),
    option("--allow-host", "hosts", group=_SERVER, multiple=True, metavar="NAME",
           help="Accept requests with this name in their Host header; repeatable."),
    option("--allow-origin", "origins", group=_SERVER, multiple=True, metavar="ORIGIN",
           help="Accept requests from web pages of this origin, for example https://chat.example:3000; localhost: "
                "all origins of this machine; *: all origins; repeatable."),
    option("--name", also=("--alias",), group=_SERVER, default="", metavar="NAME",
           help="The model's name in requests and answers. Default: the name of its file."),
    option("--strict-model", group=_SERVER, is_flag=True, help="Refuse requests that name another model."),
    option("--queue", group=_SERVER, type=click.IntRange(1, 10000), default=64, show_default=True, metavar="N",
           help="The largest number of waiting requests; further requests get status 503."),
    option("--max-body", group=_SERVER, metavar="SIZE", help="The largest size of a request. Default: 64MiB."),
    option("--grace", group=_SERVER, type=Number(0, 3600), default=10, show_default=True, metavar="SECONDS",
           help="The time that answers may still take after Ctrl-C or SIGTERM."),
    options.PARENT,
    option("--tune", group=_SERVER, config=True, type=Number(0.1, 60 * 24 * 7), metavar="MINUTES",
           help="Run `kvedge tune` for so many minutes in total while the server has no request. The next start uses "
                "the plan that it finds."),
    option("--max-tokens", "-n", also=("--predict", "--n-predict"), group="Answer", common=True, config=True,
           type=options.Whole(), metavar="N",
           help="The largest number of tokens of an answer, if the request does not set one. Default: the rest of "
                "the context."),
    options.LOOKUP, options.EXACT,
    option("--temp", also=("--temperature",), group="Sampling", config=True, type=Number(0, 100), default=0.0,
           show_default=True, help="The temperature, if the request does not set one; 0 takes the likeliest token."),
    option("--seed", "-s", group="Sampling", type=int, metavar="N",
           help="The seed, if the request does not set one. Default: a new random seed for each answer."),
    options.CTX, options.THREADS, *options.DEVICES, options.KV_TYPE, options.KV_ROTATE,
    option("--memory", group=_MACHINE, common=True, config=True, metavar="SIZE",
           help="The largest size of the keys and values of all conversations, for example 2GiB. Default: half of "
                "the free memory."),
    option("--parallel", "-np", group=_MACHINE, common=True, config=True, type=click.IntRange(1, 64), default=4,
           show_default=True, metavar="N", help="The number of answers generated at the same time."),
    option("--park", group=_MACHINE, type=options.PATH, metavar="DIR",
           help="Save waiting conversations in this folder, also for the next run. Default: a temporary folder."),
    option("--park-size", group=_MACHINE, metavar="SIZE", help="The largest size of this folder. Default: 4GiB."),
    options.QUIET, options.VERBOSE,
)  # fmt: skip
def serve(**given: Any) -> None:
    """Answer over HTTP, for clients of OpenAI and Anthropic.

    Routes: /v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /health, /metrics, and /v1/kvedge/... for
    methods, plans and memory; /openapi.json describes them. One line of JSON on stdout gives the address. The options
    of `kvedge chat` choose what is kept of a prompt; a request can change them in its field "kvedge". Waiting
    conversations stay in memory up to --memory, then in a folder, and continue later.

    \b
      kvedge serve -m model.gguf --budget 0.2
      kvedge serve ... --memory 2GiB --parallel 8
      kvedge serve ... --host 0.0.0.0 --key-file key.txt --allow-host myhost
      kvedge serve ... --port 0 --parent-pid $$     ends when the shell ends
    """
    missing = [name for name in (*_EXTRA, *_LOOP) if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"kvedge serve needs {', '.join(missing)}: pip install 'kvedge[serve]'")
    from pykvedge.native import crash
    from pykvedge.runtime.loaded import load
    from pykvedge.runtime.sampling import Sampling
    from pykvedge.serve import server

    options.load_plugins(given)
    plan = options.chosen_plan(given)
    chosen = _options(given, server)
    server.check(chosen, plan)
    model, mmproj = model_files(given)
    chosen = replace(chosen, tune=tuning.in_idle_time(given, model, mmproj))
    plan, line = tuning.taken(given, plan, model, hint=given["tune"] is None)
    chosen = replace(chosen, tuned=line)
    display = Display(enabled=not given["quiet"] and not given["verbose"])
    running = options.running(given)
    crash.left(
        f"the conversations in {chosen.park} are kept for the next start" if chosen.park else "all answers are lost"
    )
    loading = {name: running[name] for name in ("threads", "gpu_layers", "device", "rpc")}
    with display:
        loaded = load(model, mmproj, progress=display, verbose=given["verbose"], **loading, **options.cache(given),
                      **options.image_limits(given))  # fmt: skip
    with loaded:
        say = (lambda text: None) if given["quiet"] else (lambda text: click.echo(f"kvedge: {text}", err=True))
        if mmproj is not None and (line := _encoding(mmproj, given)):
            say(line)
        sys.setswitchinterval(_SWITCH_S)
        server.serve(loaded, plan, Sampling(temp=given["temp"], seed=given["seed"]), chosen, say)


def _encoding(mmproj: Path, given: dict[str, Any]) -> str:
    """Returns a line about the memory of the largest picture beside --memory; "" if small or unknown."""
    from pykvedge.fit.footprint import encoder_compute
    from pykvedge.models.gguf import read_header
    from pykvedge.models.images import MAX_PIXELS
    from pykvedge.models.imagetokens import image_grid, seen_at_most, token_limits

    header, side = read_header(mmproj), math.isqrt(MAX_PIXELS)
    limits = token_limits(header, *options.image_limits(given).values())
    if limits is None or not seen_at_most(header, limits)[0]:
        return ""
    most = encoder_compute(header, image_grid(header, side, side, limits))
    return (
        f"encoding a picture takes up to {readable(most)} in addition to --memory; a smaller --image-max-tokens "
        f"takes less" * (most > _MUCH)
    )


def _options(given: dict[str, Any], server: Any) -> Any:
    from pykvedge.runtime.settings import Keep
    from pykvedge.serve.guarding import read_keys
    from pykvedge.serve.job import Limits
    from pykvedge.serve.pictures import Sources

    def size(name: str, default: int) -> int:
        text = given[name.strip("-").replace("-", "_")]
        return options.size(name, text) if text is not None else default

    folder = given["image_folder"]
    if folder is not None and not paths.ask(Path.is_dir, folder := paths.expanded(folder)):
        raise UsageError(f"--image-folder {folder} is not a folder; name a folder")
    if given["share_prompts"] and not given["key_file"]:
        raise UsageError("--share-prompts needs --key-file; without keys all prompts are shared already")
    memory = size("--memory", 0) or server.free_memory_share()
    limits = Limits(given["parallel"], given["ctx"] or 4096, memory, given["queue"], given["kv_type"],
                    given["kv_rotate"], given["share_prompts"], Keep.of(**options.keep(given)),
                    given["lookup"], given["exact"])  # fmt: skip
    return server.Options(
        host=given["host"], port=given["port"], name=given["name"], hosts=given["hosts"], limits=limits,
        keys=read_keys(paths.expanded(given["key_file"])) if given["key_file"] else (),
        origins=tuple(name.lower().rstrip("/") for name in given["origins"]),
        sources=Sources(given["allow_https_images"], folder),
        park=paths.expanded(given["park"]) if given["park"] else None, park_size=size("--park-size", 4 << 30),
        max_tokens=given["max_tokens"] or 0, max_body=size("--max-body", 64 << 20),
        grace=given["grace"], parent=given["parent_pid"] or 0, strict=given["strict_model"],
    )  # fmt: skip
