"""Models by name: user/repo[:quant] of a hub is found in the cache, or downloaded into it.

resolve("user/repo:Q4_K_M") returns the paths of a model and its image encoder, for Session or load. docs/models.md
explains the choice of files, their folders, and the checks.
"""

from __future__ import annotations

from pykvedge.models.hub.cached import CachedModel, Removal, cached_models, remove
from pykvedge.models.hub.folders import Pair, cache_dir
from pykvedge.models.hub.resolving import headers, resolve

__all__ = ["CachedModel", "Pair", "Removal", "cache_dir", "cached_models", "headers", "remove", "resolve"]
