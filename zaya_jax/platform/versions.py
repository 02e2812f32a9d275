"""Versions of installed packages, for messages and reports."""

import importlib.metadata


def package_version(package: str) -> str:
    """Returns the version of a package; "(not installed)" if it has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout can run without being installed
        return "(not installed)"
