"""The version of the installed package."""

from __future__ import annotations

NOT_INSTALLED = "0+source"  # the package runs from a source tree and was never installed


def package_version() -> str:
    """Returns the version in pyproject.toml at the time of the installation."""
    from importlib import metadata

    try:
        return metadata.version("kvedge")
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
