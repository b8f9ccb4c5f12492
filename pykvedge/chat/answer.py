"""An Answer is the generated text of one turn, piece by piece, and what it cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator

from pykvedge.chat.conversation import Conversation
from pykvedge.chat.writing import Writing
from pykvedge.errors import GrammarError, StateError
from pykvedge.models.prompt import Message
from pykvedge.runtime import logprobs
from pykvedge.runtime.report import Report
from pykvedge.runtime.sampler import Sampler
from pykvedge.runtime.sampling import Sampling
from pykvedge.system import signals
from pykvedge.system.guard import Single


class Answer(Single):
    """Iterate for pieces of text. `report` is complete when the iteration has ended or `close` was called.

    An answer that is broken off stays in the conversation as far as it went. Where another thread closed the session or
    went on with it meanwhile, the next piece is a StateError.
    """

    instead = "its `report` can"

    def __init__(self, conversation: Conversation, report: Report, sampling: Sampling, sampler: Sampler) -> None:
        """sampler: chooses the tokens, and is closed at the end."""
        self.report = report
        self._conversation, self._sampling, self._sampler = conversation, sampling, sampler
        report.logprobs = None if sampling.logprobs is None else []
        self._writing = Writing(conversation.model, sampling)
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
            piece = next(self._pieces)
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

    def drop(self) -> None:
        """Frees what chooses the tokens: the session is closed, and nothing goes on."""
        self._sampler.close()

    def _generate(self) -> Generator[str, None, None]:
        conversation, time_, tokens = self._conversation, self.report.time, self.report.tokens
        model, engine = conversation.model, conversation.engine
        context = engine.context
        writing = self._writing
        token = self._sample()
        while not model.is_end(token):
            tokens.generated += 1
            text, conversation.pending = writing.feed(token), writing.pending
            if writing.stopped:
                self.report.finish = "stop"
            if text:
                yield text
            if self._must_stop(context.room):
                break
            started = time.perf_counter()
            engine.extend(token)
            conversation.pending = []
            token = self._sample()
            time_.decode_s += time.perf_counter() - started
            time_.decode_steps += 1
        else:
            self.report.finish = "end"
        text = writing.finish()
        if writing.stopped:
            self.report.finish = "stop"
        if text:
            yield text

    def _sample(self) -> int:
        """Chooses the next token, and notes how likely it was."""
        conversation, noted = self._conversation, self.report.logprobs
        context, model = conversation.engine.context, conversation.model
        token = self._sampler.sample(context.handle)
        if noted is not None and not model.is_end(token):
            noted.append(logprobs.token(token, context.logits(), self._sampling.logprobs or 0, model.piece))
        return token

    def _must_stop(self, room: int) -> bool:
        if self.report.finish:
            return True
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
        self._sampler.close()
        report, conversation = self.report, self._conversation
        report.finish = report.finish or "cancelled"
        report.text += self._writing.held_back()  # of an answer that was closed
        report.kv.peak_bytes = conversation.engine.peak_bytes(report.kv.peak_bytes)
        if report.stream is not None:
            conversation.measure_stream(report)
        conversation.messages.append(Message("assistant", report.text))
        conversation.last_report = report
        conversation.answer = None
