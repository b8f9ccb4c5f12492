"""A stage member is one of these types, which every file in stages/<stage>/ fills in.

Symbols: H query heads, Hkv KV heads (query head h reads KV head h // (H / Hkv)), T tokens, d head size, n kept tokens.
Definitions compute in float64, so that they can serve as the oracle for the float32 kernels.
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
    """A Param is one setting of a member, which is set as "<stage>.<name>"."""

    name: str
    default: int | float | bool | str
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    step: int = 1  # whole numbers: low + a multiple of it

    @classmethod
    def declared(cls, s: Setting) -> Param:
        """Takes a setting of the library or of a plugin in C. Raises UsageError for a fallback that is not allowed."""
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
        """Turns a value into what the library hands to a stage in C: of words, and of true and false, the index."""
        if isinstance(self.default, bool):
            return float(not value)
        return float(self.choices.index(value) if self.choices else value)

    def check(self, value: Any, key: str) -> int | float | bool | str:
        """Returns `value` as the type of the default. Raises UsageError when it does not fit."""
        kind = type(self.default)
        try:
            out = _parse_bool(value) if kind is bool else kind(value)
        except (TypeError, ValueError, OverflowError):  # of infinity there is no whole number
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


@dataclass(frozen=True, eq=False)  # a layer is itself: what was computed of it can be looked up
class Layer:
    """A scorer sees one layer of a prompt like this."""

    q: np.ndarray  # [H, T, d] float32, position encoding applied; plugins see the last n, [H, n, d]
    k: np.ndarray  # [Hkv, T, d] float32 that the storage type can represent, position encoding applied
    v: np.ndarray  # [Hkv, T, d]
    image_mask: np.ndarray  # [T] bool
    index: int = 0  # of the layer, among those that are compressed
    n_layers: int = 1  # that are compressed
    # [Hkv, T] as scorer cumulative has them; for plugins that ask, and of a stream, whose earlier queries are gone
    column_sums: np.ndarray | None = None
    profile: np.ndarray | None = None  # [Hkv] float32 calibrated numbers; None where the scorer asked for none
    rotation: Rotation | None = None  # of queries and keys by their positions; None: they are not turned
    tokens: np.ndarray | None = None  # [Hkv, T] token indices, which are positions, of a stream; None: 0 to T - 1
    replay: Replay | None = None  # a second pass over the prompt, of all layers; None: there was none
    all_q: np.ndarray | None = None  # [H, n, d] all queries of a stream so far, from position 0 on; None: q are all
    bias: np.ndarray | None = None  # [Hkv, T] float32 of the logits, of a stream whose rows were merged; None: 0
    projection: np.ndarray | None = None  # [H, d, D] float32 the heads' parts of W_O; None: it is not known


@dataclass(frozen=True)
class ProfileTable:
    """These are the numbers of a calibrated profile (pykvedge/plans/profile.py), one row for every layer."""

    values: np.ndarray  # float32: [L, H] of query heads, [L, Hkv] of KV heads, or [L, n] kept shares at each budget
    budgets: np.ndarray  # [n] float32 ascending in (0, 1]; empty for numbers of heads


@dataclass(frozen=True)
class Prompt:
    """An allocator sees the whole prompt like this."""

    scores: np.ndarray  # [L, Hkv, T] float64
    image_mask: np.ndarray  # [T] bool
    budget: int  # n: KV pairs per layer and head if shared out evenly, 1 <= n < T
    recent: int = 0  # of those, last tokens that every head keeps
    layers: tuple[Layer, ...] = ()  # L of them; empty only where the allocator looks at nothing but scores
    profile: ProfileTable | None = None  # None where the allocator asked for none
    attention: np.ndarray | None = None  # as scores, of a scorer that mixes it with more; None: scores are all
    fixed_recent: int = 0  # of recent, those that the plan asks for by number: a head with a smaller share has no less
    variation: np.ndarray | None = None  # [L, Hkv] float64 of the values of image tokens; None: the scorer knows none


@dataclass(frozen=True)
class Head:
    """A reducer sees one KV head after selection like this."""

    k: np.ndarray  # [T, d] float32 in storage precision
    v: np.ndarray  # [T, d]
    kept: np.ndarray  # [n] int32 token indices, ascending
    protected: np.ndarray  # [T] bool
    layer: int = 0  # as Layer.index
    n_layers: int = 1
    index: int = 0  # of the head in its layer
    bias: np.ndarray | None = None  # [T] float32 of the rows' logits; None: all 0
    q: np.ndarray | None = None  # [H / Hkv, T, d] float32 queries of the heads that share it; None: they are not known


@dataclass(frozen=True)
class Result:
    """This is left of a prompt, per layer and KV head.

    kept[l][h]: [n] int32, original token indices, ascending. k[l][h], v[l][h]: [n, d] float32, rows in the order of
    kept, merged where the plan merges. scores: [L, Hkv, T] float32. bias[l][h]: [n] float32, natural logarithms that
    are added to the rows' logits before the softmax; 0 of rows that stand for themselves.
    """

    kept: list[list[np.ndarray]]
    k: list[list[np.ndarray]]
    v: list[list[np.ndarray]]
    scores: np.ndarray
    bias: list[list[np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True)
class DecodeState:
    """A decode policy sees one KV head after a generated token like this."""

    prompt: int  # T: tokens of the sequence when its last prompt was compressed
    kept: int  # rows that the head held right after that, and what a budget in pairs left unused
    budget: int  # rows that an even share of the budget would have held
    generated: int  # tokens since then
    length: int  # rows that the head holds now
    sinks: int  # first rows that stay
    recent: int = 0  # last rows that the plan protects when a head keeps that many; 0: it does not say
    scores: np.ndarray | None = None  # [length] attention that each row received so far; None unless asked for


@dataclass(frozen=True)
class Member:
    """A member of any stage. by_place: what it makes of a head depends on the number of the head or its layer, and be
    it for equal remainders.
    """

    stage: ClassVar[str]
    name: str
    summary: str
    source: str
    params: tuple[Param, ...] = field(default=(), kw_only=True)
    by_place: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Scorer(Member):
    """How much does a KV pair matter? `score(layer, settings)` -> [Hkv, T] float64, higher is kept first.

    A method that keeps some tokens for another reason has a second score, `reserve`, of the same shape: of the tokens
    that are not protected, the `reserved(kept, settings)` best by it stay, and the others are chosen by `score`.
    `auto_recent(kept, even, settings)` says how many last tokens a head of `kept` pairs keeps if the plan names no
    number, where an even share of the budget is `even` pairs.
    A scorer that mixes attention with something else gives the attention alone as `attention`.
    One that measures how much values vary along the tokens gives it as `variation`, [Hkv] or None.
    One that needs calibrated numbers with some settings names their kind in `profile`, and finds them in its layers.
    """

    score: Callable[[Layer, Settings], np.ndarray]
    auto_recent: Callable[[int, int, Settings], int] = lambda kept, even, settings: 0
    whole_up_to: Callable[[Settings], int] = lambda settings: 0  # longest prompt that is kept whole anyway
    sinks_first: bool = False  # which protection shrinks last when the budget does not cover both
    reserve: Callable[[Layer, Settings], np.ndarray] | None = None
    reserved: Callable[[int, Settings], int] = lambda kept, settings: 0
    attention: Callable[[Layer, Settings], np.ndarray] | None = None
    variation: Callable[[Layer, Settings], np.ndarray | None] | None = None
    profile: Callable[[Settings], str | None] = lambda settings: None
    attends: Callable[[Settings], bool] = lambda settings: False  # scores are attention alone (critical.py)
    projects: Callable[[Settings], bool] = lambda settings: False  # it needs Layer.projection
    stage = "scorer"


@dataclass(frozen=True)
class Allocator(Member):
    """How many KV pairs does each layer and head keep? `allocate(prompt, settings)` -> [L, Hkv] int64."""

    allocate: Callable[[Prompt, Settings], np.ndarray]
    profile: Callable[[Settings], str | None] = lambda settings: None
    does_without: Callable[[Settings], bool] = lambda settings: False  # where a model has no profile
    stage = "allocator"


@dataclass(frozen=True)
class Reducer(Member):
    """What becomes of the evicted pairs? `reduce(head, settings)` -> rows k, v [n, d] float64 in the order of kept.

    One that gives rows biases returns a third array, b [n] float64; else kept rows keep those that they have.
    """

    reduce: Callable[[Head, Settings], tuple[np.ndarray, ...]]
    queries: bool = False  # whether it looks at the prompt's queries, which are then kept until it is compressed
    stage = "reducer"


@dataclass(frozen=True)
class DecodePolicy(Member):
    """What happens as tokens are generated? `evict(state, settings)` -> the row to drop after a token, or None."""

    evict: Callable[[DecodeState, Settings], int | None]
    stage = "decode"


@dataclass(frozen=True)
class ImageRows:
    """A pruner sees one image, or one tile of it, like this: what the encoder made, before the model reads it."""

    rows: np.ndarray  # [N, D] float32
    place: tuple[int, int] | None = None  # (down, across), row by row; None: what each row shows is not known

    @property
    def grid(self) -> tuple[int, int]:
        """(down, across) of the rows, which lie in one line where their places are not known."""
        return self.place or (1, len(self.rows))

    def unit(self) -> np.ndarray:
        """The rows [N, D] in float64 with length 1; a row of zeros stays one."""
        import numpy as np

        rows = self.rows.astype(np.float64)
        length = np.sqrt((rows**2).sum(axis=1, keepdims=True))
        return rows / np.where(length > 0, length, 1.0)


@dataclass(frozen=True)
class Pruner(Member):
    """Which rows of an image does the model read? `prune(image, n, settings)` -> [at most n] rows, ascending.

    1 <= n <= N.
    """

    prune: Callable[[ImageRows, int, Settings], np.ndarray]
    stage = "pruner"
