"""What save_state of an attached llama_cpp.Llama returns, and its load_state and caches take."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykvedge.chat.attached_pass import AttachedPass
from pykvedge.chat.reuse import History
from pykvedge.errors import StateError, UnsupportedError
from pykvedge.library import libkvedge
from pykvedge.models.gguf import read_header
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime.sessionfile import fingerprint


def recipe(plan: Plan, kv_type: KvType, given: Mapping[str, ProfileTable]) -> str:
    """Names all that decides which rows are kept of the same tokens, and how they are stored."""
    profiles = [f"{name} {zlib.crc32(given[name].values.tobytes())}" for name in sorted(given)]
    return " ".join([kv_type.k, kv_type.v, kv_type.rotate, *profiles, plan.to_json()])


@dataclass(frozen=True, eq=False)
class AttachedState:
    """It stands for a llama_cpp.LlamaState, as which caches keep it, in memory or as a pickle.

    Only an attached model can load it: `scores`, which load_state of llama_cpp asks for first, raises StateError.
    """

    input_ids: np.ndarray  # [n_tokens] int32
    logits: np.ndarray  # [n_tokens, n_vocab] float32; [0, n_vocab] unless the model has logits_all
    seed: int
    llama_state: bytes  # the packed sequence; empty: there is nothing but the history
    model: str  # its fingerprint
    recipe: str
    history: History
    end: int  # position behind what was read
    answer: list[int]  # tokens that were read since the last compression

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def llama_state_size(self) -> int:
        """Counts the bytes that it takes; caches are bounded by it."""
        return len(self.llama_state) + self.input_ids.nbytes + self.logits.nbytes

    @property
    def scores(self) -> np.ndarray:
        raise StateError(
            "this state was saved while kvedge was attached to the model; attach again to load it, or set a new cache"
        )


class States:
    """Takes what an attached model has read, and gives it back."""

    def __init__(self, llm: Any, cache: libkvedge.Cache, again: AttachedPass) -> None:
        self._llm, self._cache, self._again = llm, cache, again

    @functools.cached_property
    def _model(self) -> str:
        return fingerprint(read_header(self._llm.model_path))

    def take(self, by: str, history: History) -> AttachedState:
        """Raises StateError where some of a prompt with pictures is not compressed yet, or tokens were refused."""
        llm, n = self._llm, self._llm.n_tokens
        if history.failed:
            raise StateError("tokens were refused half-way, and what was read is not whole; ask again, and save then")
        scores = llm.scores[: n if getattr(llm, "_logits_all", False) else 0]
        history = history.copy() if n > 0 else History()
        rows = self._pack(history) if n > 0 else b""
        end, answer = self._again.place() if n > 0 else (0, [])
        return AttachedState(
            llm.input_ids[:n].copy(), scores.copy(), llm._seed, rows, self._model, by, history, end, answer
        )

    def _pack(self, history: History) -> bytes:
        """Returns no bytes for what can be read again instead."""
        known = history.knows(self._llm.n_tokens)
        if known and self._again.waits:
            return b""
        try:
            return bytes(libkvedge.pack(self._cache, self._model, whole=self._cache.keeps))
        except (StateError, UnsupportedError):
            if not known:
                raise
            return b""

    def check(self, state: Any, by: str) -> bool:
        """Tells whether the rows of a state can be used as they are, or its tokens are to be read again.

        Raises StateError for a state that is not of this model, or of neither use.
        """
        if not isinstance(state, AttachedState):
            raise StateError(
                "this state was saved while kvedge was not attached to the model, and holds no rows of kvedge's; load "
                "it after detach, or set a new cache"
            )
        if state.model != self._model:
            raise StateError("this state was saved with another model")
        if state.n_tokens > len(self._llm.input_ids):
            raise StateError(f"this state has {state.n_tokens} tokens, and n_ctx is {len(self._llm.input_ids)}")
        same = state.recipe == by and bool(state.llama_state)
        if not same and not state.history.knows(state.n_tokens):
            raise StateError(
                "this state was saved with another method, budget or type of keys and values, and holds pictures or "
                "other tokens that cannot be read again; attach as it was then"
            )
        return same

    def give(self, state: AttachedState) -> None:
        """Puts its rows into the empty cache. Raises SessionFileError, OutOfMemoryError."""
        libkvedge.unpack(self._cache, state.llama_state, state.model)
        self._again.go_on(state.end, state.answer)

    def enter(self, state: AttachedState) -> None:
        """Sets what llama_cpp itself remembers, as its own load_state does."""
        llm, n = self._llm, state.n_tokens
        llm.input_ids[:n], llm.n_tokens = state.input_ids, n
        if n_logits := len(state.logits):
            llm.scores[:n_logits], llm.scores[n_logits:] = state.logits, 0.0
        llm._seed, llm._requires_eval = state.seed, True
