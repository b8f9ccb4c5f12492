"""An Answer is the generated text of one turn, piece by piece, and what it cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator

from pykvedge.chat.conversation import Conversation
from pykvedge.errors import StateError
from pykvedge.models.model import TextStream
from pykvedge.models.prompt import Message
from pykvedge.runtime.report import Report
from pykvedge.runtime.sampling import Sampler, Sampling


class Answer:
    """Iterate for pieces of text. `report` is complete when the iteration has ended or `close` was called.

    An answer that is broken off stays in the conversation as far as it went. Where another thread closed the session or
    went on with it meanwhile, the next piece is a StateError.
    """

    def __init__(self, conversation: Conversation, report: Report, sampling: Sampling) -> None:
        self.report = report
        self._conversation, self._sampling = conversation, sampling
        self._done = False
        self._reader, self._taken = threading.get_ident(), False
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._taken:
            raise StateError("another thread went on with the conversation, which ended this answer")
        if self._done:
            raise StopIteration
        with self._conversation.guard:
            self._reader = threading.get_ident()
            return self._step()

    def _step(self) -> str:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._finish()
            if self._conversation.guard.ending:
                raise StateError("the session was closed while it answered") from None
            raise
        except BaseException:
            self._conversation.in_cache = False  # a decode that was broken off: read the conversation again
            self._finish()
            raise
        self.report.text += piece
        return piece

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
        """Does the same because the session goes on, maybe in another thread than the one that reads."""
        self._taken = not self._done and self._reader != threading.get_ident()
        self._finish()

    def _generate(self) -> Generator[str, None, None]:
        conversation, time_, tokens = self._conversation, self.report.time, self.report.tokens
        model, engine = conversation.model, conversation.engine
        context = engine.context
        stream = TextStream(model)
        with Sampler(self._sampling) as sampler:
            token = sampler.sample(context.handle)
            while not model.is_end(token):
                tokens.generated += 1
                conversation.pending = [token]
                if text := self._begun(stream.feed(token)):
                    yield text
                if self._must_stop(context.room):
                    break
                started = time.perf_counter()
                engine.extend(token)
                conversation.pending = []
                token = sampler.sample(context.handle)
                time_.decode_s += time.perf_counter() - started
                time_.decode_steps += 1
            else:
                self.report.finish = "end"
        if text := self._begun(stream.finish()):
            yield text

    def _begun(self, text: str) -> str:
        # tokenizers put a blank before the first word of a text
        return text if self.report.text else text.removeprefix(" ")

    def _must_stop(self, room: int) -> bool:
        if self._conversation.stop.is_set():
            self.report.finish = "cancelled"
        elif self.report.tokens.generated >= self._sampling.max_tokens:
            self.report.finish = "length"
        elif room < 1:
            self.report.finish = "context"
        return bool(self.report.finish)

    def _finish(self) -> None:
        if self._done:
            return
        self._done = True
        self._pieces.close()
        report, conversation = self.report, self._conversation
        report.finish = report.finish or "cancelled"
        report.kv.peak_bytes = conversation.engine.peak_bytes(report.kv.peak_bytes)
        if report.stream is not None:
            conversation.measure_stream(report)
        conversation.messages.append(Message("assistant", report.text))
        conversation.last_report = report
