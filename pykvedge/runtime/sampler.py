"""Chooses tokens by the settings of a Sampling, with a chain of llama.cpp's samplers."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np

from pykvedge.errors import UsageError
from pykvedge.models.model import Model
from pykvedge.runtime.grammar import Grammar
from pykvedge.runtime.sampling import Sampling
from pykvedge.system import dropped
from pykvedge.system.guard import Closing


class Sampler(Closing):
    """Chooses the tokens of one answer. Close the sampler, or use a with statement."""

    def __init__(self, sampling: Sampling, model: Model) -> None:
        """Raises GrammarError, and UsageError for a logit_bias that does not fit the model."""
        llama = self._llama = model.llama
        self._model, biases = model, _biases(sampling, model)
        self._forbidden = [token for token, bias in biases.items() if bias == -math.inf]
        self._grammar = Grammar(sampling, model) if sampling.constrained else None
        self._own(llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params()))
        for link in [*_changes(sampling, model, biases), *_choice(llama, sampling)]:
            llama.llama_sampler_chain_add(self._chain, link)

    def copy(self) -> Sampler:
        """Returns a copy in the same state, with the same random numbers. The caller closes the copy."""
        other = Sampler.__new__(Sampler)
        vars(other).update(vars(self))
        other._grammar = self._grammar.copy() if self._grammar is not None else None
        other._own(self._llama.llama_sampler_clone(self._chain))
        return other

    def _own(self, chain: Any) -> None:
        self._chain = chain
        # frees the chain even if nobody closes the sampler
        free = functools.partial(self._llama.llama_sampler_free, chain)
        self._dropped: dropped.Reference | None = dropped.add(self, free)

    def sample(self, context: Any, output: int = -1) -> int:
        """Chooses the next token from the logits of a llama_context. Raises GrammarError if no token can follow.

        output: index in the last batch of the token whose logits count; -1: the last token with logits.
        """
        if self._grammar is None:
            return self._llama.llama_sampler_sample(self._chain, context, output)
        row = self._llama.llama_get_logits_ith(context, output)
        return self.sample_from(np.ctypeslib.as_array(row, (self._model.n_vocab,)))

    def sample_from(self, logits: np.ndarray) -> int:
        """Chooses the next token from logits [n_vocab] float32. Raises GrammarError as `sample` does."""
        token = self._choose(logits) if self._grammar is None else self._follow(logits, self._grammar)
        self._llama.llama_sampler_accept(self._chain, token)
        return token

    def _follow(self, logits: np.ndarray, grammar: Grammar) -> int:
        """Chooses without the grammar, and again among the allowed tokens if needed, as llama.cpp does."""
        token = self._choose(logits)
        allowed = grammar.take(token)
        if allowed is None:
            return token
        possible = allowed.copy()
        possible[self._forbidden] = False
        if not possible.any():
            for one in np.flatnonzero(allowed).tolist():
                if self._model.is_end(one):  # the answer is complete, and only a bias forbids the end token
                    return one
            raise grammar.dead_end()
        token = self._choose(np.where(possible, logits, -np.inf))
        if not possible[token] or grammar.take(token) is not None:
            raise grammar.dead_end()
        return token

    def _choose(self, logits: np.ndarray) -> int:
        llama, n = self._llama, len(logits)
        data = (llama.llama_token_data * n)()
        view = np.frombuffer(data, [("id", "i4"), ("logit", "f4"), ("p", "f4")])
        view["id"], view["logit"] = np.arange(n), logits
        array = llama.llama_token_data_array(data, n, -1, False)
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id) if 0 <= array.selected < n else int(logits.argmax())

    def close(self) -> None:
        """Frees the chain and the grammar. A second call does nothing."""
        self._grammar = None
        dropped.free(self._dropped)
        self._dropped = None  # saves a wake-up of the thread that frees dropped objects


def _biases(sampling: Sampling, model: Model) -> dict[int, float]:
    """Returns the bias of each biased token. Raises UsageError for tokens that the model does not have."""
    n_vocab, out = model.n_vocab, dict[int, float]()
    for token, bias in sampling.logit_bias.items():
        tokens = model.tokenize(token, special=False) if isinstance(token, str) else [int(token)]
        for one in set(tokens):
            if not 0 <= one < n_vocab:
                raise UsageError(f"logit_bias names token {one}, but the model has only tokens from 0 to {n_vocab - 1}")
            out[one] = out.get(one, 0.0) + bias
    if sum(bias == -math.inf for bias in out.values()) == n_vocab:
        raise UsageError("logit_bias forbids every token of the model; allow at least one token")
    return out


def _changes(sampling: Sampling, model: Model, biases: dict[int, float]) -> list[Any]:
    """Returns the samplers that change logits."""
    llama, out = model.llama, []
    if biases:
        array = (llama.llama_logit_bias * len(biases))(*biases.items())
        out.append(llama.llama_sampler_init_logit_bias(model.n_vocab, len(biases), array))
    if sampling.penalises:
        names = ("repeat_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty")
        penalties = (getattr(sampling, name) for name in names)
        out.append(llama.llama_sampler_init_penalties(model.n_vocab, *penalties))
    return out


def _choice(llama: Any, sampling: Sampling) -> list[Any]:
    """Returns the samplers that choose a token, in llama.cpp's order."""
    if sampling.temp == 0:
        return [llama.llama_sampler_init_greedy()]
    links = []
    if sampling.top_k:
        links.append(llama.llama_sampler_init_top_k(sampling.top_k))
    if sampling.typical_p < 1:
        links.append(llama.llama_sampler_init_typical(sampling.typical_p, 1))
    if sampling.top_p < 1:
        links.append(llama.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0:
        links.append(llama.llama_sampler_init_min_p(sampling.min_p, 1))
    seed = llama.LLAMA_DEFAULT_SEED if sampling.seed is None else sampling.seed
    return [*links, llama.llama_sampler_init_temp(sampling.temp), llama.llama_sampler_init_dist(seed)]
