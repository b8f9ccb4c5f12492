"""A tuned plan is what `kvedge tune` chose for a model: a certificate in a file, found by the model's hash.

It is taken where nobody names a method. The certificate lies beside the user's profiles, and holds the plan, the
profile's digest that it was measured with, and the evidence (kvedge_lab/tune/certificate.py writes it).
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
    """A certificate: the plan, the model's hash, and all that the file says."""

    path: Path
    plan: Plan
    model_hash: str
    says: Mapping[str, Any]

    def line(self) -> str:
        """Says in one line what was chosen and how sure that is."""
        what = "full" if self.plan.method == "full" else f"{self.plan.method} at {self.plan.budget}"
        proof = self.says["proof"]
        if not self.says["met"]:
            return f"tuned: {what}, as no plan was shown to keep {100 * self.says['target']:g} % agreement"
        return (f"tuned: {what} keeps {100 * proof['agreement']:.1f} % agreement ({100 * proof['low']:.1f} to "
                f"{100 * proof['high']:.1f}) in {100 * proof['bytes']:.0f} % of the bytes")  # fmt: skip


def place(model_hash: str) -> Path:
    """Names the file of a model's certificate."""
    return profiles.folder() / profiles.file_name(KIND, model_hash)


def all_files() -> list[Path]:
    """Lists the certificates of this user, by name."""
    folder = profiles.folder()
    return sorted(folder.glob(f"{KIND}-*.json")) if is_there(folder) else []


def of(says: Mapping[str, Any], path: Path) -> Tuned:
    """Makes a certificate of what its file says. Raises ProfileError for what is none, or of another version."""
    try:
        if says["kvedge_tuned"] != JSON_VERSION:
            raise ProfileError(f"{path} is of another version than {JSON_VERSION}; run `kvedge tune` again")
        made = Tuned(path, Plan.from_json(json.dumps(says["plan"])), says["model"]["hash"], says)
        made.line()
    except (ValueError, KeyError, TypeError):
        raise ProfileError(f"{path} is no certificate of kvedge tune; remove the file, or run `kvedge tune`") from None
    except ProfileError:
        raise
    except KvedgeError as error:
        raise ProfileError(f"{path}: {error}; remove the file, or run `kvedge tune`") from None
    return made


def load(path: Path) -> Tuned:
    """Reads a certificate. Raises ProfileError for a file that is none, or that is damaged."""
    try:
        return of(json.loads(path.read_text("utf-8")), path)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ProfileError(f"{path} is no certificate of kvedge tune; remove the file, or run `kvedge tune`") from None


def find(model: str | os.PathLike[str]) -> Tuned | None:
    """Finds the certificate of the weights in a GGUF file; None: they are not tuned.

    Raises ProfileError for a damaged one.
    """
    if not all_files():
        return None
    model_hash = profiles.hash_of(model)
    path = place(model_hash)
    found = load(path) if path.is_file() else None
    return found if found is not None and found.model_hash == model_hash else None


def digests(plan: Plan, model: str | os.PathLike[str]) -> dict[str, str]:
    """Tells profiles of a plan's stages apart, by stage."""
    return {stage: hashlib.sha256(found.to_json().encode()).hexdigest()[:16]
            for stage, found in profiles.find(plan, model).items()}  # fmt: skip


def unnamed(model: str | os.PathLike[str], budget: Any = None, again: bool = True) -> tuple[Plan, str]:
    """Makes the plan where nobody names a method, and says in a line if it is a tuned one ("": it is the default).

    budget: named alone, it is given to the tuned method; to the default one if a model is tuned to keep everything.
    again: whether methods fit that read a prompt twice; a plan of such a one gives way to the default plan.
    """
    found = find(model)
    if found is None:
        return default_plan(budget), ""
    try:
        changed = found.says.get("profiles") != digests(found.plan, model)
    except ProfileError:  # it is gone
        changed = True
    if changed:
        return default_plan(budget), ("its profile changed since this model was tuned, so the default plan is taken; "
                                      "run `kvedge tune` again")  # fmt: skip
    if not again and found.plan.scorer == "replay":
        return default_plan(budget), f"tuned: {found.plan.method} reads a prompt twice and does not fit here; " \
                                     f"{DEFAULT_METHOD} is taken"  # fmt: skip
    if budget is None:
        return found.plan, found.line()
    if found.plan.method == "full":
        return default_plan(budget), ""
    return found.plan.with_(budget=budget), f"tuned: {found.plan.method}, with the budget that was named"
