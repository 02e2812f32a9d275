"""Which version of a package is installed here."""

import importlib.metadata


def package_version(package: str) -> str:
    """The version of a package, or that it has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout runs without being installed
        return "(not installed)"
