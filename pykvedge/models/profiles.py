"""A model's profiles are found by its hash: where they lie, and which of them a plan needs."""

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
    """Names the weights in a GGUF file: "sampled-sha256:" and 64 hexadecimal digits.

    The hash is of the file's size, of its whole header (metadata, vocabulary, names, types and places of all tensors),
    and of 64 pieces of 64 KiB spread evenly over the data, or of all the data where that is less: a fine-tuned or
    requantised model differs in all of them, and a file of any size takes a moment. Raises ModelError.
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
    """Names the folder of the user's own profiles."""
    import click

    return Path(click.get_app_dir("kvedge")) / "profiles"


def file_name(kind: str, model_hash: str) -> str:
    """Names a profile in the user's folder, and among those that kvedge ships."""
    return f"{kind}-{model_hash.rpartition(':')[2][:16]}.json"


def find(plan: Plan, model: str | os.PathLike[str], given: Given = None, spare: bool = False) -> dict[str, Profile]:
    """Finds the profile that each stage needs for a GGUF file; there are none if the plan needs none.

    given: profiles or their files, each for the stage whose kind it fits, instead of those that lie ready.
    spare: one that fits no stage is left alone, for another plan of the conversation; else it is refused.
    Raises ProfileError for what is missing, damaged, of another kind, or of another model.
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
    """Returns the numbers of what `find` finds, by stage. Raises as it does."""
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
    """Writes numbers that were measured on so many samples as a profile. Returns it and its file.

    made: how they were. place: of the file; None: where `find` looks. Raises ProfileError, ModelError.
    """
    about = {"model": {"name": model.path.name, "architecture": model.architecture}, "made": made}
    profile = Profile(kind, values, budgets, hash_of(model.path), samples, about)
    place = place or folder() / file_name(kind, profile.model_hash)
    write(profile, place)
    return profile, place


def _of_another_model(where: str, profile: Profile, model: str) -> ProfileError:
    name = profile.about.get("model", {}).get("name")
    other = f"was made for {name!r}" if isinstance(name, str) else "was made for another model"
    return ProfileError(f"{where} {other}, not for the weights in {model}; run `{KINDS[profile.kind]}` for these")
