"""A second pass over a prompt: the queries and keys of a model that reads the prompt again, in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pykvedge.errors import ArrayError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    import numpy as np

    from pykvedge.native.abi import ReplayChunk


class Replay:
    """A second pass over a prompt of T tokens. q and k hold the chunks in order; a chunk's positions start at T."""

    def __init__(self, q: Any, k: Any, chunks: Sequence[ReplayChunk]) -> None:
        """q: [L, H, R, d] and k: [L, Hkv, R, d], floating point, rotated by position. Raises ArrayError."""
        import numpy as np

        arrays = [np.ascontiguousarray(x, dtype=np.float32) for x in (q, k)]
        self.q, self.k = arrays
        self.chunks = tuple(chunks)
        n = sum(chunk.n_tokens for chunk in self.chunks)
        if any(x.ndim != 4 or not np.isfinite(x).all() for x in arrays) or self.q.shape[2] != n or n == 0:
            raise ArrayError(f"q and k of a replay must be finite numbers [layers, heads, {n or 'tokens'}, head size]")

    def check(self, q: np.ndarray, k: np.ndarray) -> None:
        """Raises ArrayError unless the pass fits a prompt with q [L, H, T, d] and k [L, Hkv, T, d]."""
        for own, of, name in ((self.q, q, "q"), (self.k, k, "k")):
            if (*own.shape[:2], own.shape[3]) != (*of.shape[:2], of.shape[3]) or own.shape[2] != self.q.shape[2]:
                raise ArrayError(
                    f"the shape of {name} of a replay, {own.shape}, does not fit the shape of the "
                    f"prompt's {name}, {of.shape}"
                )
        n = k.shape[2]
        for c in self.chunks:
            if not (0 <= c.first < c.last <= n and 0 <= c.sinks <= n and c.n_tokens > 0):
                raise ArrayError(f"the chunk {c} does not fit in a prompt of {n} tokens")

    def parts(self, layer: int) -> Iterator[tuple[ReplayChunk, np.ndarray, np.ndarray]]:
        """Yields each chunk with its queries [H, n, d] and keys [Hkv, n, d] of one layer."""
        at = 0
        for chunk in self.chunks:
            own = slice(at, at + chunk.n_tokens)
            yield chunk, self.q[layer, :, own], self.k[layer, :, own]
            at = own.stop
