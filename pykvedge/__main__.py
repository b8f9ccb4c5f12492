"""The `kvedge` program, also as `python -m pykvedge`."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # importing typing would take its time
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Runs the `kvedge` program, which Ctrl-C ends quietly with exit code 130, also while modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _pressed)
    from pykvedge.cli import program

    program.main()


def _pressed(number: int, frame: FrameType | None) -> None:
    # what is raised while a module is imported may be lost in the import's own callbacks
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
