"""The types of stage members, and the arrays that members receive. A file in stages/<stage>/ fills in one member.

Symbols: H query heads, Hkv KV heads (query head h reads KV head h // (H / Hkv)), T tokens, d head size, n kept tokens.
Definitions compute in float64 and are the oracle for the float32 kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pykvedge.errors import UsageError
from pykvedge.native.abi import Setting, text

if TYPE_CHECKING:
    import numpy as np

    from pykvedge.reference.stages.replay import Replay
    from pykvedge.reference.stages.rotation import Rotation

Settings = Mapping[str, Any]


FLAG = ("true", "false")  # the choices of a setting that is a switch


@dataclass(frozen=True)
class Param:
    """One setting of a stage member. Plans and commands name the setting "<stage>.<name>"."""

    name: str
    default: int | float | bool | str
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    step: int = 1  # a whole number must be `low` plus a multiple of `step`

    @classmethod
    def declared(cls, s: Setting) -> Param:
        """Returns the Param of a setting that C code declares. Raises UsageError if its fallback is invalid."""
        name, help_text, choices = text(s.name), text(s.help), tuple(text(s.choices).split(",")) if s.choices else ()
        if choices == FLAG:
            return cls(name, s.fallback == 0, help_text)
        if choices:
            out = cls(name, dict(enumerate(choices)).get(int(s.fallback), ""), help_text, choices=choices)
        elif s.step:
            out = cls(name, int(s.fallback), help_text, int(s.lowest), int(s.highest), step=s.step)
        else:
            out = cls(name, s.fallback, help_text, s.lowest, s.highest)
        out.check(out.default, name)
        return out

    def number(self, value: Any) -> float:
        """Returns `value` as the number for C code. A word becomes its index in `choices`; true is 0, false is 1."""
        if isinstance(self.default, bool):
            return float(not value)
        return float(self.choices.index(value) if self.choices else value)

    def check(self, value: Any, key: str) -> int | float | bool | str:
        """Returns `value` converted to the type of the default. Raises UsageError if `value` is invalid."""
        kind = type(self.default)
        try:
            out = _parse_bool(value) if kind is bool else kind(value)
        except (TypeError, ValueError, OverflowError):  # OverflowError: int(infinity)
            raise UsageError(f"{key} must be {_KINDS[kind]}, not {value!r:.40}") from None
        if isinstance(out, float) and not math.isfinite(out):
            raise UsageError(f"{key} must be {_KINDS[kind]}, not {value!r:.40}")
        cut = kind is int and isinstance(value, float) and value != out
        if cut or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{key} must be {_KINDS[kind]}, not {value!r}")
        if self.choices and out not in self.choices:
            raise UsageError(f"{key} must be one of {', '.join(self.choices)}, not {value!r}")
        number = out if isinstance(out, (int, float)) else 0
        if (self.low is not None and number < self.low) or (self.high is not None and number > self.high):
            raise UsageError(f"{key} must lie between {self.low} and {self.high}, not {value!r}")
        if self.step > 1 and (number - (self.low or 0)) % self.step:
            raise UsageError(f"{key} must be {self.low:g} plus a multiple of {self.step}, not {value!r}")
        return out


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise ValueError(value)


@dataclass(frozen=True, eq=False)  # eq=False: a layer is hashed by identity, so results can be cached per layer
class Layer:
    """One layer of a prompt, as a scorer receives it."""

    q: np.ndarray  # [H, T, d] float32, rotated by position; a plugin receives the last n queries: [H, n, d]
    k: np.ndarray  # [Hkv, T, d] float32, rounded to the storage type, rotated by position
    v: np.ndarray  # [Hkv, T, d] float32, rounded to the storage type
    image_mask: np.ndarray  # [T] bool
    index: int = 0  # number of the layer among the compressed layers
    n_layers: int = 1  # number of compressed layers
    # [Hkv, T] float32 scores of scorer `cumulative`; for plugins that ask, and for streams, whose old queries are gone
    column_sums: np.ndarray | None = None
    profile: np.ndarray | None = None  # [Hkv] float32 calibrated numbers; None: the scorer needs no profile
    rotation: Rotation | None = None  # rotary encoding of q and k; None: no rotary encoding
    tokens: np.ndarray | None = None  # [Hkv, T] token indices (positions) of a stream's rows; None: 0 to T - 1
    replay: Replay | None = None  # second pass over the prompt, with all layers; None: no second pass
    all_q: np.ndarray | None = None  # [H, n, d] all queries of a stream, from position 0 on; None: `q` has all
    bias: np.ndarray | None = None  # [Hkv, T] float32 added to the logits of merged rows of a stream; None: 0
    projection: np.ndarray | None = None  # [H, d, D] float32 part of W_O for each query head; None: unknown


@dataclass(frozen=True)
class ProfileTable:
    """The numbers of a calibrated profile (pykvedge/plans/profile.py): one row per layer."""

    values: np.ndarray  # float32: [L, H] per query head, [L, Hkv] per KV head, or [L, n] kept shares per budget
    budgets: np.ndarray  # [n] float32, ascending, in (0, 1]; empty if `values` are numbers of heads


@dataclass(frozen=True)
class Prompt:
    """A whole prompt, as an allocator receives it."""

    scores: np.ndarray  # [L, Hkv, T] float64
    image_mask: np.ndarray  # [T] bool
    budget: int  # n: KV pairs per layer and head on average, 1 <= n < T
    recent: int = 0  # last tokens that every head keeps, counted in the budget
    layers: tuple[Layer, ...] = ()  # L layers; empty only if the allocator reads nothing but scores
    profile: ProfileTable | None = None  # None: the allocator needs no profile
    attention: np.ndarray | None = None  # [L, Hkv, T] float64 attention part of the scores; None: `scores` itself
    fixed_recent: int = 0  # `recent` if the plan gives a value for it, 0 for `auto`: the least share of a head
    variation: np.ndarray | None = None  # [L, Hkv] float64 variation of image tokens' values; None: not measured


@dataclass(frozen=True)
class Head:
    """One KV head after the selection of tokens, as a reducer receives it."""

    k: np.ndarray  # [T, d] float32 in storage precision
    v: np.ndarray  # [T, d]
    kept: np.ndarray  # [n] int32 token indices, ascending
    protected: np.ndarray  # [T] bool
    layer: int = 0  # number of the layer among the compressed layers
    n_layers: int = 1
    index: int = 0  # number of the KV head in its layer
    bias: np.ndarray | None = None  # [T] float32 added to the logits of the rows; None: all 0
    q: np.ndarray | None = None  # [H / Hkv, T, d] float32 queries of the query heads of this KV head; None: unknown


@dataclass(frozen=True)
class Result:
    """The rows of a prompt that stay after compression, per layer l and KV head h.

    kept[l][h]: [n] int32 original token indices, ascending. k[l][h], v[l][h]: [n, d] float32, rows in the order of
    `kept`, merged if the plan merges. scores: [L, Hkv, T] float32. bias[l][h]: [n] float32 natural logarithms, added
    to the logits of the rows before the softmax; 0 for a row that was not merged.
    """

    kept: list[list[np.ndarray]]
    k: list[list[np.ndarray]]
    v: list[list[np.ndarray]]
    scores: np.ndarray
    bias: list[list[np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True)
class DecodeState:
    """One KV head after a generated token, as a decode policy receives it."""

    prompt: int  # T: tokens of the sequence at the last compression of a prompt
    kept: int  # rows of the head right after that compression, plus the unused part of a budget in pairs
    budget: int  # rows of a head under an even share of the budget
    generated: int  # tokens generated since that compression
    length: int  # rows of the head now
    sinks: int  # first rows that are never dropped
    recent: int = 0  # last rows that the plan protects if a head keeps so many; 0: not given
    scores: np.ndarray | None = None  # [length] attention that each row received so far; None: not asked for


@dataclass(frozen=True)
class Member:
    """A member of any stage. by_place: the result for a head depends on the number of the head or of its layer, for
    example because ties go to the lower head.
    """

    stage: ClassVar[str]
    name: str
    summary: str
    source: str
    params: tuple[Param, ...] = field(default=(), kw_only=True)
    by_place: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Scorer(Member):
    """A scorer says how much a KV pair matters: `score(layer, settings)` -> [Hkv, T] float64, the largest are kept.

    `reserve` is an optional second score of the same shape. Among unprotected tokens, the `reserved(kept, settings)`
    tokens with the largest second score stay; `score` chooses the other tokens.
    `auto_recent(kept, even, settings)` returns the number of last tokens that a head of `kept` pairs keeps if the plan
    gives no number. `even`: pairs of an even share of the budget.
    `attention` returns the attention part of the scores, for a scorer that mixes attention with other terms.
    `variation` returns [Hkv], the variation of values along the tokens, or None if the scorer does not measure it.
    `profile` names the kind of calibrated numbers that the settings need. Layer.profile holds the numbers.
    """

    score: Callable[[Layer, Settings], np.ndarray]
    auto_recent: Callable[[int, int, Settings], int] = lambda kept, even, settings: 0
    whole_up_to: Callable[[Settings], int] = lambda settings: 0  # prompts up to this number of tokens are kept whole
    sinks_first: bool = False  # the sinks shrink after the recent tokens if the budget is too small for both
    reserve: Callable[[Layer, Settings], np.ndarray] | None = None
    reserved: Callable[[int, Settings], int] = lambda kept, settings: 0
    attention: Callable[[Layer, Settings], np.ndarray] | None = None
    variation: Callable[[Layer, Settings], np.ndarray | None] | None = None
    profile: Callable[[Settings], str | None] = lambda settings: None
    attends: Callable[[Settings], bool] = lambda settings: False  # the scores are attention alone (critical.py)
    projects: Callable[[Settings], bool] = lambda settings: False  # the scorer needs Layer.projection
    stage = "scorer"


@dataclass(frozen=True)
class Allocator(Member):
    """An allocator says how many KV pairs each head keeps: `allocate(prompt, settings)` -> [L, Hkv] int64."""

    allocate: Callable[[Prompt, Settings], np.ndarray]
    profile: Callable[[Settings], str | None] = lambda settings: None
    does_without: Callable[[Settings], bool] = lambda settings: False  # the allocator works without a profile
    stage = "allocator"


@dataclass(frozen=True)
class Reducer(Member):
    """A reducer says what becomes of evicted pairs: `reduce(head, settings)` -> k, v [n, d] float64.

    Rows are in the order of kept. A reducer that sets biases returns a third array: [n] float64. Otherwise kept
    rows keep their biases.
    """

    reduce: Callable[[Head, Settings], tuple[np.ndarray, ...]]
    queries: bool = False  # the reducer reads the prompt's queries, so all queries are stored until compression
    stage = "reducer"


@dataclass(frozen=True)
class DecodePolicy(Member):
    """A decode policy drops rows while tokens are generated: `evict(state, settings)` -> the row to drop, or None."""

    evict: Callable[[DecodeState, Settings], int | None]
    stage = "decode"


@dataclass(frozen=True)
class ImageRows:
    """The rows of one image, or of one tile of an image, as a pruner receives them: the encoder's output."""

    rows: np.ndarray  # [N, D] float32
    place: tuple[int, int] | None = None  # (down, across) of the image's grid, stored row by row; None: unknown

    @property
    def grid(self) -> tuple[int, int]:
        """(down, across): the grid of the rows; one line if the grid is unknown."""
        return self.place or (1, len(self.rows))

    def unit(self) -> np.ndarray:
        """Returns the rows [N, D] in float64, scaled to length 1. A row of zeros stays zero."""
        import numpy as np

        rows = self.rows.astype(np.float64)
        length = np.sqrt((rows**2).sum(axis=1, keepdims=True))
        return rows / np.where(length > 0, length, 1.0)


@dataclass(frozen=True)
class Pruner(Member):
    """A pruner says which rows of an image the model reads: `prune(image, n, settings)` -> [<= n] rows, ascending.

    1 <= n <= N.
    """

    prune: Callable[[ImageRows, int, Settings], np.ndarray]
    stage = "pruner"
