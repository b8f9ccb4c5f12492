"""A Writing makes the text of an answer of its tokens, up to a stop text."""

from __future__ import annotations

from pykvedge.chat.stops import StopTexts
from pykvedge.models.model import Model, TextStream
from pykvedge.runtime.sampling import Sampling


class Writing:
    """Tokens go in one by one, and the text comes out that is certain to belong to the answer."""

    def __init__(
        self, model: Model, sampling: Sampling, begun: bool = False, shown: frozenset[int] = frozenset()
    ) -> None:
        """begun: the answer goes on with text, so that a blank it begins with is its own. shown: special tokens whose
        text is the answer's.
        """
        self._model, self.shown = model, shown
        self._stream, self._stops = TextStream(model, shown), StopTexts(sampling.stop)
        self._bare = not sampling.constrained and not begun
        self._length = self._out = 0  # characters that were generated, and that were not held back
        self.pending: list[int] = []  # what is to be read of the last token, where the conversation goes on

    @property
    def stopped(self) -> bool:
        """Tells whether a stop text was found: nothing comes after it."""
        return self._stops.found

    @property
    def stop_text(self) -> str:
        """The stop text that was found."""
        return self._stops.which

    def feed(self, token: int) -> str:
        """Returns the text that is certain with this token, possibly none."""
        self.pending = [token]
        return self._shown(self._stream.feed(token))

    def finish(self) -> str:
        """Returns what was held back: the answer has ended."""
        return "" if self.stopped else self._shown(self._stream.finish()) + self._stops.finish()

    def held_back(self) -> str:
        """Returns what was held back as a possible stop text, of an answer that is closed."""
        return self._stops.finish()

    def _shown(self, text: str) -> str:
        if not self._length and self._bare:
            text = text.removeprefix(" ")  # tokenizers put a blank before the first word of a text
        before, self._length = self._length, self._length + len(text)
        shown = self._stops.feed(text)
        self._out += len(shown)
        if self._stops.found:
            self.pending = self._before_stop(text[: max(self._out - before, 0)])
        return shown

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
