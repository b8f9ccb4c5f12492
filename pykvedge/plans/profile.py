"""A Profile holds numbers of a model that `kvedge calibrate` measured once and that the prompt does not show.

A profile is a JSON file of one model, named in it by a hash. A plan holds no profiles: it says which kinds its stages
need (allocator heads; prefix or scorer mixkv with source = profile), so it fits many models. When a plan meets a model,
each stage gets a profile (models/profiles.py): a given file that fits the stage, else a file in the user's folder, else
a file of kvedge (pykvedge/data/profiles).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pykvedge.errors import ProfileError
from pykvedge.plans.plan import Plan
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.system.files import require_file, write_whole

JSON_VERSION = 1
# kind -> the command that makes a profile of this kind
KINDS = {
    "visual-heads": "kvedge calibrate heads",
    "retrieval-heads": "kvedge calibrate heads --kind retrieval",
    "prefix": "kvedge calibrate prefix",
    "key-redundancy": "kvedge calibrate heads --kind redundancy",
    "head-budgets": "kvedge calibrate budgets",
}
# kind -> what a column stands for; a row is a layer. A stage takes every kind with the same columns.
COLUMNS = {
    "visual-heads": "query heads",
    "retrieval-heads": "query heads",
    "prefix": "budgets",
    "key-redundancy": "KV heads",
    "head-budgets": "KV heads' shares",
}
ROUNDED = 1e-3  # rounding error of the sum of shares that are written with six digits
LARGEST_FILE = 16 << 20  # bytes; a model of 100 layers and 100 heads needs 0.1 MB


@dataclass(frozen=True)
class Profile:
    """Numbers of a model, one row per layer. values: [L, H] (heads), [L, budgets] (prefix: kept shares), or [L, Hkv]
    (key-redundancy: mean cosine similarity of a KV head's keys, in [0, 1]; head-budgets: shares of all pairs, sum 1).
    """

    kind: str  # one of KINDS
    values: np.ndarray  # float64
    budgets: tuple[float, ...] = ()  # prefix: ascending in (0, 1]
    model_hash: str = ""  # from models/profiles.py; empty: fits any model with the same shape
    samples: int = 0  # number of samples in the mean
    about: Mapping[str, Any] = field(default_factory=dict)  # `made`: how it was made; `model`: data of the model

    def __post_init__(self) -> None:
        """Raises ProfileError if the numbers are no valid profile."""
        if self.kind not in KINDS:
            raise ProfileError(f"the kind of a profile must be one of {', '.join(KINDS)}, not {self.kind!r}")
        values = np.asarray(self.values, dtype=np.float64)
        if values.ndim != 2 or 0 in values.shape:
            raise ProfileError("a profile must have one row of numbers for each layer")
        if not np.isfinite(values).all() or values.min() < 0 or values.max() > np.finfo(np.float32).max:
            raise ProfileError("the numbers of a profile must be finite and not negative")
        if self.kind == "prefix":
            low = (0.0, *self.budgets)
            rising = all(a < b <= 1 for a, b in zip(low, self.budgets, strict=False))
            if len(self.budgets) != values.shape[1] or not rising or values.max() > 1:
                raise ProfileError("a prefix profile must have shares up to 1, for budgets up to 1 in ascending order")
        elif self.kind == "key-redundancy":
            if self.budgets or values.max() > 1:
                raise ProfileError("a key-redundancy profile must have numbers up to 1, and no budgets")
        elif self.kind == "head-budgets":
            if self.budgets or abs(values.sum() - 1) > ROUNDED:
                raise ProfileError("a head-budgets profile must have shares that add up to 1, and no budgets")
        elif self.budgets or not values.any():
            raise ProfileError("a profile of heads must have a score above 0, and no budgets")
        object.__setattr__(self, "values", values)

    @property
    def table(self) -> ProfileTable:
        """The numbers for stages, rounded to float32 for both engines."""
        return ProfileTable(self.values.astype(np.float32), np.array(self.budgets, dtype=np.float32))

    def to_json(self) -> str:
        """Returns one JSON object that from_json reads back, with one line per row of numbers."""
        head = {
            "kvedge_profile": JSON_VERSION,
            "kind": self.kind,
            "model": {"hash": self.model_hash, **self.about.get("model", {})},
            "samples": self.samples,
            "made": self.about.get("made", {}),
        }
        if self.budgets:
            head["budgets"] = list(self.budgets)
        rows = ",\n  ".join(json.dumps([float(f"{x:.6g}") for x in row]) for row in self.values)
        return json.dumps(head, indent=1)[:-2] + f',\n "values": [\n  {rows}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads a profile. Raises ProfileError with a one-line reason if the text is no profile."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise ProfileError("not a profile: the file is not JSON") from None
        if not isinstance(data, dict) or "kvedge_profile" not in data:
            raise ProfileError('not a profile: a JSON object with "kvedge_profile" was expected')
        if data["kvedge_profile"] != JSON_VERSION:
            raise ProfileError(f"the profile does not have version {JSON_VERSION}; update kvedge, or calibrate again")
        model, made, samples = data.get("model"), data.get("made", {}), data.get("samples")
        if not isinstance(model, dict) or not isinstance(model.get("hash"), str) or not model["hash"]:
            raise ProfileError("the profile does not name its model; calibrate again")
        if not isinstance(made, dict) or isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ProfileError("the profile has no valid fields 'made' and 'samples'; calibrate again")
        about = {"model": {k: v for k, v in model.items() if k != "hash"}, "made": made}
        values, budgets = _rows(data.get("values")), _numbers(data.get("budgets", []))
        return cls(str(data.get("kind")), values, tuple(budgets), model["hash"], samples, about)


OneGiven = Profile | str | os.PathLike[str]
Given = OneGiven | Sequence[OneGiven] | None  # none, one, or several profiles for different stages


def _numbers(row: Any) -> list[float]:
    if not isinstance(row, list) or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in row):
        raise ProfileError("the profile is damaged: rows of numbers were expected")
    try:
        return [float(x) for x in row]
    except OverflowError:
        raise ProfileError("the profile is damaged: a number is too large") from None


def _rows(values: Any) -> np.ndarray:
    rows = [_numbers(row) for row in values] if isinstance(values, list) else []
    if not rows or len({len(row) for row in rows}) != 1:
        raise ProfileError("the profile is damaged: one row for each layer was expected, all of the same length")
    return np.array(rows, dtype=np.float64)


def load(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile from a file. Raises ProfileError if the file is unreadable or no profile."""
    try:
        path = Path(path).expanduser()
        require_file(path)
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ProfileError("not a profile: the file is too large")
        return Profile.from_json(data.decode("utf-8"))
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        raise ProfileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{path}: not a profile: the file is not UTF-8 text") from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes the whole file or nothing. Raises ProfileError."""
    path = Path(path).expanduser()
    try:
        write_whole(path, profile.to_json())
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror or error}") from None


def for_arrays(plan: Plan, given: Given, n_layers: int, n_heads: int, n_heads_kv: int) -> dict[str, Profile]:
    """Returns stage -> profile for arrays of n_layers layers, n_heads query heads and n_heads_kv KV heads.

    Raises ProfileError if a profile is missing, invalid, does not fit a stage, or has another shape.
    """
    kinds = plan.profile_kinds()
    out = {stage: profile for stage, (_, profile) in assigned(plan, given, spare=False).items()}
    for stage, kind in kinds.items():
        if stage not in out and plan.does_without(stage):
            continue
        if stage not in out:
            raise missing(plan, stage, "")
        found = out[stage].values.shape
        columns = len(out[stage].budgets) if kind == "prefix" else n_heads if "query" in COLUMNS[kind] else n_heads_kv
        if found != (n_layers, columns):
            raise ProfileError(
                f"the profile belongs to another model: the profile has {found[0]} layers of {found[1]} numbers, "
                f"not {n_layers} of {columns}; use a profile of this model"
            )
    return out


def _several(given: Given) -> list[Profile | str | os.PathLike[str]]:
    several = [given] if isinstance(given, (Profile, str, os.PathLike)) else given
    if several is None:
        return []
    if not isinstance(several, Sequence) or not all(isinstance(x, (Profile, str, os.PathLike)) for x in several):
        raise ProfileError(f"a profile must be a Profile, the path of a file, or a list of these, not {given!r:.40}")
    return list(several)


def assigned(plan: Plan, given: Given, spare: bool) -> dict[str, tuple[str, Profile]]:
    """Assigns given profiles to stages. Returns stage -> (name of the profile in messages, profile).

    spare: a profile that fits no stage is ignored; otherwise it raises ProfileError.
    """
    kinds = plan.profile_kinds()
    out: dict[str, tuple[str, Profile]] = {}
    for one in _several(given) if kinds else []:
        profile = one if isinstance(one, Profile) else load(one)
        stage = next((stage for stage, kind in kinds.items() if COLUMNS[profile.kind] == COLUMNS[kind]), None)
        if stage is None and spare:
            continue
        if stage is None:
            raise misfit(plan, list(kinds), profile)
        if stage in out:
            raise ProfileError(f"two profiles were given for {stage} '{getattr(plan, stage)}'; give one profile")
        out[stage] = "the profile" if isinstance(one, Profile) else str(one), profile
    return out


def misfit(plan: Plan, stages: list[str], profile: Profile) -> ProfileError:
    """Returns the error for a profile that fits none of the stages.

    Visual and retrieval scores of query heads fit the same stages; the command names the preferred kind.
    """
    kinds = plan.profile_kinds()
    members = " or ".join(f"{stage} '{getattr(plan, stage)}'" for stage in stages)
    commands = " or ".join(f"`{KINDS[kinds[stage]]}`" for stage in stages)
    return ProfileError(f"a profile of kind '{profile.kind}' does not fit {members}; make a profile with {commands}")


def missing(plan: Plan, stage: str, of_model: str) -> ProfileError:
    """Returns the error for a stage without a profile. of_model: "of NAME ", or ""."""
    kind = plan.profile_kinds()[stage]
    return ProfileError(
        f"method '{plan.method}' needs a {kind} profile {of_model}({stage} '{getattr(plan, stage)}'), but no profile "
        f"was found; make a profile with `{KINDS[kind]}`"
    )
