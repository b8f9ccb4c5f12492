"""Random profiles, for models with random weights."""

from pathlib import Path

import numpy as np

from pykvedge.models import profiles
from pykvedge.models.gguf import read_header
from pykvedge.plans import profile


def write_profile(model: Path, kind: str, folder: Path) -> Path:
    """Writes a profile for that GGUF file and returns the profile's file. A few heads or layers are strong."""
    header = read_header(model)
    n_layers, n_heads = (
        header.values[f"{header.architecture}.{key}"] for key in ("block_count", "attention.head_count")
    )
    rng = np.random.default_rng(3)
    budgets = (0.2, 0.6) if kind == "prefix" else ()
    values = rng.random((n_layers, 2)) * 0.6 if budgets else rng.gamma(0.3, 1.0, (n_layers, n_heads))
    if kind in ("key-redundancy", "head-budgets"):
        values = rng.random((n_layers, header.values[f"{header.architecture}.attention.head_count_kv"]))
        values /= values.sum() if kind == "head-budgets" else 1
    path = folder / profiles.file_name(kind, profiles.hash_of(model))
    profile.save(profile.Profile(kind, values, budgets, profiles.hash_of(model), 1, {}), path)
    return path
