"""The window: it hands jobs to a Worker, and shows the events that come back."""

from __future__ import annotations

import queue
import tkinter as tk
from pathlib import Path
from tkinter import filedialog, font, ttk

import worker as w
from panes import MUTED, Meter, PicturePane
from PIL import ImageOps, ImageTk

import pykvedge

POLL_MS = 30  # between two looks for events: an answer seems to flow, and an idle window takes no time
AT_ONCE = 200  # events of one look, after which the keyboard and the mouse have their turn
ACCENT, WRONG, GROUND, LINE = "#2563eb", "#b91c1c", "#f3f4f6", "#d1d5db"
PICTURES = [("Pictures", "*.jpg *.jpeg *.png *.webp *.bmp *.gif"), ("All files", "*")]
WHY = {"length": "the longest answer that is allowed", "context": "the context is full; Ctrl+N starts a new chat"}


class Window(tk.Tk):
    """Shows a picture, a conversation, and its memory. Start the worker before `mainloop`, and join it after."""

    def __init__(self, worker: w.Worker, plan: pykvedge.Plan, title: str) -> None:
        """plan: what is chosen at first; its budget is a share."""
        super().__init__(className="kvedge")
        self.title(title)
        self.minsize(780, 560)
        self.geometry("980x660")
        self.worker = worker
        self.busy, self.loaded, self.closed = True, False, False
        self._shown: w.Opened | None = None
        self._next: w.Opened | None = None  # goes with the next question
        self._asked = ""  # and not read yet
        self._thumbnails: list[ImageTk.PhotoImage] = []
        self._style()
        self._build_left(plan)
        self._build_right()
        self._build_status()
        self._bind_keys()
        self._update()
        self._next_poll = self.after(POLL_MS, self._poll)

    # --- how it looks

    def _style(self) -> None:
        style = ttk.Style(self)
        for name in ("TkDefaultFont", "TkTextFont"):
            font.nametofont(name).configure(size=11)
        if self.tk.call("tk", "windowingsystem") == "x11":  # elsewhere the theme is the system's own, colours too
            style.theme_use("clam")
            style.configure(".", background=GROUND, bordercolor=LINE, lightcolor=GROUND, darkcolor=GROUND)
            style.configure("TButton", background="white", lightcolor="white", darkcolor="white", padding=(10, 6))
            style.map("TButton", background=[("disabled", GROUND), ("active", GROUND)])
            style.configure("TEntry", padding=6)
            style.configure("TScale", troughcolor=LINE, background="white")
            style.map("TCombobox", fieldbackground=[("readonly", "white")])
            style.configure("Horizontal.TProgressbar", background=ACCENT, troughcolor=LINE, borderwidth=0, thickness=8)
            style.configure("Send.TButton", background=ACCENT, foreground="white", lightcolor=ACCENT, darkcolor=ACCENT)
            style.map("Send.TButton", background=[("disabled", LINE), ("active", "#1d4ed8")])
        self.configure(background=style.lookup("TFrame", "background"))
        self.columnconfigure(0, weight=2, uniform="halves")
        self.columnconfigure(1, weight=3, uniform="halves")
        self.rowconfigure(0, weight=1)

    def _build_left(self, plan: pykvedge.Plan) -> None:
        left = ttk.Frame(self, padding=(12, 12, 6, 6))
        left.grid(row=0, column=0, sticky="nsew")
        left.columnconfigure(0, weight=1)
        left.rowconfigure(1, weight=1)
        buttons = ttk.Frame(left)
        buttons.grid(row=0, column=0, sticky="ew", pady=(0, 8))
        self.open_button = ttk.Button(buttons, text="Open picture…", command=self.choose_picture)
        self.new_button = ttk.Button(buttons, text="New chat", command=self.new_chat)
        self.open_button.pack(side="left", expand=True, fill="x", padx=(0, 8))
        self.new_button.pack(side="left")
        self.pane = PicturePane(left)
        self.pane.grid(row=1, column=0, sticky="nsew")
        keeping = ttk.LabelFrame(left, text="What is kept of a prompt", padding=10)
        keeping.grid(row=2, column=0, sticky="ew", pady=8)
        keeping.columnconfigure(0, weight=1)
        self.method = ttk.Combobox(keeping, values=pykvedge.methods(), state="readonly", width=16)
        self.method.set(plan.method)
        self.method.bind("<<ComboboxSelected>>", lambda event: self._method_chosen())
        self.method.grid(row=0, column=0, sticky="ew")
        self.share = ttk.Label(keeping, width=6, anchor="e")
        self.share.grid(row=0, column=1)
        self.budget = ttk.Scale(keeping, from_=0.05, to=1.0, command=lambda value: self._show_share())
        self.budget.set(plan.budget.ratio or 1.0)
        self.budget.grid(row=1, column=0, columnspan=2, sticky="ew", pady=(8, 0))
        self.meter = Meter(left)
        self.meter.grid(row=3, column=0, sticky="ew")

    def _build_right(self) -> None:
        right = ttk.Frame(self, padding=(6, 12, 12, 6))
        right.grid(row=0, column=1, sticky="nsew")
        right.columnconfigure(0, weight=1)
        right.rowconfigure(0, weight=1)
        history = ttk.Frame(right)
        history.grid(row=0, column=0, columnspan=3, sticky="nsew", pady=(0, 8))
        self.chat = tk.Text(history, state="disabled", wrap="word", width=40, font="TkTextFont", relief="flat")
        self.chat.configure(padx=14, pady=10, spacing2=3, highlightthickness=1, highlightbackground=LINE)
        self._bold = font.nametofont("TkTextFont").copy()
        self._bold.configure(weight="bold")
        self.chat.tag_configure("you", font=self._bold, spacing1=4, spacing3=2)
        for tag, colour in (("model", ""), ("note", MUTED), ("wrong", WRONG)):
            self.chat.tag_configure(tag, foreground=colour, lmargin1=14, lmargin2=14, spacing3=6)
        scroll = ttk.Scrollbar(history, command=self.chat.yview)
        self.chat["yscrollcommand"] = scroll.set
        scroll.pack(side="right", fill="y")
        self.chat.pack(side="left", expand=True, fill="both")
        self.entry = ttk.Entry(right, font="TkTextFont")
        self.send_button = ttk.Button(right, text="Send", command=self.ask, width=7, style="Send.TButton")
        self.stop_button = ttk.Button(right, text="Stop", command=self.stop, width=7)
        self.entry.grid(row=1, column=0, sticky="nsew")
        self.send_button.grid(row=1, column=1, padx=8)
        self.stop_button.grid(row=1, column=2)

    def _build_status(self) -> None:
        below = ttk.Frame(self, padding=(12, 0, 12, 8))
        below.grid(row=1, column=0, columnspan=2, sticky="ew")
        below.columnconfigure(0, weight=1)
        self.status = ttk.Label(below, text="loading the model")
        self.bar = ttk.Progressbar(below, maximum=1.0, length=180)
        self.status.grid(row=0, column=0, sticky="ew")
        self.bar.grid(row=0, column=1, padx=(12, 0))
        self.status.bind("<Configure>", lambda event: self.status.configure(wraplength=event.width - 12))

    def _bind_keys(self) -> None:
        # Tab goes through the widgets in the order in which they were made
        self.entry.bind("<Return>", lambda event: self.ask())
        self.bind("<Escape>", lambda event: self.stop())
        self.bind("<Control-o>", lambda event: self.choose_picture())
        self.bind("<Control-n>", lambda event: self.new_chat())
        self.bind("<Prior>", lambda event: self.chat.yview_scroll(-1, "pages"))
        self.bind("<Next>", lambda event: self.chat.yview_scroll(1, "pages"))
        self.protocol("WM_DELETE_WINDOW", self.close)
        self.entry.focus_set()

    # --- what a person does

    def choose_picture(self) -> None:
        """Asks for a file."""
        if not self.busy and (name := filedialog.askopenfilename(parent=self, filetypes=PICTURES)):
            self.open_picture(Path(name))

    def open_picture(self, path: Path) -> None:
        """Takes a picture for the next question."""
        if self._begin(f"reading {path.name}"):
            self.worker.open(path)

    def ask(self) -> None:
        """Asks what stands in the entry."""
        question = self.entry.get().strip()
        if not question or not self._begin("reading the prompt"):
            return
        self._asked = question
        self.entry.delete(0, "end")
        if self._next:
            self._add_thumbnail(self._next)
        self._add(f"{question}\n", "you")
        self.chat.see("end")
        self.meter.fast(0)
        self.worker.ask(question, [self._next.picture] if self._next else [], self.plan)

    def stop(self) -> None:
        """Ends the answer, or the reading of the prompt."""
        if self.busy and self.loaded:
            self.worker.stop()

    def new_chat(self) -> None:
        """Forgets the conversation; the picture goes with the next question again."""
        if self._begin("a new chat"):
            self.worker.clear()

    def close(self) -> None:
        """Is gone at once; the worker ends what it does and frees the model meanwhile."""
        if not self.closed:
            self.closed = True
            self.worker.quit()
            self.after_cancel(self._next_poll)
            self.destroy()

    @property
    def plan(self) -> pykvedge.Plan:
        """What is chosen now."""
        method = self.method.get()
        return pykvedge.plan(method, None if method == "full" else round(self.budget.get(), 2))

    def _method_chosen(self) -> None:
        self.budget.set(pykvedge.plan(self.method.get()).budget.ratio or 1.0)  # each has one that suits it
        self._update()

    # --- what the worker says

    def _poll(self) -> None:
        for _ in range(AT_ONCE):
            try:
                self._show(self.worker.events.get_nowait())
            except queue.Empty:
                break
        self._next_poll = self.after(POLL_MS, self._poll)

    def _show(self, event: w.Event) -> None:
        match event:
            case w.Progress(what, share):
                self._say(what, share)
            case w.Ready():
                self.loaded = True
                self._finish("ready")
            case w.Opened():
                self._shown = self._next = event
                self.pane.show(event.preview)
                self._finish(f"{event.picture.name} goes with the next question")
            case w.Compressed():
                self._asked, self._next = "", None  # both are in the cache now, for later questions, too
                self.meter.compressed(event)
                self.chat.mark_set("answer", "end-1c")
                self.chat.mark_gravity("answer", "left")
                self._say("answering", 0.0)
            case w.Piece(text, speed):
                self._add(text.lstrip() if self.chat.compare("answer", "==", "end-1c") else text, "model")
                self.meter.fast(speed)
            case w.Done(finish, speed):
                self.meter.fast(speed)
                self._answered(finish)
            case w.Cleared():
                self._cleared()
            case w.Failed(message, stopped):
                self._failed("stopped" if stopped else message, "note" if stopped else "wrong")
            case w.Ended():
                self.loaded = False
                if self.busy:  # by what is no KvedgeError: a defect, which threads print on stderr
                    self._finish("the model's thread has failed", WRONG)
                self._update()

    def _answered(self, finish: str) -> None:
        self._add("\n", "model")
        if finish == "cancelled":
            self._add("stopped\n", "note")
        elif finish in WHY:
            self._add(f"{WHY[finish]}\n", "note")
        self._finish("ready")

    def _failed(self, message: str, tag: str) -> None:
        if self._asked:  # it is no part of the conversation: back to where it can be changed
            self._add(f"{message}\n", tag)
            self.entry.insert(0, self._asked)
            self._asked = ""
        self._finish(message, WRONG if tag == "wrong" else MUTED)

    def _cleared(self) -> None:
        self.chat.configure(state="normal")
        self.chat.delete("1.0", "end")
        self.chat.configure(state="disabled")
        self._thumbnails.clear()
        self._next = self._shown
        self.meter.reset()
        self._finish("ready")

    # --- small things

    def _begin(self, what: str) -> bool:
        if self.busy or not self.loaded:
            return False
        self.busy = True
        self._say(what, 0.0)
        self._update()
        return True

    def _finish(self, message: str, colour: str = MUTED) -> None:
        self.busy = False
        self._say(message, 0.0, colour)
        self._update()

    def _say(self, message: str, share: float, colour: str = MUTED) -> None:
        self.status.configure(text=message, foreground=colour)
        self.bar["value"] = share

    def _update(self) -> None:
        for button in (self.open_button, self.new_button, self.send_button):
            button.state(["!disabled" if self.loaded and not self.busy else "disabled"])
        self.stop_button.state(["!disabled" if self.loaded and self.busy else "disabled"])
        self.budget.state(["disabled" if self.method.get() == "full" else "!disabled"])
        self._show_share()

    def _show_share(self) -> None:
        self.share["text"] = f"{self.budget.get():.0%}"

    def _add(self, text: str, tag: str) -> None:
        at_end = self.chat.dlineinfo("end-1c") is not None  # who has scrolled back reads on undisturbed
        self.chat.configure(state="normal")
        self.chat.insert("end", text, tag)
        self.chat.configure(state="disabled")
        if at_end:
            self.chat.see("end")

    def _add_thumbnail(self, opened: w.Opened) -> None:
        self._thumbnails.append(ImageTk.PhotoImage(ImageOps.contain(opened.preview, (120, 90))))
        self.chat.configure(state="normal")
        self.chat.image_create("end", image=self._thumbnails[-1])
        self.chat.insert("end", "\n")
        self.chat.configure(state="disabled")
