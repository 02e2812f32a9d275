"""Where the config of a run is found and kept, and what lies where."""

import itertools
import pathlib
from collections.abc import Iterator

CONFIG_FILE = "config.json"
"""What the resolved config of a run is called in its folder."""


def find_config(name: str) -> pathlib.Path:
    """The file that `--config=NAME` means: from here, else from the project's own configs/.

    Raises:
      ValueError: when there is no such file.
    """
    if (path := _find(name)) is not None:
        return path
    found = sorted(p.name for f in _OWN for p in (f / "configs").glob("*.py"))
    raise ValueError(f"no config file at {name}; configs/ has {', '.join(found)}")


def find_file(name: str) -> pathlib.Path:
    """A file that is no run's config, found as those are.

    Raises:
      ValueError: when there is no such file.
    """
    if (path := _find(name)) is not None:
        return path
    raise ValueError(f"there is no file {name}")


_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_OWN = _PACKAGE.parent, _PACKAGE
"""Where the project's own configs/ is: beside the package in a checkout, in it where it was installed."""


def _find(name: str) -> pathlib.Path | None:
    places = (folder / name for folder in (pathlib.Path.cwd(), *_OWN))
    return next((path for path in places if path.is_file()), None)


MAX_PARTS = 1000
"""Of a way; links that lead in a circle end there."""


def lies_in(path: str | pathlib.Path, folder: str | pathlib.Path) -> bool:
    """Whether a path is a folder or lies in it, or comes to its place by a link that does.

    What removes the folder would then leave nothing at the path.
    """
    real = pathlib.Path(folder).resolve()
    return any(place.is_relative_to(real) for place in itertools.islice(_places(path), MAX_PARTS))


def _places(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """What is opened on the way to a path, one after the other: folders, links, and what they stand for."""
    place, *left = map(pathlib.Path, pathlib.Path(path).absolute().parts)
    while left:
        part = left.pop(0)
        place = place.parent if str(part) == ".." else place / part
        yield place
        if place.is_symlink():
            target = place.readlink()
            left = [*map(pathlib.Path, target.parts), *left]
            place = place.parent
