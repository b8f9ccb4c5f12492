"""Storage types of keys and values: their names and what they cost. Each file of this package defines a quantised one.

f16, bf16 and f32 are plain numbers. A type's number and its size are the library's to say (kvedge_type_name).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykvedge.errors import ArrayError, unknown
from pykvedge.native import calls

if TYPE_CHECKING:
    import numpy as np

PLAIN = ("f16", "bf16", "f32")
QUANTISED = tuple(sorted((info.name for info in pkgutil.iter_modules(__path__)), reverse=True))
NAMES = (*PLAIN, *QUANTISED)
GROUP = 32  # values that share a scale; head sizes of the quantised types are multiples of it
ROTATES = ("auto", "on", "off")
ROTATION = 64  # numbers of a value that are rotated together; of a key the largest power of two that divides its size
RESIDUAL = 32  # newest values that KIVI leaves in f16


@dataclass(frozen=True)
class Definition:
    """A quantised type. rounded: what it makes of values that share a scale, [..., GROUP] float32, in that shape."""

    rounded: Callable[[np.ndarray], np.ndarray]
    levels: int  # steps from 0 to the largest size; of a type with minimum, from the smallest value to the largest
    minimum: bool = False
    residual: bool = False  # KIVI's: keys share a scale per channel over GROUP tokens, and the newest rows stay f16
    ggml: int | None = None  # llama.cpp's number, where the blocks are its


@functools.cache
def definition(name: str) -> Definition:
    """What the file of a quantised type says."""
    return importlib.import_module(f"{__name__}.{name}").TYPE


def ggml_types() -> dict[str, int]:
    """Types that llama.cpp has as well: name -> its number."""
    numbers = {"f16": 1, "bf16": 30, "f32": 0, **{name: definition(name).ggml for name in QUANTISED}}
    return {name: number for name, number in numbers.items() if number is not None}


@dataclass(frozen=True)
class KvType:
    """Storage types of keys and of values, by name, and whether rows of q8_0, q4_0, tq3 are rotated (held.py).

    rotate: "on", "off", or "auto": as llama.cpp has its own cache, where head sizes are multiples of 64.
    """

    k: str
    v: str
    rotate: str = "auto"

    @classmethod
    def parse(cls, text: str | KvType, rotate: str = "auto") -> KvType:
        """From "q8_0", or "q8_0:q4_0" for keys and values apart; a KvType stays as it is. Raises UnknownNameError."""
        if isinstance(text, KvType):
            return text
        if rotate not in ROTATES:
            raise unknown("kv_rotate", str(rotate), ROTATES)
        k, colon, v = str(text).partition(":")
        for name in (k, v) if colon else (k,):
            if name not in NAMES:
                raise unknown("kv_type", name, NAMES)
        return cls(k, v if colon else k, rotate)

    def blocks(self, size: int) -> tuple[int, int]:
        """Numbers of a key and of a value of `size` that are rotated together; 0 where they are not.

        Raises ArrayError where they are to be rotated and cannot be.
        """
        fit = [name not in PLAIN and not definition(name).residual for name in (self.k, self.v)]
        if self.rotate == "on" and (not any(fit) or size % ROTATION):
            raise ArrayError(
                f"kv_rotate on is for q8_0, q4_0 and tq3, and head sizes that are multiples of {ROTATION}, "
                f"not for {self} and {size}"
            )
        if self.rotate == "off" or size % ROTATION:
            return 0, 0
        return size & -size if fit[0] else 0, ROTATION if fit[1] else 0

    def __str__(self) -> str:
        """As parse takes it."""
        return self.k if self.k == self.v else f"{self.k}:{self.v}"

    @property
    def key(self) -> str:
        """What stored rows of others are found by."""
        return f"{self}, rotate {self.rotate}" if self.quantised else str(self)

    @property
    def quantised(self) -> bool:
        """Whether keys or values are."""
        return self.k not in PLAIN or self.v not in PLAIN

    @property
    def plain(self) -> KvType:
        """What prompts are held in until they are compressed: f16 where the type is quantised."""
        return KvType(self.k if self.k in PLAIN else "f16", self.v if self.v in PLAIN else "f16")

    @property
    def numbers(self) -> tuple[int, int]:
        """As kvedge_type."""
        order = list(calls.kv_types())
        return order.index(self.k), order.index(self.v)

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a number, averaged over keys and values of the same size, without KIVI's residual."""
        return (calls.kv_types()[self.k] + calls.kv_types()[self.v]) / 2

    def held_bytes_per_value(self, n: int) -> float:
        """The same with the residual, right after a compression that left n rows of a head; 0 for none."""
        types = calls.kv_types()
        waiting = (self.k, n % GROUP), (self.v, min(n, RESIDUAL))
        plain = sum(
            rows * (types["f16"] - types[name])
            for name, rows in waiting
            if name not in PLAIN and definition(name).residual
        )
        return self.bytes_per_value + plain / (2 * n) if n else 0.0
