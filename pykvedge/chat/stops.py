"""Texts that end an answer are found in it while it is generated, also where several pieces make one of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Text goes in piece by piece; what comes out is before the first stop text. `held`: what may begin one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._longest = max(map(len, texts), default=0)
        self.held = ""
        self.found, self.which = False, ""

    def feed(self, piece: str) -> str:
        """Returns the text that is certain to belong to the answer, possibly none. Sets `found` at a stop text."""
        text = self.held + piece
        found = [(at + len(stop), at) for stop in self._texts if (at := text.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self.found, self.held, self.which = True, "", text[at:end]
            return text[:at]  # of the one that is complete first, so that it does not matter how text comes
        keep = self._begun(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns what was held back: the answer has ended otherwise."""
        rest, self.held = self.held, ""
        return rest

    def _begun(self, text: str) -> int:
        """Counts the characters at the end of a text that are the beginning of a stop text, as many as can be."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._texts):
                return n
        return 0
