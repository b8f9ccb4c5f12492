"""An Answer is the generated text of one turn, piece by piece, and what it cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator

from pykvedge.chat.conversation import Conversation
from pykvedge.errors import GrammarError, StateError
from pykvedge.models.prompt import Message
from pykvedge.runtime import logprobs
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.report import Report
from pykvedge.system import signals
from pykvedge.system.guard import Single


class Answer(Single):
    """Iterate for pieces of text. `report` is complete when the iteration has ended or `close` was called.

    An answer that is broken off stays in the conversation as far as it went. Where another thread closed the session or
    went on with it meanwhile, the next piece is a StateError.
    """

    instead = "its `report` can"

    def __init__(self, conversation: Conversation, report: Report, generation: Generation) -> None:
        """generation: fills the report, and is closed at the end."""
        self.report = report
        self._conversation, self._generation = conversation, generation
        self._done = False
        self._reader, self._taken = threading.get_ident(), False
        self._pieces = self._generate()

    @property
    def tokens(self) -> list[logprobs.Token]:
        """The tokens so far, where Sampling.logprobs asks for them; also those that make up a stop text."""
        return self.report.logprobs or []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._taken:
            raise StateError("another thread went on with the conversation, which ended this answer")
        if self._done:
            raise StopIteration
        with self._conversation.guard:
            self._reader = threading.get_ident()
            try:
                return self._step()
            finally:
                if signals.pending():  # behind this step
                    self._finish()

    def _step(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration:
            self._finish()
            if self._conversation.guard.ending:
                raise StateError("the session was closed while it answered") from None
            raise
        except GrammarError:  # between two tokens: what was read is what was said
            self._finish()
            raise
        except BaseException:
            self._conversation.in_cache = False  # a decode that was broken off: read the conversation again
            self._finish()
            raise

    def read(self) -> str:
        """Generates to the end and returns the whole text."""
        if self._taken or not self._done:
            with self._conversation.guard:
                for _ in self:
                    pass
        return self.report.text

    def close(self) -> None:
        """Ends the answer where it is. Raises StateError while another thread reads it: set the session's cancel."""
        if not self._done:
            with self._conversation.guard:
                self._finish()

    def give_way(self) -> None:
        """Ends this answer so that the session can go on, maybe in another thread than the one that reads."""
        self._taken = not self._done and self._reader != threading.get_ident()
        self._finish()

    def drop(self) -> None:
        """Frees what chooses the tokens: the session is closed, and nothing goes on."""
        self._generation.close()

    def _generate(self) -> Generator[str, None, None]:
        conversation, generation, spent = self._conversation, self._generation, self.report.time
        engine = conversation.engine
        context = engine.context
        text = generation.choose(context, context.room)
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
            engine.extend(generation.token)
            conversation.pending = []
            text = generation.choose(context, context.room)
            spent.decode_s += time.perf_counter() - started
            spent.decode_steps += 1
        if text := generation.end(how):
            yield text

    def _finish(self) -> None:
        if self._done:
            return
        self._done = True
        self._pieces.close()
        report, conversation = self.report, self._conversation
        self._generation.end("cancelled", broken_off=True)
        report.kv.peak_bytes = conversation.engine.peak_bytes(report.kv.peak_bytes)
        if report.stream is not None:
            conversation.measure_stream(report)
        conversation.messages.append(Message("assistant", report.text))
        conversation.last_report = report
        conversation.answer = None
