"""Safe access to a folder from an untrusted source, such as downloaded weights.

Such a folder may have a pipe, on which reading blocks for ever, or a link to a private file elsewhere, whose
content could get published. Only regular files inside the folder are read, after all links are resolved.
"""

import os
import pathlib
import stat

from zaya_jax.errors import UserError

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
"""Folders in the cache of huggingface_hub: REPOSITORY/snapshots/REVISION links to REPOSITORY/blobs."""


def check_regular(folder: pathlib.Path, name: str) -> bool:
    """Returns whether a folder has a file, and checks that it is a regular file inside the folder.

    Args:
      folder: folder in which the file must be after all links are resolved. For a snapshot in the cache of
        huggingface_hub, the blobs of the same repository count as inside.
      name: path of the file, relative to the folder.

    Raises:
      UserError: if it is not a regular file, or a link that leads out of the folder or nowhere.
    """
    path = folder / name
    if not os.path.lexists(path):
        return False
    if not path.exists():
        raise UserError(f"{path} is a link to nothing; it must be a file in {folder}")
    if (kind := describe_special(path.stat().st_mode)) is not None:
        raise UserError(f"{path} is {kind}; it must be a regular file")
    # Compare the resolved path: a folder in between can be a link, too.
    target = path.resolve()
    if not any(target.is_relative_to(place) for place in _places(folder)):
        raise UserError(
            f"{path} is a link to {target}, which is outside {folder}; copy the file into the folder if it "
            "belongs there"
        )
    return True


def _places(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders that count as inside: the folder itself, and the blobs of its snapshot."""
    real = folder.resolve()
    revisions = (place for place in (real, *real.parents) if place.parent.name == _SNAPSHOTS)
    return [real, *(revision.parent.parent / _BLOBS for revision in revisions)]


def describe_special(mode: int) -> str | None:
    """Describes what is not a regular file, by its `st_mode`; returns None for a regular file.

    Opening a pipe or some devices would block for ever.
    """
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
