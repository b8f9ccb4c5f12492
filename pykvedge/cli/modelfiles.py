"""Finds the model of a command: files, a name in a hub or the cache, or the packaged demo model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvedge.cli import configured, paths
from pykvedge.cli.progress import Fetching
from pykvedge.errors import ModelError, UsageError, one_line, printable
from pykvedge.system.files import DATA

if TYPE_CHECKING:
    from pykvedge.models.documents import PageSize
    from pykvedge.models.gguf import Header
    from pykvedge.models.images import Picture

NONE = ("none", "-")  # values of --mmproj that mean no image encoder
_QUANT = re.compile(r"[-._](?:ud-)?(?:i?q\d\w*|tq\d\w*|mxfp4\w*|b?f16|fp16|f32)$")


def model_files(given: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Returns the files of MODEL, MMPROJ and HUB, or the packaged demo model.

    Without --mmproj, the image encoder beside the model is used, and a line on stderr names it. Raises UsageError if no
    model or several models fit, and what pykvedge.hub.resolve raises.
    """
    model, mmproj, name = given["model"], given["mmproj"], hub_name(given)
    _say_configured(given)
    if name is not None:
        return fetched(name, given)
    if model is not None:
        model = _one_of(paths.expanded(model))
        return model, _encoder_of(given) if mmproj is not None else _beside(model, given)
    demo, demo_mmproj = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"
    if mmproj is not None or not demo.exists():
        raise UsageError(
            "no model: pass --model FILE.gguf, and --mmproj FILE.gguf to ask about images, or download both files "
            "with -hf USER/REPO, for example -hf ggml-org/SmolVLM-500M-Instruct-GGUF"
        )
    return demo, demo_mmproj if demo_mmproj.exists() else None


def _say_configured(given: Mapping[str, Any]) -> None:
    found = configured.in_effect()
    setting = found.get("model") or found.get("models")
    if setting is not None and not given.get("quiet"):
        click.echo(f"kvedge: model {printable(str(setting.value))}, from {setting.source}", err=True)


def pictures(
    images: Sequence[Path], mmproj: Path | Header | None, limits: Mapping[str, int] | None = None
) -> Iterator[Picture]:
    """Loads the pictures of --image in the size that the image encoder sees.

    limits: the settings of IMAGE_LIMITS. Raises what load_pictures raises, and ModelError.
    """
    from pykvedge.models.documents import load_pictures
    from pykvedge.models.gguf import Header, read_header

    found, size = [paths.expanded(path) for path in images], None
    if mmproj is not None and found:
        header = mmproj if isinstance(mmproj, Header) else read_header(mmproj)
        size = page_size(header, limits or {})
    return load_pictures(found, size)


def page_size(mmproj: Header, limits: Mapping[str, int]) -> PageSize:
    """Returns the size in which an image encoder sees a page. limits: settings of IMAGE_LIMITS. Raises UsageError."""
    from pykvedge.models.documents import PageSize
    from pykvedge.runtime.settings import Settings

    return PageSize.asked(mmproj, *Settings.of(dict(limits)).image_limits)


def hub_name(given: Mapping[str, Any]) -> str | None:
    """Returns the name after -hf, or a --model that is no local file; None if --model is a file or omitted.

    Raises UsageError for options that exclude each other.
    """
    name = given.get("hf_repo")
    if name is not None and given["model"] is not None:
        raise UsageError("--model and -hf both name a model; pass one of them")
    if name is None and given["model"] is not None:
        name = as_name(given["model"])
    if name is None:
        for option in ("hf_file", "hf_mmproj", "offline") if "hf_repo" in given else ():
            if given.get(option):
                raise UsageError(
                    f"--{option.replace('_', '-')} needs -hf USER/REPO; add -hf, or omit --{option.replace('_', '-')}"
                )
    elif given["mmproj"] is not None and given.get("hf_mmproj"):
        raise UsageError("--mmproj and --hf-mmproj both name an image encoder; pass one of them")
    return name


def as_name(model: Path) -> str | None:
    """Returns --model user/repo[:QUANT] as text; None for a path. A path in an existing folder is a path."""
    from pykvedge.models.hub.names import is_repo

    text = model.as_posix()
    repo = text.partition(":")[0]
    is_path = text.endswith(".gguf") or paths.ask(Path.exists, model) or paths.ask(Path.is_dir, Path(repo).parent)
    return text if is_repo(repo) and not is_path else None


def _one_of(path: Path) -> Path:
    """Returns the file, or the only model in the folder. Raises UsageError for a folder with none or several.

    Raises ModelError for a path that does not exist and has no GGUF file's ending.
    """
    from pykvedge.models.hub.names import is_model, split_of

    if path.suffix != ".gguf" and not paths.ask(Path.exists, path):
        raise ModelError(f"{path} does not exist; give a GGUF file, or a name of a model hub such as USER/REPO:Q4_K_M")
    if not paths.ask(Path.is_dir, path):
        return path
    found = sorted(p for p in path.iterdir() if is_model(p.name) and split_of(p.name).index <= 1)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"the folder {path} has no GGUF model; name a GGUF file")
    raise UsageError(f"the folder {path} has several models: {', '.join(p.name for p in found)}; name one file")


def _encoder_of(given: Mapping[str, Any]) -> Path | None:
    return None if str(given["mmproj"]) in NONE else paths.expanded(given["mmproj"])


def _beside(model: Path, given: Mapping[str, Any]) -> Path | None:
    """Returns the image encoder in the model's folder. Raises UsageError if several fit by name."""
    from pykvedge.models.hub.names import split_of
    from pykvedge.models.modelfile import check_mmproj, check_model

    if not paths.ask(Path.is_file, model):
        return None  # opening the model reports the error
    found = list[Path]()
    with contextlib.suppress(OSError):
        found = sorted(p for p in model.parent.glob("*.gguf") if "mmproj" in p.name.lower() and p != model)
    if not found:
        return None
    header = check_model(model)
    fitting = []
    for path in found:
        with contextlib.suppress(ModelError):
            fitting.append(check_mmproj(path, header).path)
    fitting = [path for path in fitting if _base(path) == _base(model)] or fitting
    if len({_base(path) for path in fitting}) > 1:
        names = ", ".join(path.name for path in fitting)
        raise UsageError(
            f"several image encoders in the folder of {model.name} fit: {names}; pass one with "
            f"--mmproj, or --mmproj none"
        )
    if not fitting:
        return None
    bits = split_of(model.name).bits
    chosen = min(fitting, key=lambda path: abs(split_of(path.name).bits - bits))
    if not given.get("quiet"):
        click.echo(f"kvedge: image encoder {printable(chosen.name)}, found in the model's folder", err=True)
    return chosen


def _base(path: Path) -> str:
    """Returns the common part of the names of a model and its image encoder: without "mmproj" and quantisation."""
    from pykvedge.models.hub.names import split_of

    words = _QUANT.sub("", split_of(path.name).prefix.lower()).replace("mmproj", " ")
    return words.strip(" -._")


def fetched(name: str, given: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Finds or downloads the files of a model by name, with progress on stderr.

    A local --mmproj replaces the repository's encoder. Raises what pykvedge.hub.resolve raises.
    """
    from pykvedge.models import hub

    with Fetching(enabled=not given.get("quiet")) as display:
        pair = hub.resolve(name, progress=display, warn=_warn, **_choice(given))
    return pair.model, _encoder_of(given) if given.get("mmproj") else pair.mmproj


def headers(given: Mapping[str, Any]) -> tuple[Header, Header | None]:
    """Returns the headers of the files of model_files. For a model by name, only headers are downloaded."""
    from pykvedge.models import hub
    from pykvedge.models.modelfile import check_mmproj, check_model

    name = hub_name(given)
    if name is not None:
        _say_configured(given)
    else:
        model, mmproj = model_files(given)
        header = check_model(model)
        return header, check_mmproj(mmproj, header) if mmproj else None
    with Fetching(enabled=not given.get("quiet")) as display:
        header, projector = hub.headers(name, progress=display, warn=_warn, **_choice(given))
    own = _encoder_of(given) if given["mmproj"] else None
    return header, check_mmproj(own, header) if own else projector


def _choice(given: Mapping[str, Any]) -> dict[str, Any]:
    mmproj = "none" if given.get("mmproj") else given.get("hf_mmproj") or ""
    return {"file": given.get("hf_file") or "", "mmproj": mmproj, "offline": given.get("offline", False)}


def _warn(line: str) -> None:
    click.echo(f"kvedge: warning: {one_line(line)}", err=True)
