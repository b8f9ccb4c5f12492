"""Storage types of keys and values: names and sizes. Each file of this package defines a quantised type.

f16, bf16 and f32 are plain numbers. The library says the number and the size of each type (kvedge_type_name).
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
KEEP_TYPES = ("f16", "q8_0")  # storage types of whole rows: unchanged, or quantised to half the size
GROUP = 32  # values that share a scale; head sizes of quantised types are multiples of it
ROTATES = ("auto", "on", "off")
ROTATION = 64  # numbers of a value rotated together; for a key: the largest power of two that divides its size
RESIDUAL = 32  # newest values that KIVI keeps in f16


@dataclass(frozen=True)
class Definition:
    """A quantised type. rounded: returns values [..., GROUP] float32 as stored; the last axis shares one scale."""

    rounded: Callable[[np.ndarray], np.ndarray]
    levels: int  # steps from 0 to the largest magnitude; with `minimum`: from the smallest value to the largest
    minimum: bool = False
    residual: bool = False  # KIVI: keys share a scale per channel over GROUP tokens, and the newest rows stay f16
    ggml: int | None = None  # llama.cpp's number of the type; None: llama.cpp has no such blocks


@functools.cache
def definition(name: str) -> Definition:
    """Returns the definition in the file of a quantised type."""
    return importlib.import_module(f"{__name__}.{name}").TYPE


def ggml_types() -> dict[str, int]:
    """Returns the types that llama.cpp has too: name -> llama.cpp's number."""
    numbers = {"f16": 1, "bf16": 30, "f32": 0, **{name: definition(name).ggml for name in QUANTISED}}
    return {name: number for name, number in numbers.items() if number is not None}


@dataclass(frozen=True)
class KvType:
    """Storage types of keys and of values, by name, and whether rows of q8_0, q4_0, tq3 are rotated (storage.py).

    rotate: "on", "off", or "auto": as in llama.cpp, rows are rotated if the head size is a multiple of 64.
    """

    k: str
    v: str
    rotate: str = "auto"

    @classmethod
    def parse(cls, text: str | KvType, rotate: str = "auto") -> KvType:
        """Parses "q8_0", or "q8_0:q4_0" for keys and values. Returns a KvType unchanged. Raises UnknownNameError."""
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
        """Returns how many numbers of a key and of a value of `size` are rotated together; 0: not rotated.

        Raises ArrayError if rotation is on and the types or the size do not allow it.
        """
        fit = [name not in PLAIN and not definition(name).residual for name in (self.k, self.v)]
        if self.rotate == "on" and (not any(fit) or size % ROTATION):
            raise ArrayError(
                f"kv_rotate on needs q8_0, q4_0 or tq3, and a head size that is a multiple of {ROTATION}, not {self} "
                f"and {size}"
            )
        if self.rotate == "off" or size % ROTATION:
            return 0, 0
        return size & -size if fit[0] else 0, ROTATION if fit[1] else 0

    def __str__(self) -> str:
        """Returns the text that parse() reads."""
        return self.k if self.k == self.v else f"{self.k}:{self.v}"

    @property
    def key(self) -> str:
        """A text that identifies the type in the keys of saved rows and of results."""
        return f"{self}, rotate {self.rotate}" if self.quantised else str(self)

    @property
    def quantised(self) -> bool:
        """Whether keys or values are quantised."""
        return self.k not in PLAIN or self.v not in PLAIN

    @property
    def plain(self) -> KvType:
        """The types of a prompt's rows before compression: f16 in place of a quantised type."""
        return KvType(self.k if self.k in PLAIN else "f16", self.v if self.v in PLAIN else "f16")

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers of the types of keys and values, as in kvedge_type."""
        order = list(calls.kv_types())
        return order.index(self.k), order.index(self.v)

    @property
    def bytes_per_value(self) -> float:
        """Bytes per number, averaged over keys and values of the same size, without KIVI's residual."""
        return (calls.kv_types()[self.k] + calls.kv_types()[self.v]) / 2

    def held_bytes_per_value(self, n: int) -> float:
        """Returns bytes per number, with KIVI's residual, right after a compression to n rows per head; 0 if n is 0."""
        types = calls.kv_types()
        waiting = (self.k, n % GROUP), (self.v, min(n, RESIDUAL))
        plain = sum(
            rows * (types["f16"] - types[name])
            for name, rows in waiting
            if name not in PLAIN and definition(name).residual
        )
        return self.bytes_per_value + plain / (2 * n) if n else 0.0
