"""The options that several commands of kvedge_lab share, beside those of pykvedge.cli.options; tables as files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pykvedge.cli import completion, paths
from pykvedge.cli.command import option
from pykvedge.cli.options import HUB, MODEL_HELP, FilePath, Whole
from pykvedge.errors import SaveError, UsageError
from pykvedge.plans.presets import DEFAULT_METHOD
from pykvedge.system.files import write_whole


class _HomePath(FilePath):
    """A path in which ~ is a home folder."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        return paths.expanded(super().convert(value, param, context))


PATH = _HomePath()
COUNT, SEED = Whole(1, 10**6), Whole(0, 2**32 - 1)
MODELS = option(
    "--model", "-m", "models", group="Model", common=True, config=True, type=PATH, multiple=True, metavar="MODEL",
    shell_complete=completion.files_or_models, help=f"{MODEL_HELP} Repeatable.",
)  # fmt: skip
MMPROJS = option(
    "--mmproj", "-mm", "mmprojs", group="Model", common=True, config=True, type=PATH, multiple=True,
    metavar="FILE.gguf",
    help="The image encoder of each --model, in the same order; 'none' for a model without encoder. Default: the "
         "mmproj file in the model's folder.",
)  # fmt: skip
HUBS = (
    option("-hf", "--hf-repo", "hf_repos", group="Model", common=True, multiple=True, metavar="USER/REPO[:QUANT]",
           shell_complete=completion.models,
           help="A model by name, with its image encoder; repeatable."),
    HUB[-1],
)  # fmt: skip
METHOD_LIST = option(
    "--method", "methods", group="What is kept", common=True, shell_complete=completion.methods,
    default="kvedge,lookm,mixkv,elastic,flashcache,prefixkv", show_default=True, metavar="A,B",
    help="Methods to measure (`kvedge methods` lists them), or all. The full cache is always measured.",
)  # fmt: skip
METHODS = option("--method", "methods", group="What is kept", common=True, multiple=True, metavar="NAME",
                 shell_complete=completion.methods,
                 help=f"The compression method (`kvedge methods` lists them); repeatable. Default: "
                      f"{DEFAULT_METHOD}.")  # fmt: skip


def budget_list(default: str) -> Callable[[Any], Any]:
    """Declares --budget of a command that measures several budgets. default: the end of its help text."""
    return option("--budget", "budgets", group="What is kept", common=True, metavar="A,B",
                  help="KV pairs to keep: a share of the prompt (0.2), or a number per layer and KV head (128). "
                       f"Default: {default}.")  # fmt: skip


def output(what: str, **settings: Any) -> Callable[[Any], Any]:
    """Declares --output, the file or folder that a command writes."""
    return option("--output", "-o", common=True, type=PATH, help=what, **settings)


def check_file(named: str, path: Path | None) -> None:
    """Raises UsageError if a file to write is a folder or may not be written, before anything is measured.

    Its folder need not exist.
    """
    if path is None:
        return
    if paths.ask(Path.is_dir, path):
        raise UsageError(f"{named} {path} is a folder; name a file")
    if not paths.ask(Path.exists, path):
        check_folder(path.parent, f"{named} {path}")
    elif not os.access(path, os.W_OK):
        raise UsageError(f"{named} {path} cannot be written: the file is read-only; name another file")


def check_folder(path: Path, named: str = "") -> None:
    """Raises UsageError for a folder that can neither be written nor made, before anything is measured.

    named: the file to write in the folder.
    """
    there = next((one for one in (path, *path.parents) if paths.ask(Path.exists, one)), path)
    if not paths.ask(Path.is_dir, there):
        raise UsageError(f"{named or path} cannot be written: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{named or path} cannot be written: nothing may be written into {there}")


def check_table(path: Path | None, forms: tuple[str, ...]) -> None:
    """Raises UsageError if a table's --output has an unknown form or cannot be written."""
    if path is None:
        return
    if path.suffix[1:] not in forms:
        raise UsageError(f"--output {path} must end in {', '.join('.' + form for form in forms)}")
    check_file("--output", path)
    if not paths.ask(Path.is_dir, path.parent):
        raise UsageError(f"--output {path} cannot be written: the folder {path.parent} does not exist")


def write_table(given: Mapping[str, Any], forms: Mapping[str, Callable[[], str]]) -> None:
    """Writes the table to --output, in the form of its name; else to stdout, as Markdown or with --json.

    A table that cannot be written goes to stdout, and then SaveError is raised.
    """
    path = given["output"]
    text = forms[path.suffix[1:] if path else "json" if given["as_json"] else "md"]()
    if path is None:
        if text:
            click.echo(text)
        return
    try:
        write_file("--output", path, text)
    except SaveError as error:
        click.echo(text)
        raise SaveError(f"{error}; the table is on stdout") from None


def write_file(named: str, path: Path, text: str) -> None:
    """Writes the whole text, or leaves an older file as it was. Raises SaveError, which names the option.

    In a read-only folder, the older file is overwritten.
    """
    whole = text.rstrip("\n") + "\n"
    try:
        if os.access(path.parent, os.W_OK):
            write_whole(path, whole)
        else:
            path.write_text(whole, encoding="utf-8")
    except OSError as error:
        raise SaveError(f"{named} {path} cannot be written: {error.strerror or error}") from None


def as_csv(rows: Iterable[Any], pair: str) -> str:
    """Returns one line per dataclass, below the names of the fields. A field that ends in `pair` holds two numbers or
    None and becomes the columns NAME_low and NAME_high. None is an empty cell.
    """
    out, writer = io.StringIO(), None
    for row in rows:
        flat: dict[str, Any] = {}
        for name, value in asdict(row).items():
            if name.endswith(pair):
                flat[f"{name}_low"], flat[f"{name}_high"] = value or (None, None)
            else:
                flat[name] = value
        if writer is None:
            writer = csv.DictWriter(out, flat, lineterminator="\n")
            writer.writeheader()
        writer.writerow(flat)
    return out.getvalue().rstrip("\n")
