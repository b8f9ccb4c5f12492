"""Finds a model's profiles by its hash: their paths, and the profiles that a plan needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pykvedge.errors import ModelError, ProfileError
from pykvedge.models.gguf import Header, read_header
from pykvedge.plans.plan import Plan
from pykvedge.plans.profile import COLUMNS, KINDS, Given, Profile, assigned, load, misfit, missing
from pykvedge.plans.profile import save as write
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.system.files import DATA, is_there

_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10
SHIPPED = DATA / "profiles"


def hash_of(model: str | os.PathLike[str]) -> str:
    """Returns a hash of the weights in a GGUF file: "sampled-sha256:" and 64 hexadecimal digits.

    The hash covers the file's size, the whole header (metadata, vocabulary, names, types and places of all tensors),
    and 64 pieces of 64 KiB spread evenly over the data, or all data if there is less. A fine-tuned or requantised model
    differs in all pieces, and a file of any size takes a moment. Raises ModelError.
    """
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
    """Returns the folder of the user's profiles."""
    import click

    return Path(click.get_app_dir("kvedge")) / "profiles"


def file_name(kind: str, model_hash: str) -> str:
    """Returns the file name of a profile, in the user's folder and in kvedge's folder."""
    return f"{kind}-{model_hash.rpartition(':')[2][:16]}.json"


def find(plan: Plan, model: str | os.PathLike[str], given: Given = None, spare: bool = False) -> dict[str, Profile]:
    """Returns stage -> profile for the stages that need a profile, for a GGUF file.

    given: profiles or their files; each replaces the stored profile of the stage that it fits. spare: a given profile
    that fits no stage is ignored, because another plan of the conversation may use it; otherwise it is refused.
    Raises ProfileError for a profile that is missing, damaged, of another kind, or of another model.
    """
    kinds = plan.profile_kinds()
    out = assigned(plan, given, spare)
    wanted = hash_of(model) if kinds else ""
    for stage, kind in kinds.items():
        if stage not in out:
            places = [place / file_name(kind, wanted) for place in (folder(), SHIPPED)]
            path = next((path for path in places if is_there(path)), None)
            if path is None and plan.does_without(stage):
                continue
            if path is None:
                raise missing(plan, stage, f"of {Path(model).name} ")
            out[stage] = str(path), load(path)
            if COLUMNS[out[stage][1].kind] != COLUMNS[kind]:
                raise misfit(plan, [stage], out[stage][1])
    for where, profile in out.values():
        if profile.model_hash and profile.model_hash != wanted:
            raise _of_another_model(where, profile, Path(model).name)
    return {stage: profile for stage, (_, profile) in out.items()}


def tables_for(
    plan: Plan, model: str | os.PathLike[str], given: Given = None, spare: bool = False
) -> dict[str, ProfileTable]:
    """Returns stage -> table of numbers for the profiles that `find` returns. Raises as `find` does."""
    return {stage: found.table for stage, found in find(plan, model, given, spare).items()}


def save(
    model: Header,
    kind: str,
    values: np.ndarray,
    samples: int,
    made: Mapping[str, Any],
    budgets: tuple[float, ...] = (),
    place: Path | None = None,
) -> tuple[Profile, Path]:
    """Writes measured numbers as a profile. Returns the profile and its file.

    samples: number of samples. made: how they were measured. place: None: where `find` looks.
    Raises ProfileError, ModelError.
    """
    about = {"model": {"name": model.path.name, "architecture": model.architecture}, "made": made}
    profile = Profile(kind, values, budgets, hash_of(model.path), samples, about)
    place = place or folder() / file_name(kind, profile.model_hash)
    write(profile, place)
    return profile, place


def _of_another_model(where: str, profile: Profile, model: str) -> ProfileError:
    name = profile.about.get("model", {}).get("name")
    other = f"was made for {name!r}" if isinstance(name, str) else "was made for another model"
    return ProfileError(f"{where} {other}, not for the weights in {model}; run `{KINDS[profile.kind]}` for this model")
