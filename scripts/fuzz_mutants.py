"""Mutants of files, drawn from a seed: bits, numbers, pieces that go, come and move, and fields where that is cheap."""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from typing import Any

EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (-1, 0, 0.3, 1e308, float("inf"), float("nan"), 2**31, 2**64, 10**400)
VALUES = (None, True, *NUMBERS, "", "\0", "x" * 5000, "\ud800", [], {}, [[1]])
LARGEST_PIECE = 4096  # bytes that are put in or taken out


def _place(rng: random.Random, n: int, near_start: bool) -> int:
    """A place in n bytes. What a file says of itself stands at its beginning, and counts most."""
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


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four changes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if out:
            rng.choice(WAYS)(out, rng, _place(rng, len(out), rng.random() < 0.8))
    return bytes(out)


def of_session(data: bytes, rng: random.Random) -> bytes:
    """Half of them have checksums and lengths that are right again, so that what is behind them is read."""
    if rng.random() < 0.5:
        return of_bytes(data, rng)
    n_model, n_note = struct.unpack_from("<I", data, 12)[0], struct.unpack_from("<Q", data, 16)[0]
    end = 32 + n_model + n_note
    note, payload = data[32 + n_model : end], data[end + 4 : -4]
    if rng.random() < 0.3:
        note = of_text(note, rng)
    else:
        payload = of_bytes(payload, rng)
    head = data[:16] + struct.pack("<QQ", len(note), len(payload)) + data[32 : 32 + n_model] + note
    return head + struct.pack("<I", zlib.crc32(head)) + payload + struct.pack("<I", zlib.crc32(payload))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every list and object of a JSON value, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    out = []
    for key, inner in items:
        out += [(value, key), *_places(inner)]
    return out


def _near(value: Any, rng: random.Random) -> Any:
    """A value of the same type that may be as good."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if abs(value) > 1e300:  # too large for a float, or none that is near
        return -value
    return rng.choice((value + 1, value - 1, value * 2, value / 2, -value, value + 0.5))


def of_text(data: bytes, rng: random.Random) -> bytes:
    """Of JSON: other values in the place of some, or any change of its bytes."""
    if rng.random() < 0.3:
        return of_bytes(data, rng)
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


def of_json(data: bytes, rng: random.Random) -> bytes:
    """As of_text, of any bytes: a line of those that are JSON line by line."""
    try:
        return of_text(data, rng)
    except (ValueError, RecursionError, OverflowError):
        lines = data.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    try:
        lines[at] = of_text(lines[at], rng) + b"\n"
    except (ValueError, RecursionError, OverflowError):
        lines[at] = of_bytes(lines[at], rng)
    return b"".join(lines)


MAKERS = {
    "model": of_bytes,
    "mmproj": of_bytes,
    "session": of_session,
    "plan": of_text,
    "profile": of_text,
    "image": of_bytes,
}


def mutant(kind: str, data: bytes, seed: int, number: int) -> bytes:
    """The same for the same seed and number."""
    return MAKERS[kind](data, random.Random(f"{kind} {seed} {number}"))
