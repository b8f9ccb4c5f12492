"""The state that save_state of an attached llama_cpp.Llama returns, for load_state and for llama_cpp's caches."""

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
    """Returns a text that is equal if plan, profiles and storage are equal: the same tokens then give the same rows."""
    profiles = [f"{name} {zlib.crc32(given[name].values.tobytes())}" for name in sorted(given)]
    return " ".join([kv_type.k, kv_type.v, kv_type.rotate, *profiles, plan.to_json()])


@dataclass(frozen=True, eq=False)
class AttachedState:
    """Replaces a llama_cpp.LlamaState, also in caches and as a pickle.

    Only an attached model can load the state: llama_cpp's own load_state reads `scores` first, which raises StateError.
    """

    input_ids: np.ndarray  # [n_tokens] int32
    logits: np.ndarray  # [n_tokens, n_vocab] float32; [0, n_vocab] unless the model has logits_all
    seed: int
    llama_state: bytes  # packed sequence; empty: only the history is saved
    model: str  # fingerprint of the model file
    recipe: str
    history: History
    end: int  # position behind the read tokens
    answer: list[int]  # tokens read since the last compression

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def llama_state_size(self) -> int:
        """Returns the bytes of the state; caches limit these."""
        return len(self.llama_state) + self.input_ids.nbytes + self.logits.nbytes

    @property
    def scores(self) -> np.ndarray:
        raise StateError(
            "this state was saved while kvedge was attached to the model; attach kvedge again to load the state, or "
            "set a new cache"
        )


class States:
    """Saves and restores the state of an attached model."""

    def __init__(self, llm: Any, cache: libkvedge.Cache, second_pass: AttachedPass) -> None:
        self._llm, self._cache, self._second_pass = llm, cache, second_pass

    @functools.cached_property
    def _model(self) -> str:
        return fingerprint(read_header(self._llm.model_path))

    def take(self, by: str, history: History) -> AttachedState:
        """Returns the state. Raises StateError for an uncompressed prompt with pictures, or after refused tokens."""
        llm, n = self._llm, self._llm.n_tokens
        if history.failed:
            raise StateError(
                "the state is incomplete, because reading the last tokens failed; send the request "
                "again, then save the state"
            )
        scores = llm.scores[: n if getattr(llm, "_logits_all", False) else 0]
        history = history.copy() if n > 0 else History()
        rows = self._pack(history) if n > 0 else b""
        end, answer = self._second_pass.place() if n > 0 else (0, [])
        return AttachedState(
            llm.input_ids[:n].copy(), scores.copy(), llm._seed, rows, self._model, by, history, end, answer
        )

    def _pack(self, history: History) -> bytes:
        """Returns the packed rows, or no bytes if the history can be read again instead."""
        known = history.knows(self._llm.n_tokens)
        if known and self._second_pass.waits:
            return b""
        try:
            return bytes(libkvedge.pack(self._cache, self._model, whole=self._cache.keeps))
        except (StateError, UnsupportedError):
            if not known:
                raise
            return b""

    def check(self, state: Any, by: str) -> bool:
        """Returns True if the rows of a state are usable, False if its tokens must be read again.

        Raises StateError for a state of another model, or if neither is possible.
        """
        if not isinstance(state, AttachedState):
            raise StateError(
                "this state was saved while kvedge was not attached to the model, so it has no KV rows of kvedge; "
                "load the state after detach, or set a new cache"
            )
        if state.model != self._model:
            raise StateError("this state was saved with another model; load the state into the model that saved it")
        if state.n_tokens > len(self._llm.input_ids):
            raise StateError(
                f"this state has {state.n_tokens} tokens, more than n_ctx {len(self._llm.input_ids)}; "
                f"make the model with a larger n_ctx"
            )
        same = state.recipe == by and bool(state.llama_state)
        if not same and not state.history.knows(state.n_tokens):
            raise StateError(
                "this state was saved with another method, budget or KV type, and has pictures or other tokens that "
                "cannot be read again; attach kvedge with the settings of the saved state"
            )
        return same

    def give(self, state: AttachedState) -> None:
        """Puts a state's rows into the empty cache. Raises SessionFileError, OutOfMemoryError."""
        libkvedge.unpack(self._cache, state.llama_state, state.model)
        self._second_pass.go_on(state.end, state.answer)

    def enter(self, state: AttachedState) -> None:
        """Restores llama_cpp's own variables, as its load_state does."""
        llm, n = self._llm, state.n_tokens
        llm.input_ids[:n], llm.n_tokens = state.input_ids, n
        if n_logits := len(state.logits):
            llm.scores[:n_logits], llm.scores[n_logits:] = state.logits, 0.0
        llm._seed, llm._requires_eval = state.seed, True
