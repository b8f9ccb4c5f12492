"""The version of the package that is installed."""

from __future__ import annotations

NOT_INSTALLED = "0+source"  # run from a source tree that was never installed


def package_version() -> str:
    """As pyproject.toml had it when the package was installed."""
    from importlib import metadata

    try:
        return metadata.version("kvedge")
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
