"""Which versions of its dependencies a figure was measured with. Needs no torch."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Python's version, and those of these packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
