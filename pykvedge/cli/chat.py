"""The commands `kvedge chat` and `kvedge run` ask a model about images, once or in a conversation."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from pykvedge.cli import completion, modelfiles, options, paths, sampling, tuning
from pykvedge.cli.command import command, option
from pykvedge.cli.progress import Display
from pykvedge.errors import UsageError, printable
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import STREAM_METHOD
from pykvedge.system.files import require_file


def _positions(_: Any, __: Any, value: str) -> str | int:
    """Returns a number as an int. Settings checks the value."""
    return int(value) if value.isdecimal() else value


_OPTIONS = (
    options.MODEL,
    options.MMPROJ,
    *options.HUB,
    options.IMAGE,
    *options.IMAGE_LIMITS,
    option("--video", "videos", group="Picture", type=options.PATH, multiple=True, metavar="PATH",
           help="A video, with --stream: its frames are read after the images; repeatable. Needs ffmpeg."),
    option("--fps", group="Picture", type=float, metavar="N", help="Frames per second of video. Default: 1."),
    *options.CACHE,
    *options.COMPOSITION,
    options.PROFILE,
    *options.KEEP,
    options.AGE,
    option("--keep-saved", group="What is kept", is_flag=True,
           help="Also save the rows of --keep in the --session file. The file is then as large as the uncompressed "
           "cache."),
    option("--bounded", group="What is kept", is_flag=True,
           help="Compress each layer of a prompt before the next layer runs, so that the full cache never exists. "
           "If the model or method does not allow this, stderr gives the reason."),
    option("--question-blind", group="What is kept", is_flag=True,
           help="Compress the images and earlier text without the question, so that the kept pairs do not depend "
           "on the question."),
    option("--stream", group="What is kept", is_flag=True,
           help="Read images one by one and compress after each image. The cache stays at --budget N KV pairs for "
           f"any number of images. The default method is then {STREAM_METHOD}."),
    option("--prompt", "-p", "typed", group="Answer", metavar="TEXT", help="The question, instead of PROMPT."),
    option("--system", "-sys", also=("--system-prompt",), group="Answer", common=True, config=True, default="",
           metavar="TEXT", help="The system message, at the start of the conversation."),
    option("--session", "session_file", group="Answer", common=True, type=options.PATH, metavar="FILE",
           help="Continue the conversation in this file if it exists. The conversation is saved in the file after "
           "each answer."),
    *sampling.OPTIONS,
    options.LOOKUP,
    options.EXACT,
    option("--undo/--no-undo", group="Answer", default=True,
           help="Whether to copy the cache before each message. /undo and /retry need the copy."),
    option("--history/--no-history", group="Answer", config=True, default=True,
           help="Whether to save typed lines in ~/.local/state/kvedge for later conversations."),
    options.CTX,
    options.THREADS,
    *options.DEVICES,
    options.KV_TYPE,
    options.KV_ROTATE,
    option("--positions", group="Memory and devices", default="turn", show_default=True, metavar="WHAT",
           callback=_positions,
           help="What to do with positions above the model's training length: 'turn' renumbers the positions and "
           "rotates the keys, 'count' lets positions grow. A number: 'turn' at this length."),
    options.JSON,
    options.QUIET,
    options.VERBOSE,
)  # fmt: skip
_PROMPT = click.argument("words", nargs=-1, metavar="[PROMPT]")  # more than one is an error with a hint
_SETTINGS = ("system", "verbose", "profile", "bounded", "stream", "positions", "question_blind", "lookup", "exact")


@command()
@_PROMPT
@options.taking(*_OPTIONS)
def chat(words: tuple[str, ...], **given: Any) -> None:
    """Ask a model about images, or chat with it.

    The KV cache of the prompt is compressed by --method before the answer begins. PROMPT may also come from a pipe.
    Without PROMPT an interactive conversation starts; its command /help lists the commands.

    \b
    Examples:
      kvedge chat -m model.gguf --image cat.jpg "What is the cat doing?"
      kvedge chat -hf user/repo:Q4_K_M --image cat.jpg "What is this?"
      kvedge chat ... --image a.jpg --image b.jpg "What differs?"
      kvedge chat ... --image 'report.pdf[3-7]' "What is on page 4?"
      kvedge chat ... --method h2o --budget 256 "Summarise."
      kvedge chat ... --plugin mine.py --method mine "What is this?"
      echo "Describe the image." | kvedge chat ... --image a.jpg --json
      kvedge chat ...                  a conversation; /image PATH adds an image
      kvedge chat ... --session talk.kvs "And then?"    continues the conversation
      kvedge chat ... --image a.jpg --bounded "?"       without the full cache
      kvedge chat ... --stream --budget 2048 --video clip.mp4 "What happens?"
    """
    sys.exit(_ask(words, given))


@command()
@click.argument("model", type=options.PATH, metavar="MODEL", shell_complete=completion.files_or_models)
@_PROMPT
@options.taking(*(one for one in _OPTIONS if one not in (options.MODEL, options.HUB[0])))
def run(words: tuple[str, ...], **given: Any) -> None:
    """Chat with a model that is named first.

    The options are those of `kvedge chat`. MODEL is a GGUF file, a folder with one, or USER/REPO[:QUANT], which is
    fetched the first time.

    \b
    Examples:
      kvedge run ggml-org/SmolVLM-500M-Instruct-GGUF
      kvedge run ggml-org/SmolVLM-500M-Instruct-GGUF --image cat.jpg "What is it?"
      kvedge run model.gguf "Hello"
    """
    sys.exit(_ask(words, {**given, "hf_repo": None}))


def _ask(words: tuple[str, ...], given: dict[str, Any]) -> int:
    if len(words) > 1:
        raise UsageError("PROMPT must be one argument; write the question in quotes, and pictures as --image PATH")
    prompt = words[0] if words else None
    if given["typed"] is not None:
        if prompt is not None:
            raise UsageError("PROMPT and --prompt both give a question; pass one of them")
        prompt = given["typed"]
    options.load_plugins(given)
    plan = options.chosen_plan(given, _saved_plan(given["session_file"]))
    if given["profile"] and not plan.profile_kinds():
        raise UsageError(f"method '{plan.method}' uses no profile; omit --profile, or see `kvedge calibrate --help`")
    if given["keep_saved"] and (given["keep"] is None or given["session_file"] is None):
        raise UsageError("--keep-saved needs --keep and --session; add both options")
    question = _question(prompt)
    if prompt and not given["images"] and not given["quiet"]:
        _say_unseen(prompt)
    if question is None and given["as_json"]:
        raise UsageError("--json needs a PROMPT; give PROMPT as an argument or through a pipe")
    if given["logprobs"] is not None and not given["as_json"]:
        raise UsageError("--logprobs needs --json; add --json")
    if given["videos"] and not (given["stream"] and question is not None):
        raise UsageError("--video needs --stream and a PROMPT; add both")
    if given["fps"] is not None and not given["videos"]:
        raise UsageError("--fps needs --video; add --video PATH, or omit --fps")
    model, mmproj = modelfiles.model_files(given)
    if (given["images"] or given["videos"]) and mmproj is None:
        what = "--image" if given["images"] else "--video"
        raise UsageError(f"{what} needs the image encoder of the model: pass it with --mmproj")
    if given["session_file"] is None or not paths.ask(Path.exists, paths.expanded(given["session_file"])):
        # a saved session has a plan
        plan, _ = tuning.taken(given, plan, model, again=not given["keep_saved"], hint=question is None)
    from pykvedge.runtime.sessionlock import SessionLock

    file = _session_file(given["session_file"])
    with SessionLock(file) if file is not None else contextlib.nullcontext():
        return _talk(question, plan, (model, mmproj), file, given)


def _say_unseen(prompt: str) -> None:
    """Says that a question names a picture: only a conversation at a terminal reads pictures from its text."""
    from pykvedge.cli.talk.pictures import named

    if (path := named(prompt)) is not None:
        name = printable(str(path))
        way = f"add --image {shlex.quote(name)}"
        click.echo(f"kvedge: the model does not see {name}, a name in the text; {way}", err=True)


def _talk(
    question: str | None, plan: Plan, models: tuple[Path, Path | None], file: Path | None, given: dict[str, Any]
) -> int:
    import threading

    from pykvedge.chat.session import Session
    from pykvedge.cli.talk.chat import Chat, Style
    from pykvedge.cli.talk.lines import history_file
    from pykvedge.cli.talk.loop import converse
    from pykvedge.library.native_plan import replays
    from pykvedge.models import documents
    from pykvedge.models.video import frames
    from pykvedge.native import crash
    from pykvedge.runtime.interrupt import as_event, stop_if_set

    if given["keep_saved"] and replays(plan):
        raise UsageError(
            f"--keep-saved does not work with method '{plan.method}', which reads the conversation twice; omit "
            f"--keep-saved"
        )
    chosen = sampling.chosen(given)
    if question is not None:
        sampling.warn_of_idle(given)
    images = [paths.expanded(path) for path in given["images"]]
    # images of a stream are loaded one by one; a wrong path is reported now
    waits = given["stream"] and all(paths.ask(Path.is_file, documents.file_of(path)) for path in images)
    pictures = images if waits else list(modelfiles.pictures(images, models[1], options.image_limits(given)))
    clips = [frames(paths.expanded(path), 1.0 if given["fps"] is None else given["fps"]) for path in given["videos"]]
    display = Display(enabled=not given["quiet"] and not given["verbose"])
    settings = {k: given[k] for k in _SETTINGS} | options.running(given)
    settings |= options.cache(given) | options.keep(given) | options.image_limits(given)
    if file is not None and paths.ask(Path.exists, file):
        crash.saved(file)
    settings["undo"] = given["undo"] and question is None and not given["stream"]
    settings["measure_peak"] = given["as_json"]
    with as_event(threading.Event()) as cancel, display:
        session = Session(*models, plan, progress=display, cancel=cancel, **settings)
    with session:
        stop_if_set(cancel)  # Ctrl-C was pressed while nothing checked it, as during the load of the image encoder
        if file is not None and paths.ask(Path.exists, file):
            if given["system"]:
                raise UsageError(
                    f"--system cannot change the conversation in {file}, which already has messages; omit --system"
                )
            with as_event(cancel):
                session.load(file, plan)
            stop_if_set(cancel)
        talk = Chat(session, chosen, Style(given["as_json"], given["quiet"], given["keep_saved"]), display, file)
        if question is not None:
            return talk.once(question, itertools.chain(pictures, *clips) if clips else pictures)
        return converse(talk, pictures, history_file() if given["history"] else None)


def _saved_plan(path: Path | None) -> Plan | None:
    """Returns the plan of the saved conversation, or None."""
    if path is None or not paths.ask(Path.exists, path := paths.expanded(path)):
        return None
    from pykvedge.runtime.sessionfile import saved_plan

    return saved_plan(path)


def _session_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    path = paths.expanded(path)
    if not paths.ask(Path.is_dir, path.parent):
        raise UsageError(f"--session {path} cannot be written: the folder {path.parent} does not exist")
    if paths.ask(Path.exists, path):  # an impossible name is the user's mistake, not a failure of the file
        try:
            require_file(path)
        except OSError as error:
            raise UsageError(f"--session {path} cannot be used: {error.strerror}") from None
    return path


def _question(prompt: str | None) -> str | None:
    """Returns the prompt from the argument or a pipe; None: a user types at the terminal."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    data = b"" if sys.stdin is None else sys.stdin.buffer.read()
    text = data.decode("utf-8", "replace")
    if b"\0" in data and text.encode() != data:  # zeros alone may be UTF-8, wrong letters alone another encoding
        raise UsageError("the input from the pipe is not UTF-8 text; give a picture with --image PATH")
    if not text.strip():
        raise UsageError("the prompt is empty; give a question as an argument or through a pipe")
    return text.rstrip("\r\n")
