"""Marks: a second sequence becomes a copy of what an engine has read, and the engine can go back to it, to the bit.

What is copied are compressed rows, what the decode policy remembers, and llama.cpp's own cells and states.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvedge.errors import UnsupportedError
from pykvedge.library.libkvedge import Cache
from pykvedge.plans.plan import Plan
from pykvedge.runtime.llama_context import Context
from pykvedge.runtime.replay import Passage
from pykvedge.system import memory

COPY = 1  # number of the sequence that holds it


@dataclass(frozen=True)
class Mark:
    """What an engine needs beside the copy of its sequence."""

    n_past: int
    n_cells: int
    plan: Plan | None  # that the cache followed
    held: float  # pairs per head after the last compression
    n_bytes: int  # of the copied rows
    passage: Passage  # what was read since the last compression


def copy(context: Context, cache: Cache | None) -> int:
    """Makes the second sequence a copy of the first, and returns the bytes of its rows, not counting llama.cpp's.

    Raises OutOfMemoryError, UnsupportedError.
    """
    context.drop(COPY)
    _require_window(context)
    n_bytes = cache.stats().bytes if cache is not None else 0
    memory.require(n_bytes, "a copy of the conversation", "close other programs")
    context.copy_to(COPY)
    if cache is not None:
        cache.check()
    return n_bytes


def bring_back(context: Context, cache: Cache | None, mark: Mark) -> int:
    """Makes the first sequence what the second one is, and empties that. Returns how often it was compressed."""
    context.move_from(COPY)
    context.n_past, context.n_cells = mark.n_past, mark.n_cells
    if cache is None:
        return 0
    cache.check()
    return cache.stats().n_compressions


def _require_window(context: Context) -> None:
    """A windowed layer of llama.cpp reuses cells that its window has left, but not those that a copy shares.

    It has as many as two windows and one pass through the model take, in steps of 256, and no more than the context.
    """
    window = context.llama.llama_model_n_swa(context.model.handle)
    cells = -(-min(context.n_ctx, 2 * window + context.n_ubatch) // 256) * 256
    if window > 0 and cells < context.n_ctx and context.n_cells + window + context.n_ubatch > cells:
        raise UnsupportedError(
            f"llama.cpp keeps layers of this model that see {window} tokens, and the conversation has become too long "
            "for a copy of them"
        )
