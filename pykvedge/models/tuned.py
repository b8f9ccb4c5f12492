"""A tuned plan: what `kvedge tune` chose for a model. It is a certificate in a file, found by the model's hash.

The plan is used if the user names no method. The certificate lies beside the user's profiles. It holds the plan, the
digests of the profiles in the measurement, and the evidence (kvedge_lab/tune/certificate.py writes it).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykvedge.errors import KvedgeError, ProfileError
from pykvedge.models import profiles
from pykvedge.plans.making import default_plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import DEFAULT_METHOD
from pykvedge.system.files import is_there

JSON_VERSION = 1
KIND = "tuned"


@dataclass(frozen=True)
class Tuned:
    """A certificate: its path, the plan, the model's hash, and the whole content of the file."""

    path: Path
    plan: Plan
    model_hash: str
    says: Mapping[str, Any]

    def line(self) -> str:
        """Returns one line that says what was chosen and how sure the choice is."""
        what = "full" if self.plan.method == "full" else f"{self.plan.method} at {self.plan.budget}"
        proof = self.says["proof"]
        if not self.says["met"]:
            return f"tuned: {what}, because no plan was proven to keep {100 * self.says['target']:g} % agreement"
        return (f"tuned: {what} keeps {100 * proof['agreement']:.1f} % agreement ({100 * proof['low']:.1f} to "
                f"{100 * proof['high']:.1f}) in {100 * proof['bytes']:.0f} % of the bytes")  # fmt: skip


def place(model_hash: str) -> Path:
    """Returns the path of a model's certificate."""
    return profiles.folder() / profiles.file_name(KIND, model_hash)


def all_files() -> list[Path]:
    """Returns the certificates of this user, by name."""
    folder = profiles.folder()
    return sorted(folder.glob(f"{KIND}-*.json")) if is_there(folder) else []


def of(says: Mapping[str, Any], path: Path) -> Tuned:
    """Makes a certificate from a file's content. Raises ProfileError if it is invalid or of another version."""
    try:
        if says["kvedge_tuned"] != JSON_VERSION:
            raise ProfileError(f"{path} does not have version {JSON_VERSION}; run `kvedge tune` again")
        made = Tuned(path, Plan.from_json(json.dumps(says["plan"])), says["model"]["hash"], says)
        made.line()
    except (ValueError, KeyError, TypeError):
        raise ProfileError(
            f"{path} is not a certificate of kvedge tune; remove the file, or run `kvedge tune`"
        ) from None
    except ProfileError:
        raise
    except KvedgeError as error:
        raise ProfileError(f"{path}: {error}; remove the file, or run `kvedge tune`") from None
    return made


def load(path: Path) -> Tuned:
    """Reads a certificate. Raises ProfileError if the file is unreadable, damaged or no certificate."""
    try:
        return of(json.loads(path.read_text("utf-8")), path)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ProfileError(
            f"{path} is not a certificate of kvedge tune; remove the file, or run `kvedge tune`"
        ) from None


def find(model: str | os.PathLike[str]) -> Tuned | None:
    """Returns the certificate of the weights in a GGUF file, or None if they are not tuned.

    Raises ProfileError for a damaged certificate.
    """
    if not all_files():
        return None
    model_hash = profiles.hash_of(model)
    path = place(model_hash)
    found = load(path) if path.is_file() else None
    return found if found is not None and found.model_hash == model_hash else None


def digests(plan: Plan, model: str | os.PathLike[str]) -> dict[str, str]:
    """Returns stage -> digest of the profile of a plan's stage."""
    return {stage: hashlib.sha256(found.to_json().encode()).hexdigest()[:16]
            for stage, found in profiles.find(plan, model).items()}  # fmt: skip


def plan_or_default(model: str | os.PathLike[str], budget: Any = None, second_pass: bool = True) -> tuple[Plan, str]:
    """Makes the plan if the user names no method. Returns the plan and a line for the user ("": the default plan).

    budget: given to the tuned method, or to the default method if the tuned plan keeps everything. second_pass: whether
    methods that read a prompt twice are allowed; if not, the default plan replaces a tuned plan of this kind.
    """
    found = find(model)
    if found is None:
        return default_plan(budget), ""
    try:
        changed = found.says.get("profiles") != digests(found.plan, model)
    except ProfileError:  # a profile is missing now
        changed = True
    if changed:
        return default_plan(budget), ("the profile of the tuned plan has changed, so kvedge uses the default plan; "
                                      "run `kvedge tune` again")  # fmt: skip
    if not second_pass and found.plan.scorer == "replay":
        return default_plan(budget), f"tuned: {found.plan.method} reads a prompt twice, which does not work here; " \
                                     f"kvedge uses {DEFAULT_METHOD}"  # fmt: skip
    if budget is None:
        return found.plan, found.line()
    if found.plan.method == "full":
        return default_plan(budget), ""
    return found.plan.with_(budget=budget), f"tuned: {found.plan.method}, with the given budget"
