"""The parts of the window that only show something: a picture, and figures of memory and speed."""

from __future__ import annotations

import tkinter as tk
from tkinter import ttk

import psutil
from PIL import Image, ImageOps, ImageTk
from worker import Compressed

LOOK_MS = 500  # between two looks at the memory of the process
MUTED = "#6b7280"


def private_bytes() -> int:
    """Counts the memory that is this process's own: weights that are mapped from their file are not."""
    info = psutil.Process().memory_info()
    return int(getattr(info, "private", info.rss - getattr(info, "shared", 0)))  # Windows has its own figure


def readable(n_bytes: float) -> str:
    """Writes bytes as people read them: 12.5 KiB, 306.0 MiB."""
    for unit in ("KiB", "MiB"):
        n_bytes /= 1024
        if n_bytes < 1000:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / 1024:.2f} GiB"


class PicturePane(tk.Canvas):
    """Shows a picture as large as there is room. A canvas, since a label would grow with what it shows."""

    def __init__(self, parent: tk.Misc) -> None:
        super().__init__(parent, width=300, height=240, background="#e5e7eb", highlightthickness=0)
        self._preview: Image.Image | None = None
        self._image: ImageTk.PhotoImage | None = None  # tkinter shows it, but does not keep it alive
        self.bind("<Configure>", lambda event: self._draw())

    def show(self, preview: Image.Image | None) -> None:
        """Shows this picture; None: an invitation to open one."""
        self._preview = preview
        self._draw()

    def _draw(self) -> None:
        self.delete("all")
        size, centre = (self.winfo_width(), self.winfo_height()), (self.winfo_width() // 2, self.winfo_height() // 2)
        if self._preview is None:
            self.create_text(*centre, text="no picture yet", fill=MUTED)
            return
        self._image = ImageTk.PhotoImage(ImageOps.contain(self._preview, (max(size[0], 1), max(size[1], 1))))
        self.create_image(*centre, image=self._image)


class Meter(ttk.LabelFrame):
    """What the conversation takes of memory, and how fast the answer comes."""

    def __init__(self, parent: tk.Misc) -> None:
        super().__init__(parent, text="Memory", padding=10)
        self.kept, self.private, self.prompt, self.speed = (tk.StringVar(self, "-") for _ in range(4))
        self.bar = ttk.Progressbar(self, maximum=1.0, length=1)  # as wide as the rest
        rows = {"KV kept": self.kept, "Process": self.private, "Prompt": self.prompt, "Speed": self.speed}
        for row, (name, value) in enumerate(rows.items()):
            ttk.Label(self, text=name, foreground=MUTED).grid(row=2 * row, column=0, sticky="w", padx=(0, 12), pady=1)
            ttk.Label(self, textvariable=value).grid(row=2 * row, column=1, sticky="e", pady=1)
        self.bar.grid(row=1, column=0, columnspan=2, sticky="ew", pady=(2, 4))
        self.columnconfigure(1, weight=1)
        self._look()

    def compressed(self, figures: Compressed) -> None:
        """Shows what was kept of the conversation so far."""
        self.bar["value"] = figures.kept_bytes / max(figures.full_bytes, 1)
        self.kept.set(f"{readable(figures.kept_bytes)} of {readable(figures.full_bytes)}")
        image = f" ({figures.image} image)" if figures.image else ""
        self.prompt.set(f"{figures.prompt} tokens{image}")

    def fast(self, tokens_per_s: float) -> None:
        """Shows the speed of the answer; 0: none is known."""
        self.speed.set(f"{tokens_per_s:.1f} tokens/s" if tokens_per_s else "-")

    def reset(self) -> None:
        """Shows a conversation without messages."""
        self.bar["value"] = 0
        for value in (self.kept, self.prompt, self.speed):
            value.set("-")

    def _look(self) -> None:
        self.private.set(readable(private_bytes()))
        self.after(LOOK_MS, self._look)
