"""Holds the messages of a conversation and the engine that reads them; an Answer generates the text of one turn."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from pykvedge.errors import GrammarError, ImageError, OutOfMemoryError, SessionFileError, StateError, UnsupportedError
from pykvedge.library import libkvedge, native_plan
from pykvedge.models.composer import Composer
from pykvedge.models.images import Picture
from pykvedge.models.model import Model, Progress
from pykvedge.models.pixel_file import PixelFile
from pykvedge.models.prompt import Message
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.runtime import logprobs, opening, stream
from pykvedge.runtime.ageing import check_age
from pykvedge.runtime.drafting import check_policy, require_drafts
from pykvedge.runtime.engine import Engine
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.pruning import planned
from pykvedge.runtime.report import Report, Tokens
from pykvedge.runtime.sequence import TokenBoundary
from pykvedge.runtime.sessionfile import fingerprint
from pykvedge.runtime.settings import Settings
from pykvedge.runtime.snapshot import Snapshot
from pykvedge.system import memory, signals
from pykvedge.system.guard import Guard, Single, Stop


class Conversation(Single):
    """The part of a session that its answers use. The session sets model, vision and engine."""

    model: Model
    _composer: Composer

    def __init__(self, plan: Plan, settings: Settings, progress: Progress, cancel: threading.Event | None) -> None:
        self.plan, self.settings = plan, settings
        self.messages: list[Message] = []
        self.pending: list[int] = []  # tokens generated, but not yet in the cache
        self.in_cache = False  # whether the cache holds the conversation so far
        self.touched = False  # whether reading the last message has changed the cache
        self.last_report: Report | None = None
        self.guard = Guard("session", over="the session is closed")
        self.stop = Stop(cancel, self.guard)
        self._progress = signals.lifting(progress)
        self._frames: Iterator[Picture] = iter(())  # unread pictures of a stream
        self._vision: Vision | None = None
        self._engine: Engine | None = None
        self._read_again: list[Piece] = []  # pieces of images that a later second pass may read
        self._pixel_file: PixelFile | None = None  # file of pixels, if whole rows are in a file
        self._openings: opening.Openings | None = None  # openings of earlier conversations; None: not kept
        self._begins: dict[int, TokenBoundary] = {}  # by message index, for messages read separately
        self.answer: Answer | None = None  # the unfinished answer

    @property
    def cancel(self) -> threading.Event | None:
        """Returns the event that stops the current work when set."""
        return self.stop.cancel

    @cancel.setter
    def cancel(self, event: threading.Event | None) -> None:
        self.stop.cancel = event

    @property
    def engine(self) -> Engine:
        """Returns the engine, which owns context and cache. Raises StateError after close."""
        if self._engine is None:
            raise StateError("the session is closed")
        return self._engine

    def forget(self) -> None:
        """Drops the cache. The next message reads the whole conversation again."""
        self.engine.close()
        self.release_all()
        self.in_cache, self.pending, self._begins = False, [], {}

    def release(self, pieces: list[Piece]) -> None:
        """Frees the encoder's data of the pieces, unless a later second pass may read the pieces."""
        cache = self.engine.cache if self._engine is not None else None
        if cache is not None and cache.keeps and cache.replays:
            self._read_again.extend(pieces)
        elif self._vision is not None:
            self._vision.release(pieces)

    def release_all(self) -> None:
        """Frees the encoder's data of all messages."""
        if self._vision is not None:
            self._vision.release(self._read_again)
        self._read_again = []

    def read(self, report: Report) -> None:
        """Reads the conversation into the cache, compresses the new tokens, and fills the report."""
        self.touched = not self.in_cache
        if not self.in_cache:
            if any(not p.n_bytes for m in self.messages for p in m.pictures):
                raise StateError(
                    "the pictures of this conversation are lost with its cache; load the session file again, or "
                    "start a new conversation"
                )
            self.engine.close()
            self.release_all()
            self.pending = []
        if self.settings.stream:
            self._read_stream(report)
            return
        if self.in_cache and self.engine.cache is not None:
            self._begins[len(self.messages) - 1] = self.engine.sequence.boundary(len(self.pending))
        self._read_pieces(self._pieces(), report)
        self.in_cache, self.pending = True, []
        self._put_aside(self.messages[-1])

    def _put_aside(self, message: Message) -> None:
        """Moves the pixels of a read message to a file, if whole rows are in a file.

        The pixels are needed only if the cache is lost. The pixels stay in memory if the file has no room.
        """
        keep = self.settings.keeping
        if keep is None or keep.place != "disk":
            return
        with suppress(ImageError):
            self._pixel_file = self._pixel_file or PixelFile(keep.made_folder())
            message.pictures = [self._pixel_file.put(p) if p.rgb else p for p in message.pictures]

    def _read_pieces(self, pieces: list[Piece], report: Report) -> None:
        engine, spent = self.engine, report.time
        try:
            with self._peak_of(report):
                self._progress("preparing the context", 1.0)
                spent.load_s += _timed(lambda: engine.make_room(pieces, self.plan))
                if self.settings.bounded:
                    report.bounded, report.not_bounded = not engine.not_bounded, engine.not_bounded
                before, question = self._cut(pieces)
                if before:
                    self._open(before, report)
                    engine.make_room(question, self.plan)
                self._take_in(question, report)
                report.rss.after_compress_bytes = memory.rss_bytes()
                report.kv = engine.sequence.measure()
        finally:
            self.release(pieces)

    def _take_in(self, pieces: list[Piece], report: Report) -> None:
        engine, spent = self.engine, report.time
        spent.encode_s += _timed(lambda: engine.encode(pieces, self._progress, self.stop))
        report.tokens.add(pieces)  # a pruner may keep fewer tokens than the plan allows
        report.rss.before_prefill_bytes = report.rss.before_prefill_bytes or memory.rss_bytes()
        self.touched = True
        spent.prefill_s += _timed(lambda: engine.prefill(pieces, self._progress, self.stop))
        spent.prefill_s -= engine.sequence.replay_s
        spent.replay_s += engine.sequence.replay_s
        spent.compress_s += _timed(engine.compress)

    def _cut(self, pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
        """Cuts a prompt before its question if the settings say so, or if it changes nothing (runtime/opening.py)."""
        rounds = KvType.parse(self.settings.kv_type).quantised
        keeps = self._openings is not None and not self.in_cache and self.plan.method == "full"
        if self.engine.cache is None or not (self.settings.question_blind or (keeps and not rounds)):
            return [], pieces
        if self.in_cache or any(isinstance(piece, ImagePiece) for piece in pieces):
            return opening.cut(pieces)
        *earlier, last = self.messages
        others = [[*earlier, replace(last, text=text)] for text in ("0", "~")]
        return opening.cut(pieces, [self._composer.tokens(self._composer.first(other)) for other in others])

    def _open(self, before: list[Piece], report: Report) -> None:
        """Reads the part before the question, or continues from a saved opening."""
        name, model = "", ""
        if self._openings is not None and not self.in_cache:
            model = fingerprint(self.model.header)
            name = opening.key(self._about(model), self.plan, self.engine.tables(self.plan), before)
            if self._go_on(self._openings.get(name, self.plan), model, report):
                return
        self._take_in(before, report)
        if self._openings is not None and name:
            counts = report.tokens
            with suppress(OutOfMemoryError, UnsupportedError):
                tokens = Tokens(counts.prompt, counts.image, pruned=counts.pruned)
                self._openings.put(name, self.plan, replace(self.engine.sequence.snapshot(model), tokens=tokens))

    def _go_on(self, found: Snapshot | None, model: str, report: Report) -> bool:
        if found is None:
            return False
        try:
            report.time.prefill_s += _timed(lambda: self.engine.sequence.restore(found, model))
        except SessionFileError:
            return False
        report.tokens = replace(found.tokens, reused=found.tokens.prompt)
        report.rss.before_prefill_bytes = memory.rss_bytes()
        return True

    def _about(self, model: str) -> list[str]:
        encoder = fingerprint(self._vision.encoder.header) if self._vision is not None else ""
        return [libkvedge.version(), model, encoder, self.settings.storage.key, str(self.settings.bounded)]

    @contextmanager
    def _peak_of(self, report: Report) -> Iterator[None]:
        """Records the peak of resident memory inside the block, if the settings ask for it."""
        if not self.settings.measure_peak:
            yield
            return
        meter = memory.PeakMeter()
        meter.start()
        try:
            yield
        finally:
            rss = report.rss
            # the meter samples every 10 ms, and may have missed these values
            rss.peak_bytes = max(meter.stop(), rss.before_prefill_bytes, rss.after_compress_bytes)

    def _read_stream(self, report: Report) -> None:
        """Reads a stream piece by piece: encodes, reads and forgets an image before it requests the next image."""
        message, composer = self.messages[-1], self._composer
        written = composer.following(self.messages) if self.in_cache else composer.first(self.messages)
        source = stream.Source(self._vision, composer, written, lambda p: planned(p, self.plan, self.settings.threads))
        earlier = [p for m in self.messages[:-1] for p in m.pictures]
        parts: Iterable[tuple[str, Picture | None]] = [(written.text, None)]
        if self._vision is not None:
            parts = stream.segments(written.text, composer.marker, self._frames, earlier)
        before: list[Piece] = [TextPiece(self.pending)] if self.pending else []
        pieces = itertools.chain(before, source.pieces(parts))
        report.rss.before_prefill_bytes = memory.rss_bytes()
        try:
            with self._peak_of(report):
                report.time.prefill_s = _timed(lambda: self._read_on(pieces, report))
        finally:
            self.release(source.open)
        report.rss.after_compress_bytes = memory.rss_bytes()
        message.pictures = source.seen
        self.measure_stream(report)
        self.in_cache, self.pending = True, []

    def _read_on(self, pieces: Iterator[Piece], report: Report) -> None:
        first = stream.beginning(pieces)
        self.engine.make_room(first, self.plan)
        self.touched = True
        self.engine.pace.read(itertools.chain(first, pieces), self._progress, self.stop, report.tokens)

    def measure_stream(self, report: Report) -> None:
        """Updates the report's state of the stream. The first call, after the prompt, also sets the cache's figures."""
        if self.engine.cache is not None:
            kv, now = self.engine.pace.measure(self.plan)
            report.kv, report.stream = report.kv if report.stream else kv, now

    def check_drafts(self, plan: Plan) -> None:
        """Raises UsageError or UnsupportedError if answers cannot be drafted under the plan."""
        if not self.settings.drafts:
            return
        asked = "--exact" if self.settings.exact else "--lookup"
        check_policy(plan, asked)
        require_drafts(self.model, asked)

    def check_plan(self, plan: Plan) -> None:
        """Raises UsageError if the settings exclude the plan."""
        if self.settings.stream:
            native_plan.check_stream(plan)
        if self.settings.age:
            check_age(plan)

    def _pieces(self) -> list[Piece]:
        if not self.in_cache:
            return self.first_pieces(self.messages, self.plan)
        before: list[Piece] = [TextPiece(self.pending)] if self.pending else []
        new = self._composer.pieces(self._composer.following(self.messages), self.messages[-1].pictures)
        return before + planned(new, self.plan, self.settings.threads)

    def first_pieces(self, messages: list[Message], plan: Plan) -> list[Piece]:
        """Cuts messages into pieces as at the start of a conversation. Release the pieces after use."""
        pieces = self._composer.pieces(self._composer.first(messages), [p for m in messages for p in m.pictures])
        return planned(pieces, plan, self.settings.threads)


def _timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


class Answer(Single):
    """The answer of one turn. Iterate for pieces of text. `report` is complete after the iteration or after `close`.

    An answer that ends early stays in the conversation. If another thread closes or continues the session, the next
    piece raises StateError.
    """

    instead = "copy its `report` instead"

    def __init__(self, conversation: Conversation, report: Report, generation: Generation) -> None:
        """generation: fills the report; the answer closes it at the end."""
        self.report = report
        self._conversation, self._generation = conversation, generation
        self._done = False
        self._reader, self._taken = threading.get_ident(), False
        self._pieces = self._generate()

    def __repr__(self) -> str:
        state = self.report.finish if self._done else "not finished"
        return f"<Answer {self.report.text!r}, {state} | {self.report.line()}>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    @property
    def tokens(self) -> list[logprobs.Token]:
        """Returns the tokens so far if Sampling.logprobs is set, also tokens of a stop text."""
        return self.report.logprobs or []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._taken:
            raise StateError("this answer ended, because another thread continued the conversation; ask again")
        if self._done:
            raise StopIteration
        with self._conversation.guard:
            self._reader = threading.get_ident()
            try:
                return self._step()
            finally:
                if signals.pending():  # a signal during this step
                    self._finish()

    def _step(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration:
            self._finish()
            if self._conversation.guard.ending:
                raise StateError("the session was closed during the answer; open a new session") from None
            raise
        except GrammarError:  # happens between two tokens, so the cache is still valid
            self._finish()
            raise
        except BaseException:
            self._conversation.in_cache = False  # the decode was interrupted: read the conversation again
            self._finish()
            raise

    def read(self) -> str:
        """Generates the rest of the answer, and returns the whole text."""
        if self._taken or not self._done:
            with self._conversation.guard:
                for _ in self:
                    pass
        return self.report.text

    def close(self) -> None:
        """Ends the answer now. Raises StateError while another thread reads it: set the session's cancel instead."""
        if not self._done:
            with self._conversation.guard:
                self._finish()

    def give_way(self) -> None:
        """Ends this answer because the session continues, perhaps in another thread than the reader's."""
        self._taken = not self._done and self._reader != threading.get_ident()
        self._finish()

    def drop(self) -> None:
        """Frees the sampler of a closed session."""
        self._generation.close()

    def _generate(self) -> Generator[str, None, None]:
        conversation, generation, spent = self._conversation, self._generation, self.report.time
        engine = conversation.engine
        text = generation.choose(engine.context, engine.room)
        while True:
            conversation.pending = generation.pending
            if text:
                yield text
            how = generation.ended
            if how not in ("end", "stop") and conversation.stop.is_set():
                how = "cancelled"
            if how:
                break
            started = time.perf_counter()
            chosen, conversation.pending = generation.chosen, []
            text = engine.go_on(generation)
            spent.decode_s += time.perf_counter() - started
            spent.decode_steps += generation.chosen - chosen
        if text := generation.end(how):
            yield text

    def _finish(self) -> None:
        if self._done:
            return
        self._done = True
        self._pieces.close()
        report, conversation = self.report, self._conversation
        self._generation.end("cancelled", broken_off=True)
        engine = conversation.engine
        engine.measure_again(report.kv)
        report.notes += [note for note in engine.notes() if note not in report.notes]
        if report.stream is not None:
            conversation.measure_stream(report)
        conversation.messages.append(Message("assistant", report.text))
        conversation.last_report = report
        conversation.answer = None
