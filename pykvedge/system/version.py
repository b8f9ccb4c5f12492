"""The installed package says its version."""

from __future__ import annotations

NOT_INSTALLED = "0+source"  # run from a source tree that was never installed


def package_version() -> str:
    """Returns what pyproject.toml had when the package was installed."""
    from importlib import metadata

    try:
        return metadata.version("kvedge")
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
