"""Does with the window of examples/desktop what a person would: desktop_driver.py CASE MODEL [MMPROJ [PICTURE...]]

One JSON object on stdout tells what the window showed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "desktop"))

import worker as desktop_worker  # noqa: E402
from window import Window  # noqa: E402

import pykvedge  # noqa: E402

ENDLESS = pykvedge.Sampling(grammar='root ::= "a" root', max_tokens=4000)
sessions: list[pykvedge.Session] = []


class Noted(pykvedge.Session):
    """Remembers the sessions that were made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        sessions.append(self)


class Person:
    """Looks at a window and uses it."""

    def __init__(self, model, mmproj=None, n_ctx=0):
        self.worker = desktop_worker.Worker(Path(model), Path(mmproj) if mmproj else None, n_ctx=n_ctx, threads=1)
        self.window = Window(self.worker, pykvedge.plan("mixkv", 0.5), "a window")
        self.worker.start()

    def wait(self, until=None, seconds=60.0):
        end = time.monotonic() + seconds
        until = until or (lambda: not self.window.busy)
        while not until():
            if time.monotonic() > end:
                raise TimeoutError(self.window.status["text"])
            self.window.update()
            time.sleep(0.005)
        self.window.update()

    def press(self, key):
        self.window.entry.focus_force()
        self.window.update()
        self.window.entry.event_generate(key)

    def write(self, question):
        self.window.entry.delete(0, "end")
        self.window.entry.insert(0, question)
        self.press("<Return>")

    def ask(self, question):
        self.write(question)
        assert self.window.busy
        self.wait()
        return self.said

    @property
    def said(self):
        return self.window.chat.get("answer", "end").strip() if "answer" in self.window.chat.mark_names() else ""

    @property
    def line(self):
        return self.window.status["text"], str(self.window.status["foreground"])

    def states(self):
        window = self.window
        buttons = {"open": window.open_button, "send": window.send_button, "stop": window.stop_button}
        return {name: not button.instate(["disabled"]) for name, button in buttons.items()}

    def memory(self):
        meter = self.window.meter
        return {"kept": meter.kept.get(), "prompt": meter.prompt.get(), "share": float(meter.bar["value"])}

    def end(self):
        self.window.close()
        self.worker.join(60)
        return not self.worker.is_alive()


def anonymous_bytes():
    """As the kernel counts what no file backs."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


def talk(model, mmproj, scene, broken):
    """A conversation, a stop, a new chat, other methods, and pictures that are none."""
    person, told = Person(model, mmproj), {}
    window = person.window
    told["loading"] = person.states()
    person.wait()
    told["ready"] = person.states()
    window.open_picture(Path(scene))
    person.wait()
    told["answers"], told["memory"] = [], []
    for question in ("What is the code?", "How many triangles are there?"):
        told["answers"].append(person.ask(question))
        told["memory"].append(person.memory())
    window.meter.private.set("")
    person.wait(lambda: window.meter.private.get() != "")  # the next look
    told["private"] = [window.meter.private.get(), anonymous_bytes()]
    window.open_picture(Path(broken))
    person.wait()
    told["broken"] = person.line

    person.worker.sampling = ENDLESS
    person.write("What is the code?")
    person.wait(lambda: bool(person.said.strip("a") == "" and len(person.said) > 3))
    told["answering"] = person.states()
    person.press("<Escape>")
    person.wait()
    told["stopped"] = person.said
    person.worker.sampling = None
    told["after a stop"] = person.ask("Where is the red circle?")

    window.new_button.invoke()
    person.wait()
    told["cleared"] = [window.chat.get("1.0", "end").strip(), person.memory()["kept"]]
    window.method.set("full")
    window.method.event_generate("<<ComboboxSelected>>")
    told["answers"].append(person.ask("What is the code?"))
    told["memory"].append(person.memory())

    window.entry.insert(0, "word " * 5000)
    window.send_button.invoke()
    person.wait()
    told["too long"] = [*person.line, len(window.entry.get().split()), person.said]
    told["ended"] = person.end()
    return told


def close(model, mmproj, scene):
    """The window is closed in the middle of an answer, with the program's own loop."""
    pykvedge.Session = Noted
    person = Person(model, mmproj)
    person.wait()
    person.worker.sampling = ENDLESS
    person.window.open_picture(Path(scene))
    person.wait()
    person.write("What is the code?")
    seen = []

    def look():
        if person.said:
            seen.append(person.said)
            person.window.tk.call(person.window.protocol("WM_DELETE_WINDOW"))
        else:
            person.window.after(5, look)

    look()
    person.window.mainloop()
    person.worker.join(60)
    (session,) = sessions
    return {"seen": len(seen), "alive": person.worker.is_alive(), "in memory": bool(session.model.handle)}


def lines(*files):
    """What a window says whose model cannot be had, or sees nothing."""
    person = Person(*files[:-1])
    person.wait()
    told = [person.line]
    person.window.open_picture(Path(files[-1]))
    person.wait()
    told.append(person.line)
    return {"lines": told, "loaded": person.window.loaded, "ended": person.end()}


def full(model):
    """An answer that ends because the context does."""
    person = Person(model, n_ctx=256)
    person.wait()
    person.worker.sampling = ENDLESS
    return {"said": person.ask("What is the code?").splitlines(), "line": person.line[0], "ended": person.end()}


def keys(model, mmproj):
    """Where Tab goes, and whether Ctrl+O asks for a file."""
    person = Person(model, mmproj)
    person.wait()
    window, asked, order = person.window, [], []
    names = {str(getattr(window, n)): n for n in ("open_button", "new_button", "method", "budget", "entry")}
    names |= {str(window.send_button): "send_button", str(window.stop_button): "stop_button"}
    sys.modules["window"].filedialog.askopenfilename = lambda **options: asked.append(options) or ""
    at = window.entry
    for _ in range(6):
        order.append(names.get(str(at), str(at)))
        at = at.tk_focusNext()
    person.press("<Control-o>")
    person.window.update()
    before = window.pane.winfo_width(), window.chat.winfo_width()
    window.geometry("1200x800")
    person.wait(lambda: window.winfo_width() == 1200)
    after = window.pane.winfo_width(), window.chat.winfo_width()
    return {"order": order, "asked": len(asked), "grew": [b < a for b, a in zip(before, after, strict=True)],
            "ended": person.end()}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({f.__name__: f for f in (talk, close, lines, full, keys)}[sys.argv[1]](*sys.argv[2:])))
