"""Profiles: what `kvedge calibrate` measured of a model once, for methods whose budgets are not found in the prompt.

A profile is a JSON file of one model, which it names by a hash. A plan does not hold its profile: it says what it needs
(allocator heads, or prefix with source = profile), and travels between models. The profile is found when the plan meets
a model: the file that was given, else the user's folder (`folder()`), else what kvedge ships (pykvedge/data/profiles).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvedge.errors import ModelError, ProfileError
from pykvedge.stages.base import ProfileTable

if TYPE_CHECKING:
    from pykvedge.plan import Plan

JSON_VERSION = 1
# kind -> the command that makes one
KINDS = {
    "visual-heads": "kvedge calibrate heads",
    "retrieval-heads": "kvedge calibrate heads --kind retrieval",
    "prefix": "kvedge calibrate prefix",
}
LARGEST_FILE = 16 << 20  # bytes; a model of 100 layers and 100 heads takes a tenth of one of those megabytes
_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10
SHIPPED = Path(__file__).parent / "data" / "profiles"


@dataclass(frozen=True)
class Profile:
    """Numbers of a model: values [L, H] (heads) or [L, budgets] (prefix: kept shares), rows by the model's layers."""

    kind: str  # one of KINDS
    values: np.ndarray  # float64
    budgets: tuple[float, ...] = ()  # prefix: ascending in (0, 1]
    model_hash: str = ""  # of hash_of; empty fits any model of its shape
    samples: int = 0  # that it is the mean of
    about: Mapping[str, Any] = field(default_factory=dict)  # how it was made, and which model that was

    def __post_init__(self) -> None:
        """Raises ProfileError for numbers that make no profile."""
        if self.kind not in KINDS:
            raise ProfileError(f"a profile is one of {', '.join(KINDS)}, not {self.kind!r}")
        values = np.asarray(self.values, dtype=np.float64)
        if values.ndim != 2 or 0 in values.shape:
            raise ProfileError("a profile holds one row of numbers for every layer")
        if not np.isfinite(values).all() or values.min() < 0 or values.max() > np.finfo(np.float32).max:
            raise ProfileError("a profile holds numbers that are finite and not negative")
        if self.kind == "prefix":
            low = (0.0, *self.budgets)
            rising = all(a < b <= 1 for a, b in zip(low, self.budgets, strict=False))
            if len(self.budgets) != values.shape[1] or not rising or values.max() > 1:
                raise ProfileError("a prefix profile holds shares up to 1, for budgets up to 1 in ascending order")
        elif self.budgets or not values.any():
            raise ProfileError("a profile of heads holds scores, some of them above 0, and no budgets")
        object.__setattr__(self, "values", values)

    @property
    def table(self) -> ProfileTable:
        """The numbers alone, as stages take them: in float32's precision, on both engines."""
        return ProfileTable(self.values.astype(np.float32), np.array(self.budgets, dtype=np.float32))

    def to_json(self) -> str:
        """One JSON object that from_json reads back, a row of numbers a line."""
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
        """Raises ProfileError, one line that says what is wrong, for anything that is no profile."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise ProfileError("not a profile: no JSON") from None
        if not isinstance(data, dict) or "kvedge_profile" not in data:
            raise ProfileError('not a profile: a JSON object with "kvedge_profile" was expected')
        if data["kvedge_profile"] != JSON_VERSION:
            raise ProfileError(f"a profile of another version than {JSON_VERSION}; update kvedge, or calibrate again")
        model, made, samples = data.get("model"), data.get("made", {}), data.get("samples")
        if not isinstance(model, dict) or not isinstance(model.get("hash"), str) or not model["hash"]:
            raise ProfileError("a profile that does not name its model; calibrate again")
        if not isinstance(made, dict) or isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ProfileError("a profile that does not say how it was made; calibrate again")
        about = {"model": {k: v for k, v in model.items() if k != "hash"}, "made": made}
        values, budgets = _rows(data.get("values")), _numbers(data.get("budgets", []))
        return cls(str(data.get("kind")), values, tuple(budgets), model["hash"], samples, about)


def _numbers(row: Any) -> list[float]:
    if not isinstance(row, list) or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in row):
        raise ProfileError("a damaged profile: rows of numbers were expected")
    try:
        return [float(x) for x in row]
    except OverflowError:
        raise ProfileError("a damaged profile: a number is too large") from None


def _rows(values: Any) -> np.ndarray:
    rows = [_numbers(row) for row in values] if isinstance(values, list) else []
    if not rows or len({len(row) for row in rows}) != 1:
        raise ProfileError("a damaged profile: one row for every layer was expected, all of one length")
    return np.array(rows, dtype=np.float64)


def load(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file. Raises ProfileError if it cannot be read or is none."""
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ProfileError("not a profile: it is too large")
        return Profile.from_json(data.decode("utf-8"))
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{path}: not a profile: it is not text") from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes the file whole or not at all. Raises ProfileError."""
    path = Path(path).expanduser()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(profile.to_json())
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror or error}") from None


# ------------------------------------------------------------------------------------------------------------


def hash_of(model: str | os.PathLike[str]) -> str:
    """Names the weights in a GGUF file: "sampled-sha256:" and 64 hexadecimal digits.

    The hash is of the file's size, of its whole header (metadata, vocabulary, names, types and places of all tensors),
    and of 64 pieces of 64 KiB spread evenly over the data, or of all the data where that is less: a fine-tuned or
    requantised model differs in all of them, and a file of any size takes a moment. Raises ModelError.
    """
    from pykvedge.gguf import read_header

    header = read_header(model)
    digest = hashlib.sha256(f"{header.file_size};{header.data_start};".encode())
    data, most = header.file_size - header.data_start, _SAMPLES * _SAMPLE_BYTES
    try:
        with Path(model).open("rb") as file:
            digest.update(file.read(header.data_start))
            if data <= most:
                digest.update(file.read())
            for i in range(_SAMPLES if data > most else 0):
                file.seek(header.data_start + (data - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error.strerror or error}") from None
    return "sampled-sha256:" + digest.hexdigest()


def folder() -> Path:
    """Where the user's own profiles lie."""
    import click

    return Path(click.get_app_dir("kvedge")) / "profiles"


def file_name(kind: str, model_hash: str) -> str:
    """Name of a profile in the user's folder, and among those that kvedge ships."""
    return f"{kind}-{model_hash.rpartition(':')[2][:16]}.json"


def find(plan: Plan, model: str | os.PathLike[str], given: Profile | str | os.PathLike[str] | None) -> Profile | None:
    """The profile that the plan needs for a GGUF file; None if it needs none.

    given: a profile or its file, instead of the one that lies ready. Raises ProfileError if it is missing, damaged, of
    another kind, or of another model.
    """
    kind = plan.profile_kind()
    if kind is None:
        return None
    if given is None:
        wanted = hash_of(model)
        places = [place / file_name(kind, wanted) for place in (folder(), SHIPPED)]
        given = next((path for path in places if path.is_file()), None)
        if given is None:
            raise _missing(plan, kind, f"of {Path(model).name} ")
    profile = given if isinstance(given, Profile) else load(given)
    _check_kind(plan, profile)
    if profile.model_hash and profile.model_hash != hash_of(model):
        name = profile.about.get("model", {}).get("name")
        other = f"was made for {name!r}" if isinstance(name, str) else "was made for another model"
        where = "the profile" if isinstance(given, Profile) else str(given)
        raise ProfileError(f"{where} {other}, not for the weights in {Path(model).name}; run `{KINDS[kind]}` for these")
    return profile


def table_for(
    plan: Plan, model: str | os.PathLike[str], given: Profile | str | os.PathLike[str] | None = None
) -> ProfileTable | None:
    """The numbers of what `find` finds. Raises as it does."""
    found = find(plan, model, given)
    return found.table if found else None


def for_arrays(
    plan: Plan, given: Profile | str | os.PathLike[str] | None, n_layers: int, n_heads: int
) -> Profile | None:
    """The profile that the plan needs for arrays of that many layers and query heads. Raises ProfileError."""
    kind = plan.profile_kind()
    if kind is None:
        return None
    if given is None:
        raise _missing(plan, kind, "")
    profile = given if isinstance(given, Profile) else load(given)
    _check_kind(plan, profile)
    shape = (n_layers, n_heads if kind != "prefix" else len(profile.budgets))
    if profile.values.shape != shape:
        raise ProfileError(
            f"the profile has {profile.values.shape[0]} layers of {profile.values.shape[1]} numbers, "
            f"{shape[0]} of {shape[1]} are needed; it belongs to another model"
        )
    return profile


def _missing(plan: Plan, kind: str, of_model: str) -> ProfileError:
    return ProfileError(
        f"method '{plan.method}' needs a {kind} profile {of_model}(allocator '{plan.allocator}'), and there is none; "
        f"make one with `{KINDS[kind]}`"
    )


def _check_kind(plan: Plan, profile: Profile) -> None:
    """Either kind of head scores serves either rule; the preferred one is only what is looked for."""
    kind = plan.profile_kind() or ""
    if (profile.kind == "prefix") != (kind == "prefix"):
        raise ProfileError(
            f"a profile of kind '{profile.kind}' does not fit allocator '{plan.allocator}'; make one with "
            f"`{KINDS[kind]}`"
        )


def is_close(a: Profile, b: Profile) -> bool:
    """Whether two profiles say the same, up to the digits that a file holds."""
    same = a.kind == b.kind and a.model_hash == b.model_hash and a.values.shape == b.values.shape
    return same and bool(np.allclose(a.values, b.values, rtol=1e-5)) and math.isclose(sum(a.budgets), sum(b.budgets))
