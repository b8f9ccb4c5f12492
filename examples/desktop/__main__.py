"""A desktop program that asks a model about pictures, with the model in its own process.

The window hands jobs to a Worker, and shows the events that come back.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

try:
    import tkinter as tk
    from tkinter import filedialog, ttk

    import sv_ttk
    from PIL import ImageGrab, ImageTk
    from tkinterdnd2 import DND_FILES, TkinterDnD
except ImportError as error:
    sys.exit(f"error: {error}; pip install 'kvedge[desktop]', and on Debian: apt install python3-tk")
from worker import PREVIEW, Worker

import pykvedge

POLL_MS, AT_ONCE = 30, 50  # between two looks for events, and events of one look: the keyboard has its turn
EMPTY = "Drop a picture here,\nclick to choose one,\nor paste it with Ctrl+V"
WELCOME = "Add a picture and ask about it. Enter asks, Escape stops, Ctrl+N begins a new chat.\n"
PACKAGED = "This is the packaged model. It knows drawn scenes only: try examples/scene-1.png and “What is the code?”\n"


class Window(TkinterDnD.Tk):
    """Shows a picture and a conversation. Start the worker before `mainloop`, and join it after."""

    def __init__(self, worker: Worker, plan: pykvedge.Plan, welcome: str = WELCOME) -> None:
        super().__init__(className="kvedge")
        self.withdraw()  # until all is built
        self.after_idle(self.deiconify)
        self.worker, self.plan, self.welcome = worker, plan, welcome
        self.busy, self.loaded, self.closed = True, False, False
        self._choose = lambda *_: self.open_pictures(filedialog.askopenfilenames(parent=self))
        self._clear = lambda *_: self._begin("a new chat", worker.clear)
        self._pictures: list[pykvedge.Picture] = []  # they go with the next question
        self._asked = ""  # is not read yet
        self._image: ImageTk.PhotoImage | None = None  # tkinter shows it, but does not keep it alive
        self.title("kvedge")
        self.minsize(760, 520)
        self._build_side(ttk.Frame(self, padding=12))
        self._build_talk(ttk.Frame(self, padding=(0, 12, 12, 12)))
        self._listen()
        self._use_theme()
        self._begin_anew()
        self._say("loading the model", busy=True)
        self._next_poll = self.after(POLL_MS, self._poll)

    def _build_side(self, side: ttk.Frame) -> None:
        """The picture, and what it costs."""
        side.pack(side="left", fill="y")
        card = ttk.Frame(side, style="Card.TFrame", width=PREVIEW + 24, height=PREVIEW + 24)
        card.pack_propagate(False)  # as large without a picture
        card.pack()
        self.pane = ttk.Label(card, text=EMPTY, anchor="center", justify="center", cursor="hand2")
        self.pane.pack(fill="both", expand=True, padx=8, pady=8)
        self.memory, self.share = ttk.Label(side), ttk.Progressbar(side, maximum=1.0)
        self.memory.pack(anchor="w", pady=(16, 4))
        self.share.pack(fill="x")
        self.dark = tk.BooleanVar(self)
        switch = ttk.Checkbutton(side, text="Dark", style="Switch.TCheckbutton", variable=self.dark)
        switch.pack(side="bottom", anchor="w")
        switch["command"] = self._use_theme

    def _build_talk(self, talk: ttk.Frame) -> None:
        """The conversation, the entry, the buttons and the status."""
        talk.pack(side="left", fill="both", expand=True)
        self.status, row = ttk.Label(talk), ttk.Frame(talk)
        self.status.pack(side="bottom", anchor="w", pady=(8, 0))
        row.pack(side="bottom", fill="x", pady=(12, 0))
        self.entry = ttk.Entry(row)
        self.entry.pack(side="left", fill="x", expand=True)
        does = {"Send": self.ask, "Stop": self.worker.stop, "Open…": self._choose, "New chat": self._clear}
        self.buttons = {name: ttk.Button(row, text=name, command=do) for name, do in does.items()}
        self.buttons["Send"]["style"] = "Accent.TButton"
        for button in self.buttons.values():
            button.pack(side="left", padx=(8, 0))
        self.chat = tk.Text(talk, wrap="word", width=56, height=18, relief="flat", padx=12)
        self.chat.config(highlightthickness=0, font="SunValleyBodyLargeFont")
        bar = ttk.Scrollbar(talk, command=self.chat.yview)
        bar.pack(side="right", fill="y")
        self.chat["yscrollcommand"] = bar.set
        self.chat.pack(fill="both", expand=True)

    def _listen(self) -> None:
        # to be read and copied only: disabled and enabled again it would be slow
        self.chat.bind("<Key>", lambda event: None if event.state & 4 and event.keysym in "ac" else "break")
        self.pane.bind("<Button-1>", self._choose)
        self.entry.bind("<Return>", lambda event: self.ask())
        self.entry.bind("<<Paste>>", lambda event: self.paste())
        self.entry.focus()
        self.bind("<Escape>", lambda event: self.buttons["Stop"].invoke())
        self.bind("<Control-o>", self._choose)
        self.bind("<Control-n>", self._clear)
        self.drop_target_register(DND_FILES)
        self.dnd_bind("<<Drop>>", lambda event: self.open_pictures(self.tk.splitlist(event.data)))
        self.protocol("WM_DELETE_WINDOW", self.close)

    def paste(self) -> str | None:
        """Takes pictures from the clipboard; a text goes into the entry, as always."""
        try:
            found = ImageGrab.grabclipboard()
        except (NotImplementedError, OSError):  # Linux needs xclip or wl-clipboard
            return None
        self.open_pictures(found if isinstance(found, list) else [found] if found else [])
        return "break" if found else None

    def open_pictures(self, sources: Iterable[Any]) -> None:
        """Takes pictures for the next question: paths, or PIL's images."""
        if sources := list(sources):
            self._begin("reading the picture", self.worker.open, sources)

    def ask(self) -> None:
        """Asks what stands in the entry."""
        question = self.entry.get().strip()
        if question and self._begin("reading the prompt", self.worker.ask, question, self._pictures, self.plan):
            if self.chat.tag_ranges("note"):
                self.chat.delete("note.first", "note.last")
            self._asked = question
            self.entry.delete(0, "end")
            self._add(f"{question}\n", "question")

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
            case ("opened", pictures, preview):
                self._pictures = pictures
                self.pane["image"] = self._image = ImageTk.PhotoImage(preview)
                self._say(f"for the next question: {', '.join(picture.name for picture in pictures)}")
            case ("compressed", kept, full):
                self._asked, self._pictures = "", []  # both are in the cache now, for later questions, too
                self.memory["text"] = f"Keys and values: {kept / 1024:.1f} of {full / 1024:.1f} KiB are kept"
                self.share["value"] = kept / full if full else 0
            case ("piece", text):
                self._add(text)
            case ("done", finish):
                self._add("\n")
                self._say("ready" if finish == "end" else f"the answer ended: {finish}")
            case ("cleared",):
                self._begin_anew()
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

    def _begin_anew(self) -> None:
        self._pictures, self.pane["image"], self.share["value"] = [], "", 0
        self.memory["text"] = "Keys and values: nothing was read yet"
        self.chat.delete("1.0", "end")
        self._add(self.welcome, "note")

    def _say(self, message: str, busy: bool = False) -> None:
        self.busy, self.status["text"] = busy, message
        for name, button in self.buttons.items():
            button.state(["!disabled" if self.loaded and busy == (name == "Stop") else "disabled"])

    def _add(self, text: str, tag: str = "") -> None:
        self.chat.insert("end", text, tag)
        self.chat.see("end")

    def _use_theme(self) -> None:
        dark = self.dark.get()
        sv_ttk.set_theme("dark" if dark else "light", self)
        self.chat.tag_config("question", foreground="#57c8ff" if dark else "#005fb8", spacing1=14, spacing3=4)
        self.chat.tag_config("note", foreground="#a0a0a0" if dark else "#6a6a6a", spacing1=14)


def main() -> None:
    data = Path(pykvedge.__file__).parent / "data"  # with the demo model that kvedge brings along
    parser = argparse.ArgumentParser(prog="desktop", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=data / "demo-model.gguf")
    parser.add_argument("--mmproj", type=Path, help="the image encoder of the model")
    parser.add_argument("--method", default=pykvedge.default_plan().method, help="what is kept (default: %(default)s)")
    parser.add_argument("--budget", type=float, metavar="SHARE", help="how much is kept, as in 0.2; default: by method")
    given = parser.parse_args()
    if packaged := given.model.parent == data:
        given.mmproj = data / "demo-mmproj.gguf"
    try:
        worker = Worker(given.model, given.mmproj)
        window = Window(worker, pykvedge.plan(given.method, given.budget), WELCOME + PACKAGED * packaged)
    except pykvedge.KvedgeError as error:
        parser.error(str(error))
    except (tk.TclError, RuntimeError) as error:  # the second: dropping needs a library that is not for this machine
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
