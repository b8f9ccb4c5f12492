"""Amounts of tokens as people give them: a share of the prompt, or a number. Budgets and image tokens have bounds."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pykvedge.errors import BudgetError, UsageError

LARGEST_COUNT = 2**31 - 1  # the library counts tokens in 32 bits


def _number(value: Any) -> int | float | None:
    """Reads an int from an integer (also NumPy's) or a text without point and exponent, and a float from others.

    None is no number.
    """
    if isinstance(value, (bool, complex)):
        return None
    with suppress(TypeError):
        return operator.index(value)
    try:
        if isinstance(value, str) and not set(value) & set(".eE"):
            return int(value)
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Amount:
    """A number of tokens is given as `pairs`, or as a `ratio` of the prompt. Exactly one of the two is set."""

    ratio: float | None = None
    pairs: int | None = None

    @classmethod
    def parse(cls, value: Any, what: str) -> Amount:
        """Takes 0.2 or "0.2" as a ratio, and 128 or "128" as a number of pairs ("1.0" is a ratio, "1" is one pair).

        Raises UsageError if `value` is no number.
        """
        if isinstance(value, Amount):
            return cls(value.ratio, value.pairs)
        number = _number(value)
        if number is None:
            raise UsageError(f"{what} must be a ratio like 0.2 or a number of tokens like 128, not {value!r}")
        return cls(pairs=number) if isinstance(number, int) else cls(ratio=number)

    @property
    def value(self) -> float | int:
        """This is the ratio as a float, or the pairs as an int."""
        return self.pairs if self.pairs is not None else float(self.ratio or 0.0)

    def count(self, n_tokens: int) -> int:
        """Counts the tokens out of a prompt of n_tokens: floor(n_tokens * ratio + 1e-9), or the number of pairs."""
        return self.pairs if self.pairs is not None else math.floor(n_tokens * (self.ratio or 0.0) + 1e-9)

    def __str__(self) -> str:
        if self.pairs is not None:
            return str(self.pairs)
        text = format(Decimal(repr(self.ratio)), "f")  # never with an exponent: kvedge.h wants 0.00001, not 1e-05
        return text if "." in text else text + ".0"

    def as_json(self) -> dict[str, float | int | None]:
        """Writes {"ratio": r} or {"pairs": n}: languages without an integer type cannot tell 1.0 from 1."""
        return {"pairs": self.pairs} if self.pairs is not None else {"ratio": self.ratio}


class _Kept(Amount):
    def count(self, n_tokens: int) -> int:
        """Counts the pairs or tokens that stay of n_tokens: from 1 to n_tokens, and 0 of none."""
        return min(max(super().count(n_tokens), 1), n_tokens)


@dataclass(frozen=True)
class Budget(_Kept):
    """Each layer and KV head keeps so many KV pairs: a ratio of the prompt in (0, 1], or a number of pairs >= 1."""

    def __post_init__(self) -> None:
        if self.pairs is not None and self.pairs < 1:
            raise BudgetError(f"budget must be at least 1 KV pair, not {self.pairs}")
        if self.pairs is not None and self.pairs > LARGEST_COUNT:
            raise BudgetError(f"budget must be at most {LARGEST_COUNT} KV pairs, not {self.pairs}")
        if self.ratio is not None and not 0 < self.ratio <= 1:
            hint = f" (for {self.ratio:g} KV pairs write {self.ratio:.0f})" if self.ratio > 1 else ""
            raise BudgetError(f"budget as a ratio must be above 0 and at most 1.0, not {self}{hint}")


@dataclass(frozen=True)
class ImageTokens(_Kept):
    """The model reads so many tokens of each image: a ratio of them in (0, 1], or a number >= 1."""

    def __post_init__(self) -> None:
        in_range = 1 <= (self.pairs or 1) <= LARGEST_COUNT and 0 < (1.0 if self.ratio is None else self.ratio) <= 1
        if not in_range or self.pairs == 0:
            raise BudgetError(
                f"image_tokens must be a ratio above 0 and at most 1.0, or a number of tokens from 1 on, not {self}"
            )
