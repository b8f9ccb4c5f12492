"""Session: a model, its image encoder, a plan, and a conversation whose KV cache is compressed after every prompt."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pykvedge import libkvedge, memory, profile, runtime, stream
from pykvedge.answer import Answer
from pykvedge.engine import Engine
from pykvedge.errors import NothingToCompressError, StateError, UsageError
from pykvedge.images import Picture, load_picture
from pykvedge.kvtypes import KvType
from pykvedge.model import Model, Progress, silent
from pykvedge.plan import Plan
from pykvedge.presets import default_plan
from pykvedge.prompt import ChatTemplate, Message
from pykvedge.report import Report, Time, Tokens
from pykvedge.sampling import Sampling
from pykvedge.sessionfile import Note, fingerprint, read_note
from pykvedge.settings import Settings
from pykvedge.vision import ImagePiece, Piece, TextPiece, Vision


class Session:
    """A conversation with a model. Close it when done, or use it in a with statement. For one thread at a time."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        mmproj: str | os.PathLike[str] | None = None,
        plan: Plan | None = None,
        *,
        progress: Progress = silent,
        cancel: threading.Event | None = None,
        **settings: Any,
    ) -> None:
        """Loads the model, and the image encoder if one is given.

        plan: what to keep of each prompt, default: default_plan(). settings: fields of Settings.
        progress(what, share done) is called during long steps. Setting `cancel` stops a step or an answer that is
        under way. Raises ModelError, LibraryError, ProfileError, UsageError, CancelledError.
        """
        self.settings = Settings.of(settings)
        self.plan = plan if plan is not None else default_plan()
        self.messages: list[Message] = []
        self.pending: list[int] = []  # generated, but not yet read back into the cache
        self.in_cache = False  # whether the cache holds the conversation so far
        self.cancel = cancel
        self.last_report: Report | None = None
        self._progress = progress
        self._answer: Answer | None = None
        self._frames: Iterator[Picture] = iter(())  # of a stream, not read yet
        self._vision: Vision | None = None
        self._engine: Engine | None = None
        self._check_stream(self.plan)
        profile.find(self.plan, model, self.settings.profile)  # before the weights are read
        threads = self.settings.threads or runtime.default_threads()
        started = time.perf_counter()
        self.model = Model(model, self.settings.gpu_layers, progress, cancel, self.settings.verbose)
        try:
            if mmproj is not None:
                progress("loading the image encoder", 1.0)
                on_gpu = self.settings.gpu_layers != 0
                self._vision = Vision(mmproj, self.model, threads, on_gpu, self.settings.verbose)
            special = self.model.special_text
            self._template = ChatTemplate(self.model.chat_template(), special("bos"), special("eos"))
        except BaseException:
            self.close()
            raise
        self._engine = Engine(self.model, self._vision, self.settings, threads)
        self._load_s = time.perf_counter() - started

    def ask(
        self,
        prompt: str,
        images: Iterable[str | os.PathLike[str] | Picture] = (),
        sampling: Sampling | None = None,
    ) -> Answer:
        """Puts the next message to the model; iterate over what it returns to get the answer piece by piece.

        Everything up to the first generated token happens here. images: paths, or pictures already loaded. A stream
        (Settings.stream) takes them one at a time, also from a generator, and forgets their pixels.
        Raises ImageError, ContextError, OutOfMemoryError, NothingToCompressError, UsageError, or CancelledError.
        """
        self._require_open()
        self._end_answer()
        loaded = (p if isinstance(p, Picture) else load_picture(p) for p in images)
        pictures = list(itertools.islice(loaded, 1 if self.settings.stream else None))
        self._frames = itertools.chain(pictures, loaded)
        self._require_eyes(pictures)
        if not prompt.strip() and not pictures:
            raise UsageError("the prompt is empty; write a question")
        report = Report(self.plan.method, self.plan.budget.value, time=Time(load_s=self._load_s))
        if not self.messages and self.settings.system:
            self.messages.append(Message("system", self.settings.system))
        self.messages.append(Message("user", prompt, pictures))
        try:
            self._read(report)
        except BaseException:
            # whatever the cache holds now, the next message starts from the text of the conversation
            self.messages.pop()
            self._forget()
            raise
        self._load_s = 0.0
        self._answer = Answer(self, report, sampling or Sampling())
        return self._answer

    def examine(
        self,
        prompt: str,
        images: Iterable[Picture],
        plan: Plan,
        look: Callable[[libkvedge.Cache, list[Piece]], None] = lambda cache, pieces: None,
    ) -> list[list[list[int]]]:
        """Reads a prompt as the first of a conversation, compresses it by `plan`, and forgets it.

        look(cache, pieces) is called before the compression. Returns, per stored layer and KV head, the indices of the
        tokens that are kept. Raises what ask raises, and NothingToCompressError where llama.cpp keeps the cache.
        """
        self.clear()
        self.messages.append(Message("user", prompt, list(images)))
        try:
            pieces = self._pieces()
            try:
                self.engine.make_room(pieces, plan)
                self.engine.encode(pieces, self._progress, self.cancel)
                self.engine.prefill(pieces, self._progress, self.cancel)
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
            self._forget()

    def set_plan(self, plan: Plan) -> None:
        """Prompts that come from now on are compressed by this plan. Raises NothingToCompressError."""
        self._check_stream(plan)
        self._end_answer()
        self.engine.set_plan(plan)
        self.plan = plan

    def clear(self) -> None:
        """Starts a new conversation."""
        self._end_answer()
        self._forget()
        if self._vision is not None:
            self._vision.forget()
        self.messages.clear()
        self.last_report = None

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
        self._forget()
        started = time.perf_counter()
        self.engine.restore(path, model, note, plan)
        self._load_s += time.perf_counter() - started
        self.plan, self.messages, self.pending, self.in_cache = plan, note.messages, note.pending, True
        self.last_report = None

    def close(self) -> None:
        """Frees everything. Does nothing the second time."""
        self._answer = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._vision is not None:
            self._vision.close()
            self._vision = None
        self.model.close()

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

    def first_prompt(self, prompt: str, pictures: Iterable[Picture] = ()) -> list[Piece]:
        """A message as the model would read it at the start of a conversation, for use with `engine`; release it."""
        self._require_open()
        message = Message("user", prompt, list(pictures))
        self._require_eyes(message.pictures)
        return self._first([message])

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
            self._answer.close()
            self._answer = None

    def _forget(self) -> None:
        self.engine.close()
        self.in_cache, self.pending = False, []

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
                spent.encode_s = _timed(lambda: engine.encode(pieces, self._progress, self.cancel))
                report.rss.before_prefill_bytes = memory.rss_bytes()
                spent.prefill_s = _timed(lambda: engine.prefill(pieces, self._progress, self.cancel))
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
            report.rss.peak_bytes = meter.stop()

    def _read_stream(self, report: Report) -> None:
        """The same piece by piece: an image is encoded, read and forgotten before the next one is looked at."""
        engine, message = self.engine, self.messages[-1]
        if self.in_cache:
            text = self._template.following(self.messages, self._marker)
        else:
            text = self._with_bos(self._template.first(self.messages, self._marker))
        source = stream.Source(self._vision, self.model.tokenize)
        parts = stream.segments(text, self._marker, self._frames) if self._vision else [(text, None)]
        before: list[Piece] = [TextPiece(self.pending)] if self.pending else []
        pieces = itertools.chain(before, source.pieces(parts))
        report.rss.before_prefill_bytes = memory.rss_bytes()
        try:
            with self._peak_of(report):
                report.time.prefill_s = _timed(
                    lambda: stream.read(
                        engine, self._vision, self.plan, pieces, self._progress, self.cancel, report.tokens
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
        element = KvType.parse(self.settings.kv_type).plain.bytes_per_value
        if figures := stream.measure(self.engine, self.model, self.plan, element):
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
