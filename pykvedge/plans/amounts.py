"""Amounts of tokens as users write them: a share of the prompt, or a number. Budgets and image tokens have bounds."""

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
    """Returns an int for an integer (also NumPy's) or a text without point and exponent, and a float for other numbers.

    Returns None if `value` is no finite number.
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
    """A number of tokens: `pairs`, or a `ratio` of the prompt. Exactly one of the two is set."""

    ratio: float | None = None
    pairs: int | None = None

    @classmethod
    def parse(cls, value: Any, what: str) -> Amount:
        """Reads 0.2 or "0.2" as a ratio, and 128 or "128" as a number of pairs ("1.0" is a ratio, "1" is one pair).

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
        """The ratio as a float, or the pairs as an int."""
        return self.pairs if self.pairs is not None else float(self.ratio or 0.0)

    def count(self, n_tokens: int) -> int:
        """Returns the number of tokens in a prompt of n_tokens: floor(n_tokens * ratio + 1e-9), or `pairs`."""
        return self.pairs if self.pairs is not None else math.floor(n_tokens * (self.ratio or 0.0) + 1e-9)

    def __str__(self) -> str:
        if self.pairs is not None:
            return str(self.pairs)
        text = format(Decimal(repr(self.ratio)), "f")  # kvedge.h takes no exponent: 0.00001, not 1e-05
        return text if "." in text else text + ".0"

    def as_json(self) -> dict[str, float | int | None]:
        """Returns {"ratio": r} or {"pairs": n}. Languages without an integer type cannot tell 1.0 from 1."""
        return {"pairs": self.pairs} if self.pairs is not None else {"ratio": self.ratio}


class _Kept(Amount):
    def count(self, n_tokens: int) -> int:
        """Returns the number of kept pairs or tokens: from 1 to n_tokens, and 0 if n_tokens is 0."""
        return min(max(super().count(n_tokens), 1), n_tokens)


@dataclass(frozen=True)
class Budget(_Kept):
    """The KV pairs that each layer and KV head keeps: a ratio of the prompt in (0, 1], or a number of pairs >= 1."""

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
    """The tokens of each image that the model reads: a ratio in (0, 1], or a number >= 1."""

    def __post_init__(self) -> None:
        in_range = 1 <= (self.pairs or 1) <= LARGEST_COUNT and 0 < (1.0 if self.ratio is None else self.ratio) <= 1
        if not in_range or self.pairs == 0:
            raise BudgetError(
                f"image_tokens must be a ratio above 0 and at most 1.0, or a number of tokens from 1 on, not {self}"
            )
