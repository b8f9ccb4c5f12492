"""Storage types of keys and values: their names, what they cost, and (in this package's files) their rounding.

f16, bf16 and f32 are plain numbers. q8_0 and q4_0 are llama.cpp's blocks: 32 channels of one token share a scale.
kivi4 and kivi2 are KIVI's (Liu et al. 2024, arXiv 2402.02750): keys share scale and minimum per channel over 32 tokens,
values per token over 32 channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvedge.errors import unknown

PLAIN = ("f16", "bf16", "f32")
KIVI = ("kivi4", "kivi2")
NAMES = (*PLAIN, "q8_0", "q4_0", *KIVI)
GROUP = 32  # values that share a scale; head sizes of the quantised types are multiples of it
RESIDUAL = 32  # newest values that KIVI leaves in f16
# KIVI: bits / 8 + 4 / GROUP, for two half-precision numbers a group; the blocks have one
BYTES = {"f16": 2.0, "bf16": 2.0, "f32": 4.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "kivi4": 20 / 32, "kivi2": 12 / 32}


@dataclass(frozen=True)
class KvType:
    """Storage types of keys and of values, by name."""

    k: str
    v: str

    @classmethod
    def parse(cls, text: str | KvType) -> KvType:
        """From "q8_0", or "q8_0:q4_0" for keys and values apart. Raises UnknownNameError."""
        if isinstance(text, KvType):
            return text
        k, colon, v = str(text).partition(":")
        for name in (k, v) if colon else (k,):
            if name not in NAMES:
                raise unknown("kv_type", name, NAMES)
        return cls(k, v if colon else k)

    def __str__(self) -> str:
        """As parse takes it."""
        return self.k if self.k == self.v else f"{self.k}:{self.v}"

    @property
    def quantised(self) -> bool:
        """Whether keys or values are."""
        return self.k not in PLAIN or self.v not in PLAIN

    @property
    def plain(self) -> KvType:
        """What prompts are held in until they are compressed: f16 where the type is quantised."""
        return KvType(self.k if self.k in PLAIN else "f16", self.v if self.v in PLAIN else "f16")

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a number, averaged over keys and values of the same size, without KIVI's residual."""
        return (BYTES[self.k] + BYTES[self.v]) / 2

    def held_bytes_per_value(self, n: int) -> float:
        """The same with the residual, right after a compression that left n rows of a head; 0 for none."""
        keys = n % GROUP if self.k in KIVI else 0
        values = min(n, RESIDUAL) if self.v in KIVI else 0
        plain = keys * (BYTES["f16"] - BYTES[self.k]) + values * (BYTES["f16"] - BYTES[self.v])
        return self.bytes_per_value + plain / (2 * n) if n else 0.0
