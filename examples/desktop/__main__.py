"""A desktop program that asks a model about pictures, with the model in its own process.

python examples/desktop [--model FILE.gguf --mmproj FILE.gguf] [--method NAME] [--budget SHARE]
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import pykvedge

DATA = Path(pykvedge.__file__).parent / "data"  # with the demo model that kvedge brings along


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line. What cannot be ends the program with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="desktop", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="default: the packaged demo model")
    parser.add_argument("--mmproj", type=Path, metavar="FILE.gguf", help="the image encoder of the model")
    default = pykvedge.default_plan().method
    parser.add_argument("--method", default=default, help="what is kept of a prompt (default: %(default)s)")
    parser.add_argument("--budget", type=float, metavar="SHARE", help="how much is kept, as in 0.2; default: by method")
    parser.add_argument("--ctx", type=int, default=0, metavar="N", help="tokens of a conversation at most")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="default: one per physical core")
    given = parser.parse_args(arguments)
    if given.model is None:
        given.model, given.mmproj = DATA / "demo-model.gguf", given.mmproj or DATA / "demo-mmproj.gguf"
    try:
        given.plan = pykvedge.plan(given.method, given.budget)
    except pykvedge.KvedgeError as error:
        parser.error(str(error))
    return given


def main(arguments: list[str] | None = None) -> int:
    """Runs the program until its window is closed. Returns its exit code."""
    given = options(arguments)
    try:
        import tkinter

        from window import Window
    except ImportError as error:
        print(f"error: {error}; on Debian: apt install python3-tk, and pip install pillow", file=sys.stderr)
        return 1
    from worker import Worker

    worker = Worker(given.model, given.mmproj, n_ctx=given.ctx, threads=given.threads)
    try:
        window = Window(worker, given.plan, f"{given.model.stem} - kvedge")
    except tkinter.TclError as error:
        print(f"error: no window can be opened: {error}", file=sys.stderr)
        return 1

    def end(*_: object) -> None:
        if not window.closed:
            window.after(0, window.close)  # not at once: this may be in the middle of a callback

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    worker.start()
    try:
        window.mainloop()
    finally:
        worker.quit()
        worker.join()  # the model is freed when it returns, at most a step of the prompt later
    return 0


if __name__ == "__main__":
    sys.exit(main())
