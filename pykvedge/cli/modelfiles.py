"""Which model a command works with: files, a name that a hub or the cache knows, or the packaged demo model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvedge.cli import paths
from pykvedge.errors import UsageError, one_line
from pykvedge.system.files import DATA

if TYPE_CHECKING:
    from pykvedge.cli.progress import Display
    from pykvedge.models.gguf import Header
    from pykvedge.models.images import Picture


def model_files(given: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Returns the files that MODEL, MMPROJ and HUB ask for, or the packaged demo model.

    Raises UsageError where there is none, and what pykvedge.hub.resolve raises.
    """
    model, mmproj = given["model"], given["mmproj"]
    if named(given):
        return fetched(given["hf_repo"], given)
    if model is not None:
        return paths.expanded(model), paths.expanded(mmproj) if mmproj else None
    demo, demo_mmproj = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"
    if mmproj is not None or not demo.exists():
        raise UsageError(
            "no model: pass --model FILE.gguf, and --mmproj FILE.gguf to ask about images; or -hf USER/REPO, which "
            "fetches both, as of ggml-org/SmolVLM-500M-Instruct-GGUF"
        )
    return demo, demo_mmproj if demo_mmproj.exists() else None


def pictures(
    images: Sequence[Path], mmproj: Path | Header | None, limits: Mapping[str, int] | None = None
) -> Iterator[Picture]:
    """Loads what --image names. Pages of a PDF are drawn as large as the image encoder sees them.

    limits: the settings of IMAGE_LIMITS. Raises what load_pictures raises, and ModelError.
    """
    from pykvedge.models.documents import PageSize, load_pictures
    from pykvedge.models.gguf import Header, read_header
    from pykvedge.models.images import PDF

    found, size = [paths.expanded(path) for path in images], None
    if mmproj is not None and any(PDF.fullmatch(str(path)) for path in found):
        header = mmproj if isinstance(mmproj, Header) else read_header(mmproj)
        size = PageSize.asked(header, *(limits or {}).values())
    return load_pictures(found, size)


def named(given: Mapping[str, Any]) -> bool:
    """Tells whether -hf names a model. Raises UsageError for options that do not go together."""
    if given.get("hf_repo") is None:
        for name in ("hf_file", "hf_mmproj", "offline"):
            if given.get(name):
                raise UsageError(f"--{name.replace('_', '-')} goes with -hf USER/REPO")
        return False
    if given["model"] is not None:
        raise UsageError("--model and -hf name a model each; pass one")
    if given["mmproj"] is not None and given["hf_mmproj"]:
        raise UsageError("--mmproj and --hf-mmproj name an image encoder each; pass one")
    return True


def fetched(name: str, given: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Finds or fetches the files of a model by name, with progress on stderr.

    A --mmproj, a file of this machine, comes in the place of the repository's. Raises what pykvedge.hub.resolve raises.
    """
    from pykvedge.models import hub

    own = given.get("mmproj")
    with _display(given) as display:
        pair = hub.resolve(name, progress=display, warn=_warn, **_choice(given))
    return pair.model, paths.expanded(own) if own else pair.mmproj


def headers(given: Mapping[str, Any]) -> tuple[Header, Header | None]:
    """Reads the headers of what model_files would return; of a model by name nothing else is fetched."""
    from pykvedge.models import hub
    from pykvedge.models.modelfile import check_mmproj, check_model

    if not named(given):
        model, mmproj = model_files(given)
        header = check_model(model)
        return header, check_mmproj(mmproj, header) if mmproj else None
    with _display(given) as display:
        header, projector = hub.headers(given["hf_repo"], progress=display, warn=_warn, **_choice(given))
    own = given["mmproj"]
    return header, check_mmproj(paths.expanded(own), header) if own else projector


def _choice(given: Mapping[str, Any]) -> dict[str, Any]:
    mmproj = "none" if given.get("mmproj") else given.get("hf_mmproj") or ""
    return {"file": given.get("hf_file") or "", "mmproj": mmproj, "offline": given["offline"]}


def _warn(line: str) -> None:
    click.echo(f"kvedge: warning: {one_line(line)}", err=True)


@contextlib.contextmanager
def _display(given: Mapping[str, Any]) -> Iterator[Display]:
    from pykvedge.cli.progress import Fetching

    display = Fetching(enabled=not given.get("quiet"))
    try:
        yield display
    finally:
        display.done()
