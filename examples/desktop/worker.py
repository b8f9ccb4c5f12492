"""The model lives in one thread, which takes jobs from a queue and answers with events. Nothing here knows of windows.

A window must never wait for a model, and a session is for one thread: so the thread owns it, from loading to freeing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image

import pykvedge

PREVIEW = (1024, 1024)  # pixels at most: scaling a photograph of 50 million at every resize would stall the window


@dataclass(frozen=True)
class Progress:
    """A long step: `what` is being done, `share` of it is there (0 to 1)."""

    what: str
    share: float


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    sees_images: bool


@dataclass(frozen=True)
class Opened:
    """A picture was read; the preview is a small one for the screen."""

    picture: pykvedge.Picture
    preview: Image.Image


@dataclass(frozen=True)
class Compressed:
    """The prompt was read and compressed. Figures of the report: bytes of keys and values, tokens, of them images'."""

    kept_bytes: int
    full_bytes: int
    prompt: int
    image: int


@dataclass(frozen=True)
class Piece:
    """The answer goes on with this text; so many tokens come in a second by now."""

    text: str
    tokens_per_s: float


@dataclass(frozen=True)
class Done:
    """The answer is complete. finish: as in pykvedge.Report, so "cancelled" where it was stopped."""

    finish: str
    tokens_per_s: float


@dataclass(frozen=True)
class Cleared:
    """A new conversation begins."""


@dataclass(frozen=True)
class Failed:
    """A job came to nothing. A question whose answer had not begun is no part of the conversation.

    message: one line for people. stopped: because that was wanted.
    """

    message: str
    stopped: bool = False


@dataclass(frozen=True)
class Ended:
    """No more events come: the model is freed, or could not be loaded."""


Event = Progress | Ready | Opened | Compressed | Piece | Done | Cleared | Failed | Ended


class Worker(threading.Thread):
    """Start it, hand it one job at a time, and look into `events` now and then. Every job ends in one event:

    `open` in Opened, `ask` in Done, `clear` in Cleared; any of them in Failed.
    """

    def __init__(
        self,
        model: Path,
        mmproj: Path | None = None,
        *,
        sampling: pykvedge.Sampling | None = None,
        n_ctx: int = 0,
        threads: int = 0,
    ) -> None:
        # no daemon: those are cut off where they are when the program ends, in the middle of native code
        super().__init__(name="model")
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[pykvedge.Session], None] | None] = queue.SimpleQueue()
        self._cancel = threading.Event()
        self.sampling = sampling  # of the answers from now on
        self._files, self._n_ctx, self._threads = (model, mmproj), n_ctx, threads

    # --- called by the window, and back at once

    def open(self, path: Path) -> None:
        """Reads a picture."""
        self._hand_over(partial(self._read_picture, path))

    def ask(self, question: str, pictures: list[pykvedge.Picture], plan: pykvedge.Plan) -> None:
        """Puts the next message of the conversation; `plan` says what is kept of it."""
        self._hand_over(partial(self._answer, question, pictures, plan))

    def clear(self) -> None:
        """Begins a new conversation with the same model."""
        self._hand_over(self._clear)

    def stop(self) -> None:
        """Ends the job under way, also in the middle of an image or a prompt."""
        self._cancel.set()

    def quit(self) -> None:
        """Ends the job under way, frees the model and ends the thread; `join` waits for that."""
        self._cancel.set()
        self._jobs.put(None)

    def _hand_over(self, job: Callable[[pykvedge.Session], None]) -> None:
        # cleared here and not when the job begins: a stop that comes between the two must not be lost
        self._cancel.clear()
        self._jobs.put(job)

    # --- run by the thread

    def run(self) -> None:
        """Loads the model, does the jobs, and frees it."""
        try:
            with pykvedge.Session(
                *self._files, progress=self._progress, cancel=self._cancel, n_ctx=self._n_ctx, threads=self._threads
            ) as session:
                self.events.put(Ready(session.sees_images))
                while (job := self._jobs.get()) is not None:
                    try:
                        job(session)
                    except pykvedge.KvedgeError as error:
                        self.events.put(Failed(str(error), isinstance(error, pykvedge.CancelledError)))
        except pykvedge.KvedgeError as error:  # of the loading
            self.events.put(Failed(str(error)))
        finally:
            self.events.put(Ended())

    def _progress(self, what: str, share: float) -> None:
        self.events.put(Progress(what, share))

    def _read_picture(self, path: Path, session: pykvedge.Session) -> None:
        if not session.sees_images:
            raise pykvedge.UsageError("this model sees no pictures; start with the --mmproj that belongs to it")
        picture = pykvedge.load_picture(path)
        preview = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
        preview.thumbnail(PREVIEW)
        self.events.put(Opened(picture, preview))

    def _answer(
        self, question: str, pictures: list[pykvedge.Picture], plan: pykvedge.Plan, session: pykvedge.Session
    ) -> None:
        session.set_plan(plan)
        answer = session.ask(question, pictures, self.sampling)
        report = answer.report
        kv, tokens = report.kv, report.tokens
        self.events.put(Compressed(kv.kept_bytes, kv.full_bytes, tokens.prompt, tokens.image))
        for text in answer:
            self.events.put(Piece(text, report.time.decode_tok_s))
        self.events.put(Done(report.finish, report.time.decode_tok_s))

    def _clear(self, session: pykvedge.Session) -> None:
        session.clear()
        self.events.put(Cleared())
