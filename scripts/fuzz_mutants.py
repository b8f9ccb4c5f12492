"""Random changes of files: bytes of any file, values of JSON, parts of session files and of GGUF headers."""

import copy
import json
import random
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (-1, 0, 0.3, 1e308, float("inf"), float("nan"), 2**31, 2**64, 10**400)
VALUES = (None, True, *NUMBERS, "", "\0", "x" * 5000, "\ud800", [], {}, [[1]])
LARGEST_PIECE = 4096  # bytes that are inserted or removed
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's scalars, by type
STRING, ARRAY = 8, 9
FLOATS = (0.0, -1.0, 1e-5, float("inf"), float("nan"), 3e38)


def _place(rng: random.Random, n: int, near_start: bool) -> int:
    """Returns a place in n bytes. near_start: mostly near the beginning, where the headers of files are."""
    return min(n - 1, int(n * rng.random() ** (6 if near_start else 1)))


def _bits(data: bytearray, rng: random.Random, at: int) -> None:
    data[at] ^= 1 << rng.randrange(8)


def _number(data: bytearray, rng: random.Random, at: int) -> None:
    size = rng.choice((1, 2, 4, 8))
    data[at : at + size] = (rng.choice(EDGES) % 256**size).to_bytes(size, "little")


def _cut(data: bytearray, rng: random.Random, at: int) -> None:
    del data[at:]


def _without(data: bytearray, rng: random.Random, at: int) -> None:
    del data[at : at + rng.randint(1, LARGEST_PIECE)]


def _with(data: bytearray, rng: random.Random, at: int) -> None:
    data[at:at] = rng.randbytes(rng.randint(1, LARGEST_PIECE))


def _again(data: bytearray, rng: random.Random, at: int) -> None:
    start = rng.randrange(len(data))
    data[at:at] = data[start : start + rng.randint(1, LARGEST_PIECE)]


def _over(data: bytearray, rng: random.Random, at: int) -> None:
    piece = rng.randbytes(rng.randint(1, 64))
    data[at : at + len(piece)] = piece


WAYS = (_bits, _bits, _number, _number, _cut, _without, _with, _again, _over)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Makes one to four random changes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if out:
            rng.choice(WAYS)(out, rng, _place(rng, len(out), rng.random() < 0.8))
    return bytes(out)


def mutate_session(data: bytes, rng: random.Random) -> bytes:
    """Changes a session file. Half of the results have correct checksums and lengths, so that the content is read."""
    n_model, n_note = struct.unpack_from("<IQ", data, 12) if len(data) > 32 else (0, 0)
    end = 32 + n_model + n_note
    if end + 8 > len(data) or rng.random() < 0.5:
        return mutate_bytes(data, rng)
    note, payload = data[32 + n_model : end], data[end + 4 : -4]
    if rng.random() < 0.3:
        note = mutate_json(note, rng)
    else:
        payload = mutate_bytes(payload, rng)
    head = data[:16] + struct.pack("<QQ", len(note), len(payload)) + data[32 : 32 + n_model] + note
    return head + struct.pack("<I", zlib.crc32(head)) + payload + struct.pack("<I", zlib.crc32(payload))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns every (list or object, key) pair in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    out = []
    for key, inner in items:
        out += [(value, key), *_places(inner)]
    return out


def _near(value: Any, rng: random.Random) -> Any:
    """Returns a different number of the same kind; any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if abs(value) > 1e300:  # larger floats overflow or have no near neighbour
        return -value
    return rng.choice((value + 1, value - 1, value * 2, value / 2, -value, value + 0.5))


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """Changes one or two values of a JSON text, or any of its bytes. Raises ValueError if data is not JSON."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        places = _places(value)
        if not places:
            break
        inside, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.1:
            del inside[key]
        elif kind < 0.5:
            inside[key] = _near(inside[key], rng)
        elif kind < 0.6:
            other, at = rng.choice(places)
            inside[key] = copy.deepcopy(other[at])
        else:
            inside[key] = rng.choice(VALUES)
    return json.dumps(value).encode()


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Changes any bytes: values if they are JSON, else one line, as JSON if the line is JSON."""
    try:
        return mutate_text(data, rng)
    except (ValueError, RecursionError, OverflowError):
        lines = data.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    try:
        lines[at] = mutate_text(lines[at], rng) + b"\n"
    except (ValueError, RecursionError, OverflowError):
        lines[at] = mutate_bytes(lines[at], rng)
    return b"".join(lines)


@dataclass
class Layout:
    """The (offset, bytes) of the numbers, the metadata entries and the tensors in a GGUF header."""

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
            del self.out.numbers[first + 8 :]  # a long array must not outnumber everything else
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
    """Returns the layout of a GGUF header, up to the first error."""
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
        out[key] ^= rng.randrange(64)  # mostly another name
    _count(out, count_at, 1)


def _count(out: bytearray, at: int, change: int) -> None:
    n = int.from_bytes(out[at : at + 8], "little") + change
    out[at : at + 8] = (n % 2**64).to_bytes(8, "little")


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """Makes one to three changes of a GGUF header, or changes any bytes."""
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
            out = bytearray(mutate_bytes(bytes(out), rng))
    return bytes(out)
