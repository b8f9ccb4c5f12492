"""Sampling says how the next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykvedge.errors import UsageError, check_number
from pykvedge.native import libraries


@dataclass(frozen=True)
class Sampling:
    """temp 0 takes the likeliest token; otherwise top_k (0: off), then top_p (1: off), then temperature.

    seed: the same seed gives the same answer; None takes a new one each time.
    """

    temp: float = 0.0
    top_p: float = 0.95
    top_k: int = 40
    seed: int | None = None
    max_tokens: int = 512

    def __post_init__(self) -> None:
        check_number("temp", self.temp, whole=False)
        check_number("top_p", self.top_p, whole=False)
        check_number("top_k", self.top_k)
        check_number("seed", 0 if self.seed is None else self.seed)
        check_number("max_tokens", self.max_tokens)
        if not 0 <= self.temp <= 100:
            raise UsageError(f"temp must lie between 0 and 100, not {self.temp}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise UsageError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise UsageError(f"seed must lie between 0 and 4294967295, not {self.seed}")
        if not 1 <= self.max_tokens < 2**31:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}")


class Sampler:
    """A llama.cpp sampler chain; close it, or use it in a with statement."""

    def __init__(self, sampling: Sampling) -> None:
        llama = self._llama = libraries.llama()
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for link in _links(llama, sampling):
            llama.llama_sampler_chain_add(self._chain, link)

    def sample(self, context: Any) -> int:
        """Chooses the next token from the last logits of a llama_context."""
        return self._llama.llama_sampler_sample(self._chain, context, -1)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self._llama.llama_sampler_free(self._chain)


def _links(llama: Any, sampling: Sampling) -> list[Any]:
    if sampling.temp == 0:
        return [llama.llama_sampler_init_greedy()]
    links = []
    if sampling.top_k:
        links.append(llama.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1:
        links.append(llama.llama_sampler_init_top_p(sampling.top_p, 1))
    seed = llama.LLAMA_DEFAULT_SEED if sampling.seed is None else sampling.seed
    return [*links, llama.llama_sampler_init_temp(sampling.temp), llama.llama_sampler_init_dist(seed)]
