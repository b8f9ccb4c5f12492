"""The model lives in one thread, which takes jobs from a queue and answers with events. Nothing here knows of windows.

A window must never wait for a model, and a session is for one thread: so the thread owns it, from loading to freeing.
"""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

import pykvedge

PREVIEW = 320  # pixels, the longer side


class Worker(threading.Thread):
    """Start it, hand it one job at a time, and look into `events` now and then; all that takes time is done by `run`.

    Events are ("progress", step, share), ("ready",), ("opened", pictures, preview), ("compressed", kept, full), in
    bytes, ("piece", text), ("done", finish), ("cleared",), ("failed", line), also by a stop, and at last ("ended",).
    """

    def __init__(self, model: Path, mmproj: Path | None, **settings: Any) -> None:
        """settings: of the session."""
        # no daemon: Python cuts those off in the middle of native code when the program ends
        super().__init__(name="model")
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.sampling: pykvedge.Sampling | None = None  # of the answers from now on
        self._jobs: queue.SimpleQueue[Callable[[pykvedge.Session], None] | None] = queue.SimpleQueue()
        self._cancel = threading.Event()
        self._files, self._settings = (model, mmproj), settings

    def open(self, sources: list[Any]) -> None:
        """Reads pictures: paths of files, or PIL's images."""
        self._hand_over(lambda session: self._open(session, sources))

    def ask(self, question: str, pictures: list[pykvedge.Picture], plan: pykvedge.Plan) -> None:
        """Puts the next message of the conversation; `plan` says what is kept of it."""
        self._hand_over(lambda session: self._answer(session, question, pictures, plan))

    def clear(self) -> None:
        """Begins a new conversation with the same model."""
        self._hand_over(lambda session: (session.clear(), self.events.put(("cleared",))))

    def stop(self) -> None:
        """Ends the job under way, also in the middle of an image or a prompt."""
        self._cancel.set()

    def quit(self) -> None:
        """Ends the job under way, frees the model and ends the thread; `join` waits for that."""
        self._cancel.set()
        self._jobs.put(None)

    def _hand_over(self, job: Callable[[pykvedge.Session], Any]) -> None:
        # cleared here and not when the job begins: a stop that comes between the two must not be lost
        self._cancel.clear()
        self._jobs.put(job)

    def run(self) -> None:
        """Loads the model, does the jobs, and frees it."""
        told = {"progress": lambda *step: self.events.put(("progress", *step)), "cancel": self._cancel}
        try:
            with pykvedge.Session(*self._files, **told, **self._settings) as session:
                self.events.put(("ready",))
                while (job := self._jobs.get()) is not None:
                    try:
                        job(session)
                    except pykvedge.KvedgeError as error:
                        self.events.put(("failed", str(error)))
        except pykvedge.KvedgeError as error:  # of the loading
            self.events.put(("failed", str(error)))
        finally:
            self.events.put(("ended",))

    def _open(self, session: pykvedge.Session, sources: list[Any]) -> None:
        if not session.sees_images:
            raise pykvedge.UsageError("this model sees no pictures; start with the --mmproj that belongs to it")
        pictures = [pykvedge.load_picture(source) for source in sources]
        last = pictures[-1]
        preview = Image.frombytes("RGB", (last.width, last.height), last.rgb)
        # here: scaling a photograph of 50 million pixels would stall the window
        preview = ImageOps.contain(preview, (PREVIEW, PREVIEW))
        self.events.put(("opened", pictures, preview))

    def _answer(self, session: pykvedge.Session, question: str, pictures: list[Any], plan: pykvedge.Plan) -> None:
        session.set_plan(plan)
        answer = session.ask(question, pictures, self.sampling)
        kv = answer.report.kv  # a report goes on changing: its figures are copied
        self.events.put(("compressed", kv.kept_bytes, kv.full_bytes))
        for text in answer:
            self.events.put(("piece", text))
        self.events.put(("done", answer.report.finish))
