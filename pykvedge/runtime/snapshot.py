"""Saves the state of a sequence as bytes, for openings, parked conversations, prompts and forks."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pykvedge.runtime.report import Kv, Tokens

Rows: TypeAlias = bytes | bytearray | memoryview

_NUMBERS = ("n_past", "n_cells", "n_pending", "compressed_tokens", "held")
_COUNTS = ("prompt", "image", "pruned")
_LISTS = ("pending", "answer", "unread")


class ImageSpan(NamedTuple):
    """An image at tokens [first, last) of a sequence. limit: most KV pairs per head to keep; -1: no limit.

    fixed: the caller set the limit; False: ageing set it. pairs: KV pairs that a head keeps by age; 0: unknown.
    """

    first: int
    last: int
    limit: int = -1
    fixed: bool = False
    pairs: float = 0.0

    @classmethod
    def of(cls, given: Any) -> ImageSpan:
        """Makes a span from a list. Lists of earlier versions have no pairs. Raises ValueError."""
        first, last, limit, fixed, *rest = given
        pairs, *more = rest or [0.0]
        if not all(type(n) is int for n in (first, last, limit)) or not isinstance(fixed, bool):
            raise ValueError("the entry of an image has a wrong type")
        if more or type(pairs) not in (int, float) or not 0 <= pairs < 2**31:
            raise ValueError("the age of an image is out of range")
        if not 0 <= first < last < 2**31 or not -1 <= limit < 2**31:
            raise ValueError("the tokens of an image are out of range")
        return cls(first, last, limit, fixed, pairs)


@dataclass(frozen=True)
class Snapshot:
    """The rows of a sequence, and the state to continue from them. len(): approximate bytes in memory.

    rows: bytes of libkvedge.pack. n_past: position of the next token. n_cells: tokens in the cache. n_pending: the last
    n_pending tokens are not compressed. compressed_tokens: tokens compressed since the last measurement. held: KV pairs
    per head at that measurement, averaged over heads and layers. pending: chosen tokens of an answer that were not
    read. answer: tokens read since the last compression, for a method with a second pass. unread: tokens of the answer
    that were removed, to be read again over whole rows. images: images that were read. tokens: counts of tokens read,
    if counted. logits: [n_vocab] float32 of the last token, and kv: figures of the cache, both only for a prompt that
    waits for its answer. since: creation time, seconds since 1970.
    """

    rows: Rows
    n_past: int
    n_cells: int
    n_pending: int = 0
    compressed_tokens: int = 0
    held: float = 0.0
    pending: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    tokens: Tokens = field(default_factory=Tokens)
    logits: np.ndarray | None = field(default=None, compare=False)
    kv: Kv | None = None
    since: float = field(default_factory=time.time, compare=False)

    def __len__(self) -> int:
        logits = self.logits.nbytes if self.logits is not None else 0
        return len(self.rows) + logits + 4 * (len(self.answer) + len(self.unread)) + 512

    def encode(self) -> list[Rows]:
        """Returns the snapshot in parts, without logits and kv: length of the JSON text (4 bytes), JSON text, rows."""
        given: dict[str, Any] = {name: getattr(self, name) for name in (*_NUMBERS, *_LISTS, "images")}
        given["tokens"] = {name: getattr(self.tokens, name) for name in _COUNTS}
        text = json.dumps(given).encode()
        return [len(text).to_bytes(4, "little"), text, self.rows]

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Snapshot:
        """Reads what `encode` wrote. The rows are a view of `data`. Raises ValueError."""
        view = memoryview(data)
        end = 4 + int.from_bytes(view[:4], "little")
        given = json.loads(bytes(view[4:end]))
        try:
            counts, lists = given.pop("tokens"), {name: tuple(given.pop(name, ())) for name in _LISTS}
            images = tuple(ImageSpan.of(one) for one in given.pop("images", ()))
            numbers = {name: given.pop(name) for name in _NUMBERS}
            out = cls(view[end:], **numbers, **lists, images=images, tokens=Tokens(**counts))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None
        held, whole = numbers.pop("held"), [*counts.values(), *(n for one in lists.values() for n in one)]
        if given or not all(type(n) is int and n >= 0 for n in [*numbers.values(), *whole]):
            raise ValueError("a count is negative or not a number")
        if not isinstance(held, (int, float)):
            raise ValueError("the number of KV pairs is not a number")
        return out
