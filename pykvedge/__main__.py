"""The `kvedge` program, also `python -m pykvedge`."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # avoids the time of importing typing
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Runs the `kvedge` program. Ctrl-C ends it quietly with exit code 130, even during imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _pressed)
    from pykvedge.cli import program

    program.main()


def _pressed(number: int, frame: FrameType | None) -> None:
    # the import system may swallow an exception raised during an import
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
