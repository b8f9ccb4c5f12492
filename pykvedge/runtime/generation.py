"""A Generation makes an answer of tokens: its text up to a stop text, its report, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvedge.errors import GrammarError
from pykvedge.models.model import Model, TextStream
from pykvedge.runtime import logprobs
from pykvedge.runtime.llama_context import Context
from pykvedge.runtime.report import Report
from pykvedge.runtime.sampler import Sampler
from pykvedge.runtime.sampling import Sampling


def mark_begun(text: str, marks: Sequence[str]) -> int:
    """Counts the characters at the end of a text that are the beginning of one of these marks, as many as can be."""
    most = min(max(map(len, marks), default=0) - 1, len(text))
    return next((n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class StopTexts:
    """Text goes in piece by piece; what comes out is before the first stop text.

    held: what may begin one. which: the one that was found.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.held = ""
        self.found, self.which = False, ""

    def feed(self, piece: str) -> str:
        """Returns the text that is certain to belong to the answer, possibly none. Sets `found` at a stop text."""
        text = self.held + piece
        found = [(at + len(stop), at) for stop in self._texts if (at := text.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self.found, self.held, self.which = True, "", text[at:end]
            return text[:at]  # the one that is complete first counts, so that it does not matter how text comes
        keep = mark_begun(text, self._texts)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns what was held back: the answer has ended otherwise."""
        rest, self.held = self.held, ""
        return rest


class Generation:
    """Chooses the tokens of one answer, and fills its report: text, logprobs, the count of tokens and the finish.

    token: the one that was chosen last, which is read next if the answer goes on. tokens: all of the answer. chosen: so
    many, with the one that ends it. ended: how it ends, once a token decides that. pending: tokens that the next
    message begins with, as they were not read. stops: know which stop text was found.
    """

    def __init__(
        self, model: Model, sampling: Sampling, report: Report, begun: bool = False, shown: frozenset[int] = frozenset()
    ) -> None:
        """Raises GrammarError, and UsageError for biases that do not fit the model; close it in the end.

        begun: the answer goes on with text, so that a blank it begins with is its own. shown: special tokens whose text
        is the answer's.
        """
        self.token, self.ended, self.chosen = 0, "", 0
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self._model, self._sampling, self.report, self._shown = model, sampling, report, shown
        self._sampler = Sampler(sampling, model)
        self._stream, self.stops = TextStream(model, shown), StopTexts(sampling.stop)
        self._bare = not sampling.constrained and not begun
        self._length = self._out = 0  # characters that were generated, and that were not held back
        report.logprobs = None if sampling.logprobs is None else []

    def close(self) -> None:
        """Frees what chooses the tokens. Does nothing the second time."""
        self._sampler.close()

    def choose(self, context: Context, room: int, output: int = -1, logits: np.ndarray | None = None) -> str:
        """Chooses the next token, and returns the text that is certain with it.

        It goes by logits [n_vocab] float32, or by those of a place in the last batch. room: tokens that can be read,
        from this one on. Raises GrammarError where no token can come.
        """
        if logits is not None:
            return self._take(self._sampler.sample_from(logits), room, logits)
        token = self._sampler.sample(context.handle, output)
        return self._take(token, room, context.logits(output) if self.report.logprobs is not None else None)

    def choose_each(self, context: Context, batch: list[int], room: int) -> tuple[str, int]:
        """Chooses token after token by the logits of a batch: the token that was chosen last, and guesses behind it.

        It ends where the batch does not go on with the token that was chosen, or where the answer ends. room: tokens
        that can be read behind the first one of the batch. Returns the text that is certain, and how many tokens of the
        batch were read for good. Raises GrammarError where no token can follow the first one.
        """
        text, stay, drafts = "", 0, self.report.drafts
        while not self.ended and stay < len(batch) and (not stay or self.token == batch[stay]):
            try:
                text += self.choose(context, room - stay, stay)
            except GrammarError:
                if not stay:
                    raise
                break  # the last token is read again, alone, and fails then
            stay += 1
        if drafts is not None:
            drafts.add(len(batch) - 1, stay - 1)
        return text, stay

    def sampler(self) -> Sampler:
        """Returns a copy of what chooses the next token, to guess with; close it."""
        return self._sampler.copy()

    @property
    def left(self) -> int:
        """The answer may have so many more tokens."""
        return self._sampling.max_tokens - self.report.tokens.generated

    def _take(self, token: int, room: int, logits: np.ndarray | None) -> str:
        report, text = self.report, ""
        self.token = token
        self.chosen += 1
        if self._model.is_end(token):
            self.ended, self.pending = "end", []
            if token in self._shown:
                text = self._certain(self._stream.feed(token))
        else:
            report.tokens.generated += 1
            self.tokens.append(token)
            if report.logprobs is not None and logits is not None:
                n = self._sampling.logprobs or 0
                report.logprobs.append(logprobs.token(token, logits, n, self._model.piece))
            self.pending = [token]
            text = self._certain(self._stream.feed(token))
            if self.stops.found:
                self.ended = "stop"
            elif report.tokens.generated >= self._sampling.max_tokens:
                self.ended = "length"
            elif room < 1:
                self.ended = "context"
        report.text += text
        return text

    def end(self, how: str, broken_off: bool = False) -> str:
        """Completes the report of an answer that ends in this way. Returns the rest of the text.

        broken_off: a character that is not whole is left out. Does nothing the second time.
        """
        report, stops, rest = self.report, self.stops, ""
        self.close()
        if report.finish:
            return rest
        if broken_off:
            rest = stops.finish()
        elif not stops.found:
            rest = self._certain(self._stream.finish()) + stops.finish()
        report.text += rest
        report.finish = "stop" if stops.found else how
        return rest

    def _certain(self, text: str) -> str:
        if not self._length and self._bare:
            text = text.removeprefix(" ")  # tokenizers put a blank before the first word of a text
        before, self._length = self._length, self._length + len(text)
        certain = self.stops.feed(text)
        self._out += len(certain)
        if self.stops.found and self.pending:
            self.pending = self._before_stop(text[: max(self._out - before, 0)])
        return certain

    def _before_stop(self, text: str) -> list[int]:
        """Chooses what is read of the last token, which has this much text before the stop text.

        What was read before stays in the cache, though it may be the beginning of the stop text.
        """
        model = self._model
        tokens = model.tokenize(text, special=False) if text else []
        data = b"".join(map(model.piece, tokens))
        # tokenizers may add a blank, and the token before may have begun the character: then it is read as it is
        same = data == text.encode() and b"".join(map(model.piece, self.pending)).startswith(data)
        return tokens if same else self.pending
