"""Commands for messages, in a form that works when pasted into the user's shell."""

import importlib.metadata
import os
import pathlib
import shlex
import shutil
import sys

from packaging.requirements import Requirement

PACKAGE = "zaya_jax"


def zaya_command() -> str:
    """Returns the command that starts `zaya` in this shell: "zaya" if it is on PATH, otherwise its path."""
    typed = pathlib.Path(sys.argv[0])
    script = typed if typed.name == "zaya" else _next_to_python("zaya")
    if _is_on_path(script):
        return "zaya"
    return _as_typed(script) if script.is_file() else f"{_python()} -m zaya_jax.cli"


def install_command(extra: str) -> str:
    """Returns a pip command that installs the packages of an extra, and works in any folder.

    `pip install 'zaya_jax[EXTRA]'` would search for zaya_jax on PyPI, which does not have it.

    Args:
      extra: name in `[project.optional-dependencies]` of pyproject.toml.
    """
    try:
        packages = _packages_of(extra)
    except importlib.metadata.PackageNotFoundError:
        packages = []
    # The checkout is not installed, or was installed before the extra existed.
    return pip_install(*packages) if packages else pip_install("-e", f".[{extra}]")


def pip_install(*packages: str) -> str:
    """Returns a pip command that installs packages for the running Python."""
    return shlex.join([*shlex.split(_pip()), "install", *packages])


def _packages_of(extra: str) -> list[str]:
    """Returns the requirements of an extra for this Python, including those of extras that it refers to."""
    packages = []
    for text in importlib.metadata.requires(PACKAGE) or ():
        requirement = Requirement(text)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name.replace("-", "_") == PACKAGE:
            packages += [each for included in sorted(requirement.extras) for each in _packages_of(included)]
        else:
            packages.append(f"{requirement.name}{requirement.specifier}")
    return packages


def _pip() -> str:
    """Returns the command that starts the pip of this Python."""
    script = _next_to_python("pip")
    if _is_on_path(script):
        return "pip"
    return _as_typed(script) if script.is_file() else f"{_python()} -m pip"


def _python() -> str:
    return _as_typed(pathlib.Path(sys.executable))


def _next_to_python(name: str) -> pathlib.Path:
    # Do not resolve links: in a virtual environment, python is a link to the system's Python.
    return pathlib.Path(sys.executable).with_name(name)


def _is_on_path(script: pathlib.Path) -> bool:
    path = shutil.which(script.name)
    return path is not None and script.is_file() and os.path.samefile(path, script)


def _as_typed(path: pathlib.Path) -> str:
    """Quotes a path for a shell; relative to the current folder if it is inside."""
    absolute, here = pathlib.Path(os.path.abspath(path)), pathlib.Path.cwd()
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))
