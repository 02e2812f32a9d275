"""Lookup of config files, and checks of paths."""

import itertools
import pathlib
import re
from collections.abc import Iterator

from zaya_jax.errors import UserError

_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
"""The scheme of a URL (RFC 3986 section 3.1)."""


def require_local(name: str, path: str | None) -> None:
    """Raises an error for a URL where a path is expected.

    `pathlib` reads "gs://bucket/run" as the relative path "gs:/bucket/run", so a run would silently write to
    a local folder of that name.

    Args:
      name: config field or option, for the message.
      path: its value; None if it is not set.

    Raises:
      UserError: if the path is a URL.
    """
    if path is not None and _URL.match(path):
        raise UserError(
            f"{name} is {path.strip()}, a URL; it must be a path on this machine: mount the storage, or copy "
            "the files, and name that folder"
        )


def find_config(name: str) -> pathlib.Path:
    """The config file of `--config=NAME`: relative to the working directory, else to the project.

    Raises:
      UserError: if there is no such file; the message lists the project's configs.
    """
    if (path := _find(name)) is not None:
        return path
    # The working directory has precedence, so that a user can override a preset of the project.
    presets = sorted(path.name for root in _ROOTS for path in (root / "configs").glob("*.py"))
    raise UserError(f"no config file at {name}; configs/ has {', '.join(presets)}")


def find_file(name: str) -> pathlib.Path:
    """Any other file of the project, such as log rules, looked up like a config file.

    Raises:
      UserError: if there is no such file.
    """
    if (path := _find(name)) is not None:
        return path
    raise UserError(f"no file at {name}; give a path that exists")


_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_ROOTS = _PACKAGE.parent, _PACKAGE
"""Folders that may contain configs/: the checkout, or the package itself once it is installed."""


def _find(name: str) -> pathlib.Path | None:
    candidates = (folder / name for folder in (pathlib.Path.cwd(), *_ROOTS))
    return next((path for path in candidates if path.is_file()), None)


MAX_PATH_STEPS = 1000
"""Limit on path components and links to follow; a cycle of links ends here."""


def is_inside(path: str | pathlib.Path, folder: str | pathlib.Path) -> bool:
    """Whether a path is, is inside, or is reached through a folder: removing the folder removes it."""
    real = pathlib.Path(folder).resolve()
    return any(step.is_relative_to(real) for step in itertools.islice(_path_steps(path), MAX_PATH_STEPS))


def _path_steps(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Every folder and link that the operating system visits to resolve a path, in order."""
    # Path.resolve() only returns the final target. A link inside the folder that points out of it would be
    # missed, although removing the folder removes the link.
    current, *remaining = map(pathlib.Path, pathlib.Path(path).absolute().parts)
    while remaining:
        part = remaining.pop(0)
        current = current.parent if str(part) == ".." else current / part
        yield current
        if current.is_symlink():
            target = current.readlink()
            remaining = [*map(pathlib.Path, target.parts), *remaining]
            current = current.parent
