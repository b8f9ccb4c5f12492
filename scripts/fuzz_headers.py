"""Mutants of GGUF headers by their structure: numbers, types and texts in their places, entries that go and come."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from fuzz_mutants import EDGES, of_bytes

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's scalars, by type
STRING, ARRAY = 8, 9
FLOATS = (0.0, -1.0, 1e-5, float("inf"), float("nan"), 3e38)


@dataclass
class Layout:
    """Where things lie in a header: (offset, bytes) of numbers, and of whole metadata entries and tensors."""

    numbers: list[tuple[int, int]] = field(default_factory=list)
    entries: list[tuple[int, int]] = field(default_factory=list)
    tensors: list[tuple[int, int]] = field(default_factory=list)


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.out = data, 0, Layout()

    def number(self, size: int) -> int:
        if self.at + size > len(self.data):
            raise EOFError
        self.out.numbers.append((self.at, size))
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def text(self) -> None:
        n = self.number(8)
        self.at += n

    def value(self, kind: int) -> None:
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            of, n = self.number(4), self.number(8)
            first = len(self.out.numbers)
            for _ in range(n):
                self.value(of)
            del self.out.numbers[first + 8 :]  # a vocabulary is not all that there is
        else:
            self.number(SIZES[kind])

    def header(self) -> Layout:
        self.at = 4
        self.number(4)
        n_tensors, n_values = self.number(8), self.number(8)
        for _ in range(n_values):
            start = self.at
            self.text()
            self.value(self.number(4))
            self.out.entries.append((start, self.at - start))
        for _ in range(n_tensors):
            start = self.at
            self.text()
            for size in (8,) * min(self.number(4), 4) + (4, 8):
                self.number(size)
            self.out.tensors.append((start, self.at - start))
        return self.out


def layout_of(data: bytes) -> Layout:
    """As far as the header can be read."""
    walk = _Walk(data)
    try:
        return walk.header()
    except (EOFError, KeyError, RecursionError, MemoryError, OverflowError):
        return walk.out


def _other_number(out: bytearray, rng: random.Random, at: int, size: int) -> None:
    old = int.from_bytes(out[at : at + size], "little")
    if size == 4 and rng.random() < 0.2:
        out[at : at + 4] = struct.pack("<f", rng.choice(FLOATS))
        return
    new = rng.choice((*EDGES, old + 1, old - 1, old * 2, old // 2, rng.randrange(13)))
    out[at : at + size] = (new % 256**size).to_bytes(size, "little")


def _one_less(out: bytearray, rng: random.Random, spans: list[tuple[int, int]], count_at: int) -> None:
    at, size = rng.choice(spans)
    del out[at : at + size]
    _count(out, count_at, -1)


def _one_more(out: bytearray, rng: random.Random, spans: list[tuple[int, int]], count_at: int) -> None:
    at, size = rng.choice(spans)
    out[at:at] = out[at : at + size]
    key = at + 8 + rng.randrange(min(64, max(1, int.from_bytes(out[at : at + 8], "little"))))
    if key < len(out):
        out[key] ^= rng.randrange(64)  # another name, most of the time
    _count(out, count_at, 1)


def _count(out: bytearray, at: int, change: int) -> None:
    n = int.from_bytes(out[at : at + 8], "little") + change
    out[at : at + 8] = (n % 2**64).to_bytes(8, "little")


def of_header(data: bytes, rng: random.Random) -> bytes:
    """One to three changes of a header; of what is none, any."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        found = layout_of(bytes(out))
        spans, count_at = rng.choice(((found.entries, 16), (found.tensors, 8)))
        kind = rng.random()
        if kind < 0.6 and found.numbers:
            _other_number(out, rng, *rng.choice(found.numbers))
        elif kind < 0.75 and spans:
            _one_less(out, rng, spans, count_at)
        elif kind < 0.9 and spans:
            _one_more(out, rng, spans, count_at)
        elif out:
            out = bytearray(of_bytes(bytes(out), rng))
    return bytes(out)
