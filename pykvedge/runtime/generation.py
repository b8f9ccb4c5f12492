"""Makes an answer from tokens: the text up to a stop text, the report, and the reason of its end."""

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
    """Returns the length of the longest end of `text` that is the beginning of a mark."""
    most = min(max(map(len, marks), default=0) - 1, len(text))
    return next((n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class StopTexts:
    """Searches text, fed piece by piece, for the first stop text. Only text before the stop text comes out.

    pending_text: text held back, the possible beginning of a stop text. stop_text: the found stop text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.pending_text = ""
        self.found, self.stop_text = False, ""

    def feed(self, piece: str) -> str:
        """Returns the text that certainly belongs to the answer, possibly empty. Sets `found` at a stop text."""
        text = self.pending_text + piece
        found = [(at + len(stop), at) for stop in self._texts if (at := text.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self.found, self.pending_text, self.stop_text = True, "", text[at:end]
            return text[:at]  # the stop text that ends first counts, so the size of pieces does not matter
        keep = mark_begun(text, self._texts)
        self.pending_text = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns the text held back, at an answer's end without a stop text."""
        rest, self.pending_text = self.pending_text, ""
        return rest


class Generation:
    """Chooses the tokens of one answer, and fills its report: text, logprobs, token count, reason of the end.

    token: the last chosen token; if the answer goes on, this token is read next. tokens: all tokens of the answer.
    chosen: number of chosen tokens, with the end token. ended: reason of the end, or empty. pending: tokens not yet
    read; the next message begins with them. stops: searches for stop texts.
    """

    def __init__(
        self, model: Model, sampling: Sampling, report: Report, begun: bool = False, shown: frozenset[int] = frozenset()
    ) -> None:
        """Raises GrammarError, and UsageError for biases that do not fit the model; close the generation in the end.

        begun: the answer continues a text, so a leading blank belongs to it. shown: special tokens whose text is shown.
        """
        self.token, self.ended, self.chosen = 0, "", 0
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self._model, self._sampling, self.report, self._shown = model, sampling, report, shown
        self._sampler = Sampler(sampling, model)
        self._stream, self.stops = TextStream(model, shown), StopTexts(sampling.stop)
        self._bare = not sampling.constrained and not begun
        self._length = self._out = 0  # characters generated so far, and characters not held back
        report.logprobs = None if sampling.logprobs is None else []

    def close(self) -> None:
        """Frees the sampler. A second call does nothing."""
        self._sampler.close()

    def choose(self, context: Context, room: int, output: int = -1, logits: np.ndarray | None = None) -> str:
        """Chooses the next token, and returns the text that became certain.

        logits: [n_vocab] float32; None: the logits at place `output` of the last batch. room: tokens that can be read,
        including the chosen token. Raises GrammarError if no token can follow.
        """
        if logits is not None:
            return self._take(self._sampler.sample_from(logits), room, logits)
        token = self._sampler.sample(context.handle, output)
        return self._take(token, room, context.logits(output) if self.report.logprobs is not None else None)

    def choose_each(self, context: Context, batch: list[int], room: int) -> tuple[str, int]:
        """Chooses tokens by the logits of a batch: the last chosen token, and guesses behind it.

        Stops where the chosen token differs from the batch, or where the answer ends. room: tokens that can be read
        behind the batch's first token. Returns the text that became certain, and the number of the batch's tokens that
        stay read. Raises GrammarError if no token can follow the first token.
        """
        text, stay, drafts = "", 0, self.report.drafts
        while not self.ended and stay < len(batch) and (not stay or self.token == batch[stay]):
            try:
                text += self.choose(context, room - stay, stay)
            except GrammarError:
                if not stay:
                    raise
                break  # the next step reads the last token alone, and raises the error
            stay += 1
        if drafts is not None:
            drafts.add(len(batch) - 1, stay - 1)
        return text, stay

    def sampler(self) -> Sampler:
        """Returns a copy of the sampler, for guesses. The caller closes the copy."""
        return self._sampler.copy()

    @property
    def left(self) -> int:
        """Returns how many tokens the answer may still have."""
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
        """Completes the report at the end of the answer, and returns the rest of the text. A second call does nothing.

        how: the reason of the end. broken_off: drops an incomplete last character.
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
        """Returns the tokens to read for the last token's text before the stop text.

        Earlier tokens stay in the cache, even if they begin the stop text.
        """
        model = self._model
        tokens = model.tokenize(text, special=False) if text else []
        data = b"".join(map(model.piece, tokens))
        # returns the whole last token if a tokenizer added a blank, or if an earlier token began the character
        same = data == text.encode() and b"".join(map(model.piece, self.pending)).startswith(data)
        return tokens if same else self.pending
