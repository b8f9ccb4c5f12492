"""Pictures are drawn with matplotlib, on a canvas that becomes a file; whether they can be is asked first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pykvedge.errors import KvedgeError, UsageError

FORMATS = (".png", ".svg", ".pdf")


def check_library(what: str) -> None:
    """Looks for matplotlib, which `what` needs. Raises UsageError if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(f"{what} needs matplotlib: pip install 'kvedge[plot]'") from None


def check(option: str, path: Path, formats: Sequence[str] = FORMATS) -> None:
    """Refuses a place where no picture can be written, before anything is measured for it. Raises UsageError."""
    if path.suffix not in formats:
        raise UsageError(f"{option} writes {', '.join(formats)}, not '{path.suffix or path.name}'")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {path.parent}")
    check_library(option)


@contextmanager
def canvas(to: Path | BinaryIO, rows: int, columns: int, form: str | None = None, **layout: Any) -> Iterator[Any]:
    """Yields axes [rows][columns] to draw on; they are written at the end. Raises KvedgeError if they cannot be.

    form: of what is written; None: by the file's name.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **layout)
    try:
        yield axes
        figure.savefig(to, format=form)
    except OSError as error:
        raise KvedgeError(f"{to} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
