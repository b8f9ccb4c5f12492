"""Pictures are drawn with matplotlib, on a canvas that becomes a file; whether they can be is asked first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pykvedge.errors import KvedgeError, UsageError

FORMATS = (".png", ".svg", ".pdf")


def check_place(option: str, path: Path, formats: Sequence[str]) -> None:
    """Refuses a name that has none of the endings, or is in no folder. Raises UsageError."""
    if path.suffix not in formats:
        raise UsageError(f"{option} writes {', '.join(formats)}, not '{path.suffix or path.name}'")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {path.parent}")


def check_library(what: str, otherwise: str = "") -> None:
    """Looks for matplotlib. Raises UsageError if it is missing. what: needs it; otherwise: what does not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(f"{what} needs matplotlib: pip install 'kvedge[plot]'{otherwise}") from None


def check(option: str, path: Path) -> None:
    """Refuses a place where no picture can be written, before anything is measured for it. Raises UsageError."""
    check_place(option, path, FORMATS)
    check_library(option)


@contextmanager
def canvas(path: Path, rows: int, columns: int, **layout: Any) -> Iterator[Any]:
    """Yields axes [rows][columns] to draw on; the file is written at the end. Raises KvedgeError if it cannot be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **layout)
    try:
        yield axes
        figure.savefig(path)
    except OSError as error:
        raise KvedgeError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
