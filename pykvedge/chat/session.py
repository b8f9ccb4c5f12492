"""Session: a model, its image encoder, a plan, and a conversation whose KV cache is compressed after every prompt."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pykvedge.chat.answer import Answer
from pykvedge.errors import NothingToCompressError, StateError, UsageError
from pykvedge.models.images import Picture, load_pictures
from pykvedge.models.model import Progress, silent
from pykvedge.models.modelfile import facts
from pykvedge.models.prompt import ChatTemplate, Message, check_places, places
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.native import memory
from pykvedge.native.guard import Guard, Stop, one_thread
from pykvedge.plans import profile
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import checked_plan
from pykvedge.runtime import branch, libkvedge, stream
from pykvedge.runtime.engine import Engine
from pykvedge.runtime.loaded import LoadedModel, Loan, borrow, path_of
from pykvedge.runtime.report import ModelFacts, Report, Time, Tokens
from pykvedge.runtime.sampling import Sampling
from pykvedge.runtime.sessionfile import Note, fingerprint, read_note
from pykvedge.runtime.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pykvedge.models.images import ImageSources
    from pykvedge.runtime.settings import GivenSettings


class Session:
    """A conversation with a model. Close it when done, or use it in a with statement.

    For one thread at a time: a call while another thread is in one raises StateError. `close` waits for that thread,
    whose call ends early, with CancelledError; the answer that it reads ends with StateError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        mmproj: str | os.PathLike[str] | None = None,
        plan: Plan | None = None,
        *,
        progress: Progress = silent,
        cancel: threading.Event | None = None,
        **settings: Unpack[GivenSettings],
    ) -> None:
        """Loads the model, and the image encoder if one is given; or takes what pykvedge.load has loaded.

        plan: what to keep of each prompt, default: default_plan(). settings: fields of Settings.
        progress(what, share done) is called during long steps. Setting `cancel` stops a step or an answer that is
        under way. Raises ModelError, LibraryError, ProfileError, UsageError, CancelledError, and StateError for a
        loaded model that was closed.
        """
        self.settings = Settings.of({**settings})
        self.plan = checked_plan(plan)
        self.messages: list[Message] = []
        self.pending: list[int] = []  # generated, but not yet read back into the cache
        self.in_cache = False  # whether the cache holds the conversation so far
        self.cancel = cancel
        self.guard = Guard("session", over="the session is closed")
        self.stop = Stop(self.guard, lambda: self.cancel)
        self.last_report: Report | None = None
        self._progress = progress
        self._answer: Answer | None = None
        self._frames: Iterator[Picture] = iter(())  # of a stream, not read yet
        self._branch: branch.Branch | None = None  # before the last message
        self._vision: Vision | None = None
        self._engine: Engine | None = None
        self._check_stream(self.plan)
        profile.find(self.plan, path_of(model), self.settings.profile)  # before the weights are read
        started = time.perf_counter()
        self._loan: Loan | None = borrow(model, mmproj, self.settings, progress, cancel)
        self.model = self._loan.model
        try:
            self._vision = Vision(self._loan.encoder) if self._loan.encoder else None
            special = self.model.special_text
            self._template = ChatTemplate(self.model.chat_template(), special("bos"), special("eos"))
        except BaseException:
            self.close()
            raise
        self._facts = ModelFacts(*facts(self.model.header))
        self._engine = Engine(self.model, self._vision, self.settings, self.settings.threads or self._loan.threads)
        self._load_s = time.perf_counter() - started

    @one_thread
    def ask(
        self,
        prompt: str,
        images: ImageSources = (),
        sampling: Sampling | None = None,
    ) -> Answer:
        """Puts the next message to the model; iterate over what it returns to get the answer piece by piece.

        `<image>` in the prompt is the place of a picture, in their order; without any, they come before the text.
        Everything up to the first generated token happens here. images: one, or several, in any form that load_picture
        takes. A stream (Settings.stream) asks for them one at a time, also of a generator, and forgets their pixels.
        Raises ImageError, ContextError, OutOfMemoryError, NothingToCompressError, UsageError, or CancelledError.
        """
        self._require_open()
        self._end_answer()
        if not isinstance(prompt, str):
            raise UsageError(f"the prompt must be text, not {prompt!r:.40}")
        loaded = load_pictures(images)
        pictures = list(itertools.islice(loaded, places(prompt) + 1 if self.settings.stream else None))
        self._frames = itertools.chain(pictures, loaded)
        self._require_eyes(pictures)
        check_places(prompt, len(pictures))
        if not prompt.strip() and not pictures:
            raise UsageError("the prompt is empty; write a question")
        report = Report(self.plan.method, self.plan.budget.value, time=Time(load_s=self._load_s), model=self._facts)
        self._branch, before = None, branch.before_message(self)
        if not self.messages and self.settings.system:
            self.messages.append(Message("system", self.settings.system))
        self.messages.append(Message("user", prompt, pictures))
        try:
            self._read(report)
        except BaseException:
            # whatever the cache holds now, the next message starts from the copy, or from the conversation's text
            self.messages.pop()
            branch.recover(self, before)
            raise
        self._load_s, self._branch = 0.0, before
        self._answer = Answer(self, report, sampling or Sampling())
        return self._answer

    @one_thread
    def undo(self) -> Message:
        """Takes the last message and its answer back, and returns the message.

        The conversation, and the cache to the bit, are as they were before it. Messages after the first need
        Settings.undo. Raises StateError where nothing can be taken back: one message can, and none of a loaded file.
        """
        self._require_open()
        self._end_answer()
        taken, self._branch = branch.undo(self, self._branch), None
        return taken

    @one_thread
    def retry(self, sampling: Sampling | None = None) -> Answer:
        """Takes the last message back and puts it again, under the plan of now. Raises what undo and ask raise."""
        message = self.undo()
        return self.ask(message.text, message.pictures, sampling)

    @property
    def undo_bytes(self) -> int:
        """Bytes of keys and values in the copy that undo goes back to; 0 where there is none."""
        return self._branch.mark.n_bytes if self._branch and self._branch.mark else 0

    @one_thread
    def examine(
        self,
        prompt: str,
        images: ImageSources,
        plan: Plan,
        look: Callable[[libkvedge.Cache, list[Piece]], None] = lambda cache, pieces: None,
    ) -> list[list[list[int]]]:
        """Reads a prompt as the first of a conversation, compresses it by `plan`, and forgets it.

        look(cache, pieces) is called before the compression. Returns, per stored layer and KV head, the indices of the
        tokens that are kept. Raises what ask raises, and NothingToCompressError where llama.cpp keeps the cache.
        """
        self.clear()
        self.messages.append(Message("user", prompt, list(load_pictures(images))))
        try:
            pieces = self._pieces()
            try:
                self.engine.make_room(pieces, plan)
                self.engine.encode(pieces, self._progress, self.stop)
                self.engine.prefill(pieces, self._progress, self.stop)
                cache = self.engine.cache
                if cache is None:
                    raise NothingToCompressError(f"kvedge does not hold the KV cache of {self.model.path.name}")
                look(cache, pieces)
                self.engine.compress()
                lengths = cache.lengths()
                return [[cache.tokens(i, h) for h in range(len(heads))] for i, heads in enumerate(lengths)]
            finally:
                self.release(pieces)
        finally:
            self.messages.clear()
            self.forget()

    @one_thread
    def set_plan(self, plan: Plan) -> None:
        """Prompts that come from now on are compressed by this plan. Raises NothingToCompressError."""
        plan = checked_plan(plan)
        self._check_stream(plan)
        self._end_answer()
        self.engine.set_plan(plan)
        self.plan = plan

    @one_thread
    def clear(self) -> None:
        """Starts a new conversation."""
        self._end_answer()
        self.forget()
        if self._vision is not None:
            self._vision.forget()
        self.messages.clear()
        self.last_report = None

    @one_thread
    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes the conversation and its compressed cache to a file; an older one is replaced only when that is done.

        An answer that is still being generated ends here. Returns the bytes of the file. Raises SessionFileError,
        StateError (nothing was asked yet), UnsupportedError.
        """
        self._end_answer()
        if not self.in_cache or not self.messages:
            raise StateError("there is no conversation to save yet")
        note = Note(self.plan, self.settings.kv_type, 0, 0, 0, 0, 0.0, self.pending, self.messages)
        self.engine.save(path, fingerprint(self.model.header), note)
        return Path(path).stat().st_size

    @one_thread
    def load(self, path: str | os.PathLike[str], plan: Plan | None = None) -> None:
        """Goes on with the conversation in a file of `save`, in place of the one so far.

        plan: for the prompts from now on; None: the plan that the file was saved with. Pictures of earlier messages are
        in the cache only. Raises SessionFileError, ContextError, OutOfMemoryError, UsageError.
        """
        self._end_answer()
        model = fingerprint(self.model.header)
        note = read_note(path, model)
        if note.kv_type != self.settings.kv_type:
            raise UsageError(f"{os.fspath(path)} holds keys and values as {note.kv_type}; use --kv-type {note.kv_type}")
        plan = note.plan if plan is None else plan
        self._check_stream(plan)
        self.forget()
        started = time.perf_counter()
        self.engine.restore(path, model, note, plan)
        self._load_s += time.perf_counter() - started
        self.plan, self.messages, self.pending, self.in_cache = plan, note.messages, note.pending, True
        self.last_report = None

    def close(self) -> None:
        """Frees everything but a model that was loaded apart, as soon as a thread that is in a call has left it.

        Does nothing the second time.
        """
        with self.guard.closing():
            self._answer = None
            if self._engine is not None:
                self._engine.close()
                self._engine = None
            if self._vision is not None:
                self._vision.forget()
                self._vision = None
            if self._loan is not None:
                self._loan.give_back()
                self._loan = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """Context and cache. Raises StateError after close."""
        return self._require_open()

    @property
    def sees_images(self) -> bool:
        """Whether an image encoder was loaded."""
        return self._vision is not None

    @one_thread
    def first_prompt(self, prompt: str, pictures: ImageSources = ()) -> list[Piece]:
        """A message as the model would read it at the start of a conversation, for use with `engine`; release it."""
        self._require_open()
        message = Message("user", prompt, list(load_pictures(pictures)))
        self._require_eyes(message.pictures)
        return self._first([message])

    def forget(self) -> None:
        """Drops the cache; the next message reads the conversation again."""
        self.engine.close()
        self.in_cache, self.pending, self._branch = False, [], None

    def release(self, pieces: list[Piece]) -> None:
        """Frees what the image encoder holds of the pieces."""
        if self._vision is not None:
            self._vision.release(pieces)

    # ---------------------------------------------------------------------------------------------------

    def _require_open(self) -> Engine:
        if self._engine is None:
            raise StateError("the session is closed")
        return self._engine

    def _require_eyes(self, pictures: list[Picture]) -> None:
        if pictures and self._vision is None:
            raise UsageError(
                f"{self.model.path.name} was loaded without an image encoder, so it cannot see images; "
                "give the mmproj that belongs to it with --mmproj"
            )

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._answer.give_way()
            self._answer = None

    def _read(self, report: Report) -> None:
        """Brings the conversation into the cache, compresses what was added, and measures."""
        if not self.in_cache:
            if any(not p.rgb for m in self.messages for p in m.pictures):
                raise StateError(
                    "the pictures of this conversation were in the cache only, and it is gone; load the session file "
                    "again, or start a new conversation"
                )
            self.engine.close()
            self.pending = []
        if self.settings.stream:
            self._read_stream(report)
            return
        pieces = self._pieces()
        engine, spent = self.engine, report.time
        try:
            with self._peak_of(report):
                n_image = sum(p.n_tokens for p in pieces if isinstance(p, ImagePiece))
                report.tokens = Tokens(sum(p.n_tokens for p in pieces), n_image)
                self._progress("preparing the context", 1.0)
                spent.load_s += _timed(lambda: engine.make_room(pieces, self.plan))
                if self.settings.bounded:
                    report.bounded, report.not_bounded = not engine.not_bounded, engine.not_bounded
                spent.encode_s = _timed(lambda: engine.encode(pieces, self._progress, self.stop))
                report.rss.before_prefill_bytes = memory.rss_bytes()
                spent.prefill_s = _timed(lambda: engine.prefill(pieces, self._progress, self.stop))
                spent.compress_s = _timed(engine.compress)
                report.rss.after_compress_bytes = memory.rss_bytes()
                report.kv = engine.measure()
        finally:
            self.release(pieces)
        self.in_cache, self.pending = True, []

    @contextmanager
    def _peak_of(self, report: Report) -> Iterator[None]:
        """Notes the peak of resident memory inside the block, if that was asked for."""
        if not self.settings.measure_peak:
            yield
            return
        meter = memory.PeakMeter()
        meter.start()
        try:
            yield
        finally:
            rss = report.rss
            # the meter looks every 10 ms, and may have missed what was read in between
            rss.peak_bytes = max(meter.stop(), rss.before_prefill_bytes, rss.after_compress_bytes)

    def _read_stream(self, report: Report) -> None:
        """The same piece by piece: an image is encoded, read and forgotten before the next one is looked at."""
        engine, message = self.engine, self.messages[-1]
        if self.in_cache:
            text = self._template.following(self.messages, self._marker)
        else:
            text = self._with_bos(self._template.first(self.messages, self._marker))
        source = stream.Source(self._vision, self.model.tokenize)
        earlier = sum(len(m.pictures) for m in self.messages[:-1])
        parts = stream.segments(text, self._marker, self._frames, earlier) if self._vision else [(text, None)]
        before: list[Piece] = [TextPiece(self.pending)] if self.pending else []
        pieces = itertools.chain(before, source.pieces(parts))
        report.rss.before_prefill_bytes = memory.rss_bytes()
        try:
            with self._peak_of(report):
                report.time.prefill_s = _timed(
                    lambda: stream.read(
                        engine, self._vision, self.plan, pieces, self._progress, self.stop, report.tokens
                    )
                )
        finally:
            self.release(source.open)
        report.rss.after_compress_bytes = memory.rss_bytes()
        message.pictures = source.seen
        self.measure_stream(report)
        self.in_cache, self.pending = True, []

    def measure_stream(self, report: Report) -> None:
        """What a stream has become; the first time, when the prompt was read, also the figures of its cache."""
        if figures := stream.measure(self.engine, self.model, self.plan, self.settings.kv_type):
            report.kv = report.kv if report.stream else figures[0]
            report.stream = figures[1]

    def _check_stream(self, plan: Plan) -> None:
        if self.settings.stream:
            stream.check(plan)

    def _pieces(self) -> list[Piece]:
        if not self.in_cache:
            return self._first(self.messages)
        before: list[Piece] = [TextPiece(self.pending)] if self.pending else []
        return before + self._split(self._template.following(self.messages, self._marker), self.messages[-1:])

    def _first(self, messages: list[Message]) -> list[Piece]:
        return self._split(self._with_bos(self._template.first(messages, self._marker)), messages)

    def _split(self, text: str, messages: list[Message]) -> list[Piece]:
        """The text of these messages with their pictures in it."""
        pictures = [p for message in messages for p in message.pictures]
        if pictures and self._vision is not None:
            return self._vision.split(text, pictures)
        return [TextPiece(self.model.tokenize(text))]

    @property
    def _marker(self) -> str:
        return self._vision.marker if self._vision else ""

    def _with_bos(self, text: str) -> str:
        bos = self.model.special_text("bos")
        return bos + text if self.model.adds_bos and not text.startswith(bos) else text


def _timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
