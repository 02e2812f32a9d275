"""Where the config of a run is found, and where it is kept."""

import pathlib

CONFIG_FILE = "config.json"
"""What the resolved config of a run is called in its folder."""


def find_config(name: str) -> pathlib.Path:
    """The file that `--config=NAME` means: from here, else from the project's own configs/.

    Raises:
      ValueError: when there is no such file.
    """
    package = pathlib.Path(__file__).resolve().parents[1]
    for folder in (pathlib.Path.cwd(), package.parent, package):
        if (path := folder / name).is_file():
            return path
    found = sorted(p.name for f in (package.parent, package) for p in (f / "configs").glob("*.py"))
    raise ValueError(f"no config file at {name}; configs/ has {', '.join(found)}")
