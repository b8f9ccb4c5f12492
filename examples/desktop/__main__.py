"""A desktop program that asks a model about pictures, with the model in its own process.

The window hands jobs to a Worker, and shows the events that come back.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import tkinter as tk
    from tkinter import filedialog, ttk

    from PIL import ImageTk
except ImportError as error:
    sys.exit(f"error: {error}; on Debian: apt install python3-tk, and pip install pillow")
from worker import Worker

import pykvedge

POLL_MS, AT_ONCE = 30, 50  # between two looks for events, and events of one look: the keyboard has its turn


class Window(tk.Tk):
    """Shows a picture and a conversation. Start the worker before `mainloop`, and join it after."""

    def __init__(self, worker: Worker, plan: pykvedge.Plan) -> None:
        super().__init__(className="kvedge")
        self.worker, self.plan = worker, plan
        self.busy, self.loaded, self.closed = True, False, False
        self._picture: pykvedge.Picture | None = None  # goes with the next question
        self._asked = ""  # is not read yet
        self._image: ImageTk.PhotoImage | None = None  # tkinter shows it, but does not keep it alive
        self.pane = ttk.Label(self, text="no picture yet", anchor="center")
        self.chat = tk.Text(self, wrap="word", width=60, height=16)
        self.entry, self.memory, self.status = ttk.Entry(self), ttk.Label(self), ttk.Label(self)
        for part in (self.pane, self.chat, self.entry, self.memory, self.status):
            part.pack(fill="both", expand=part is self.chat, padx=6, pady=2)
        does = {
            "Open…": self.choose_picture, "New chat": lambda: self._begin("a new chat", worker.clear),
            "Send": self.ask, "Stop": worker.stop,
        }  # fmt: skip
        self.buttons = {name: ttk.Button(self, text=name, command=do) for name, do in does.items()}
        for button in self.buttons.values():
            button.pack(side="left", padx=6, pady=6)
        self.chat.bind("<Key>", lambda event: "break")  # to be read only; disabled and enabled again it would be slow
        self.entry.bind("<Return>", lambda event: self.ask())
        self.bind("<Escape>", lambda event: self.buttons["Stop"].invoke())
        self.protocol("WM_DELETE_WINDOW", self.close)
        self._say("loading the model", busy=True)
        self._next_poll = self.after(POLL_MS, self._poll)

    def choose_picture(self) -> None:
        """Asks for a file."""
        if name := filedialog.askopenfilename(parent=self):
            self.open_picture(Path(name))

    def open_picture(self, path: Path) -> None:
        """Takes a picture for the next question."""
        self._begin(f"reading {path.name}", self.worker.open, path)

    def ask(self) -> None:
        """Asks what stands in the entry."""
        question, pictures = self.entry.get().strip(), [self._picture] if self._picture else []
        if question and self._begin("reading the prompt", self.worker.ask, question, pictures, self.plan):
            self._asked = question
            self.entry.delete(0, "end")
            self._add(f"> {question}\n")

    def close(self) -> None:
        """Closes at once; the worker ends its job and frees the model meanwhile."""
        self.closed = True
        self.worker.quit()
        self.after_cancel(self._next_poll)
        self.destroy()

    def _poll(self) -> None:
        for _ in range(min(self.worker.events.qsize(), AT_ONCE)):
            self._show(self.worker.events.get())
        self._next_poll = self.after(POLL_MS, self._poll)

    def _show(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("progress", step, share):
                self.status["text"] = f"{step} {share:.0%}"
            case ("ready",):
                self.loaded = True
                self._say("ready")
            case ("opened", name, picture, preview):
                self._picture = picture
                self.pane["image"] = self._image = ImageTk.PhotoImage(preview)
                self._say(f"{name} goes with the next question")
            case ("compressed", kept, full):
                self._asked, self._picture = "", None  # both are in the cache now, for later questions, too
                self.memory["text"] = f"keys and values: {kept / 1024:.1f} of {full / 1024:.1f} KiB"
            case ("piece", text):
                self._add(text)
            case ("done", finish):
                self._add("\n")
                self._say("ready" if finish == "end" else f"the answer ended: {finish}")
            case ("cleared",):
                self._add("--- a new chat ---\n")
                self._say("ready")
            case ("failed", line):
                self.entry.insert(0, self._asked)  # no part of the conversation: back to where it can be changed
                self._asked = ""
                self._say(line)
            case ("ended",):
                self.loaded = False  # if busy: by what is no KvedgeError, a defect, which threads print on stderr
                self._say("the model's thread has failed" if self.busy else self.status["text"])

    def _begin(self, what: str, job: Callable[..., None], *given: Any) -> bool:
        """Hands a job to the worker. Returns False where it cannot take one."""
        if can := self.loaded and not self.busy:
            self._say(what, busy=True)
            job(*given)
        return can

    def _say(self, message: str, busy: bool = False) -> None:
        self.busy, self.status["text"] = busy, message
        for name, button in self.buttons.items():
            button.state(["!disabled" if self.loaded and busy == (name == "Stop") else "disabled"])

    def _add(self, text: str) -> None:
        self.chat.insert("end", text)
        self.chat.see("end")


def main() -> None:
    data = Path(pykvedge.__file__).parent / "data"  # with the demo model that kvedge brings along
    parser = argparse.ArgumentParser(prog="desktop", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=data / "demo-model.gguf")
    parser.add_argument("--mmproj", type=Path, help="the image encoder of the model")
    parser.add_argument("--method", default=pykvedge.default_plan().method, help="what is kept (default: %(default)s)")
    parser.add_argument("--budget", type=float, metavar="SHARE", help="how much is kept, as in 0.2; default: by method")
    given = parser.parse_args()
    if given.model.parent == data:
        given.mmproj = data / "demo-mmproj.gguf"
    try:
        worker = Worker(given.model, given.mmproj)
        window = Window(worker, pykvedge.plan(given.method, given.budget))
    except pykvedge.KvedgeError as error:
        parser.error(str(error))
    except tk.TclError as error:
        sys.exit(f"error: no window can be opened: {error}")
    for number in (signal.SIGINT, signal.SIGTERM):  # one may come in the middle of a callback
        signal.signal(number, lambda *_: window.closed or window.after(0, window.close))
    worker.start()
    try:
        window.mainloop()
    finally:
        worker.quit()
        worker.join()  # the model is freed when it returns, at most a step of the prompt later


if __name__ == "__main__":
    main()
