"""The `kvedge` program: puts the commands into one group, and turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import os
import signal
import sys
import warnings
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pykvedge.errors import CancelledError, KvedgeError, KvedgeWarning, UsageError, lacking, one_line

_COMMANDS = {
    "chat": "chat:chat", "run": "chat:run", "serve": "serve:serve",
    "pull": "models:pull", "list": "models:list_models", "rm": "models:remove",
    "methods": "methods:methods", "fit": "fit:fit", "config": "config:config", "completion": "completion:completion",
    "doctor": "doctor:doctor", "rpc-server": "rpc_server:rpc_server",
}  # fmt: skip
_UNREAD = 141  # exit code if nobody reads the output


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from pykvedge import __version__
    from pykvedge.native import calls

    click.echo(f"kvedge {__version__}")
    click.echo(calls.describe())
    context.exit()


class Commands(UserDict[str, Any]):
    """All commands by name. A command is imported on demand, so --version imports none."""

    def __init__(self) -> None:
        """Adds the commands of kvedge_lab, unless the program is packed without it."""
        super().__init__({name: f"pykvedge.cli.{place}" for name, place in _COMMANDS.items()})
        if importlib.util.find_spec("kvedge_lab"):
            self.update(importlib.import_module("kvedge_lab.commands").COMMANDS)

    def __getitem__(self, name: str) -> click.Command:
        module, _, command = super().__getitem__(name).partition(":")
        return getattr(importlib.import_module(module), command)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _unread() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # click would exit with 1
        raise SystemExit(_UNREAD) from None


class Program(click.Group):
    """The group of all commands. `models` is another name of `list`."""

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return super().get_command(ctx, "list" if name == "models" else name)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _unread():  # --help and --version write here
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _unread():
            return super().invoke(ctx)


@click.group(
    cls=Program,
    commands=Commands(),
    invoke_without_command=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="`kvedge COMMAND --help` explains a command, `kvedge methods` the compression methods.",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
              help="Show the versions of kvedge and of its libraries.")  # fmt: skip
@click.option("--cflags", is_flag=True, help="Print the C compiler options for the headers.")
@click.option("--libs", is_flag=True, help="Print the linker options for the libraries.")
@click.option("--cmake-dir", is_flag=True, help="Print the folder of kvedge-config.cmake.")
@click.pass_context
def cli(context: click.Context, cflags: bool, libs: bool, cmake_dir: bool) -> None:
    """Vision-language models on your own machine, with a compressed KV cache.

    \b
    kvedge chat -m model.gguf --image photo.jpg "What is this?"
    kvedge chat -hf user/repo:Q4_K_M --image photo.jpg "What is this?"
    """
    if not (cflags or libs or cmake_dir):
        if context.invoked_subcommand is None:
            context.fail("Missing command.")
        return
    if context.invoked_subcommand:
        raise UsageError(
            f"--cflags, --libs and --cmake-dir cannot be combined with the command "
            f"{context.invoked_subcommand}; omit one"
        )
    _show_c_package([*["Cflags"] * cflags, *["Libs"] * libs], cmake_dir)


def _show_c_package(fields: list[str], cmake_dir: bool) -> None:
    from pykvedge.native import cpackage

    lines = [cpackage.for_shell([word for field in fields for word in cpackage.flags(field)])] if fields else []
    for line in [*lines, *[str(cpackage.cmake_dir())] * cmake_dir]:
        click.echo(line)


def main() -> None:
    """Runs the `kvedge` program: errors are one line on stderr, with exit code 2 for usage and 1 for run time."""
    unwritten = False
    try:
        _prepare()
        code = _run()
        sys.stdout.flush()
    except Exception as error:  # a user never sees a traceback
        code, unwritten = _explain(error), isinstance(error, OSError)
    except KeyboardInterrupt:
        code = 130
    # a second Ctrl-C while Python exits would end the program by the signal, whatever the exit code
    with contextlib.suppress(ValueError):  # ValueError: not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == _UNREAD or unwritten:
        # the reader is gone or the disk is full: Python would try to write again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else 0)


def _prepare() -> None:
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml's one line is enough if it aborts
    warnings.showwarning = _warn
    _replace_closed_streams()
    if sys.stdout is None:
        _complain("stdout is closed, so kvedge cannot print its output; open stdout")
        sys.exit(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show all characters of an answer


def _replace_closed_streams() -> None:
    """Opens closed stdin, stdout and stderr as the null device, so no other file takes their numbers.

    Otherwise C code would write messages into a model file. Without stderr, the answer still goes to stdout.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)  # the first free number is `number`
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - open until the end


def _run() -> object:
    try:
        return cli.main(prog_name="kvedge", standalone_mode=False)
    except SystemExit as end:  # the command has its own exit code; its output may not be flushed yet
        return end.code


def _explain(error: Exception) -> int:
    if os.environ.get("KVEDGE_DEBUG"):
        raise error
    if isinstance(error, BrokenPipeError):
        return _UNREAD
    if isinstance(error, (click.exceptions.Abort, CancelledError)):
        return 130
    if isinstance(error, click.UsageError) and type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later
        error.show(sys.stdout)
        return 2
    if isinstance(error, click.ClickException):
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f" (see '{error.ctx.command_path} --help')"
        _complain(error.format_message().rstrip(".") + hint)
        return error.exit_code
    if isinstance(error, KvedgeError):
        _complain(error)
        return error.exit_code
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EIO):
        _complain(f"the output cannot be written: {error.strerror}")
        return 1
    if isinstance(error, ImportError) and ".so" in str(error):  # for example NumPy's, about a missing system library
        from pykvedge.native import libcheck

        _complain(libcheck.explain(Path(error.path or "kvedge"), str(error), libcheck.REINSTALL))
        return 1
    unexpected = f"unexpected {type(error).__name__}: {one_line(error)} (set KVEDGE_DEBUG=1 to see the traceback)"
    _complain(lacking(error) or unexpected)
    return 1


def _warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    context = click.get_current_context(silent=True)
    if issubclass(category, KvedgeWarning):
        if context is None or not context.params.get("quiet"):
            print(f"kvedge: warning: {one_line(message)}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def _complain(message: object) -> None:
    print(f"kvedge: error: {one_line(message)}", file=sys.stderr)
