"""A Grammar says which tokens an answer may go on with. llama.cpp follows it, in a child process.

In this one it would not do: llama.cpp ends the process where a grammar allows nothing more, recurses as deep as a
grammar is nested, and a short grammar can have it try more ways than there is memory for.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import numpy as np

from pykvedge.errors import GrammarError
from pykvedge.models.child import Child, can_start
from pykvedge.models.model import Model
from pykvedge.runtime.sampling import Sampling

LOADING, PATIENCE = 60.0, 8.0  # seconds for the vocabulary, and for each other step
_MEMORY = 2 << 30  # bytes
_WORKER = Path(__file__).with_name("grammar_worker.py")


class Grammar:
    """Follows one answer. Close it when done."""

    def __init__(self, sampling: Sampling, model: Model) -> None:
        """Raises GrammarError for a grammar or a schema that cannot be used."""
        self._what = "JSON schema" if sampling.grammar is None else "grammar"
        if not can_start():
            raise GrammarError("a grammar needs a Python to run beside this program, and there is none")
        try:
            self._child = Child(str(_WORKER.resolve()), _MEMORY)
        except OSError as error:
            raise GrammarError(f"the process for a grammar cannot be started: {error.strerror or error}") from None
        try:
            self._n_vocab = self._ask({"model": os.fspath(model.location)}, LOADING)["n_vocab"]
            source = {"schema": sampling.json_schema} if sampling.grammar is None else {"grammar": sampling.grammar}
            self._ask(source)
        except BaseException:
            self.close()
            raise

    def take(self, token: int) -> np.ndarray | None:
        """Goes on with a token. Where it cannot come next, nothing changes, and [n_vocab] bool tells what can.

        Raises GrammarError where that takes too long or too much memory.
        """
        answer = self._ask({"take": token})
        if "allowed" not in answer:
            return None
        bits = np.frombuffer(base64.b64decode(answer["allowed"]), np.uint8)
        return np.unpackbits(bits, count=self._n_vocab).astype(bool)

    def dead_end(self) -> GrammarError:
        """Makes the error for an answer that can neither go on nor end."""
        return GrammarError(f"the {self._what} allows nothing here that the model has a token for")

    def close(self) -> None:
        """Ends the child. Does nothing the second time."""
        self._child.close()

    def _ask(self, request: dict[str, Any], patience: float | None = None) -> dict[str, Any]:
        longest = 1 << 26
        answer, why = self._child.ask(request, PATIENCE if patience is None else patience, longest)
        if answer is None:
            raise GrammarError(f"the {self._what} cannot be followed: {why}")
        if "error" in answer:
            raise GrammarError(f"the {self._what} cannot be used: {answer['error']}")
        return answer
