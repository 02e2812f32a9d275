"""Where JAX's ROCm plugin lies, and how it gets there.

The plugin contains the whole compiler. It must be of jaxlib's own version. Beside the ordinary packages
of a machine without an AMD GPU it would print a traceback on every start of jax, so it has a folder
of its own, which only the compiling process looks into.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys

VERSION = ".".join(importlib.metadata.version("jaxlib").split(".")[:3])
"""Of the plugin: jaxlib's. A fourth number is a repair of jaxlib, for which there need be no plugin."""
PACKAGES = ("jax-rocm7-plugin", "jax-rocm7-pjrt")
FOLDER_VARIABLE = "ZAYA_ROCM_WHEELS"
"""Environment variable: another folder for the plugin."""
MODULE = "jax_plugins.xla_rocm7"
LIBRARY = "xla_rocm_plugin.so"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """An installed plugin.

    Attributes:
      library: its shared library.
      folder: what a process must add to its search path; None where the packages lie beside jax.
    """

    library: pathlib.Path
    folder: pathlib.Path | None


def default_folder() -> pathlib.Path:
    """The plugin's own folder, for the jaxlib and the Python that run."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return pathlib.Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"  # a part of the plugin is for one Python
    return pathlib.Path(cache) / "zaya_jax" / f"rocm-{VERSION}-{python}"


def find_plugin() -> Plugin:
    """The plugin beside jax, as on a machine with ROCm, else the one in its own folder.

    Raises:
      ValueError: if there is none, or one of another version.
    """
    if library := _library_beside_jax():
        return Plugin(library, folder=None)
    folder = default_folder()
    library = folder / "jax_plugins" / "xla_rocm7" / LIBRARY
    if not library.is_file():
        raise ValueError(
            f"compiling needs JAX's ROCm plugin {VERSION}, and {folder} has none; `zaya plan rocm-wheels` "
            "gets it (0.5 GB)"
        )
    versions = {
        path.name.removesuffix(".dist-info").split("-")[1] for path in folder.glob("jax_rocm7_*.dist-info")
    }
    if {".".join(version.split(".")[:3]) for version in versions} != {VERSION}:
        raise ValueError(
            f"{folder} has the ROCm plugin of {' and '.join(sorted(versions))}; jaxlib here is "
            f"{VERSION}, and they must be the same: remove the folder, then `zaya plan rocm-wheels`"
        )
    return Plugin(library, folder)


def _library_beside_jax() -> pathlib.Path | None:
    try:
        spec = importlib.util.find_spec(MODULE)
    except ModuleNotFoundError:  # not even the namespace that plugins share
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    library = pathlib.Path(spec.submodule_search_locations[0], LIBRARY)
    return library if library.is_file() else None


def install() -> pathlib.Path:
    """Installs the plugin into its own folder with pip; nothing to do where it is.

    Raises:
      ValueError: if pip cannot.
    """
    folder = default_folder()
    if (folder / "jax_plugins" / "xla_rocm7" / LIBRARY).is_file():
        return folder
    wanted = [f"{package}=={VERSION}.*" for package in PACKAGES]  # a repair of the plugin too
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(folder)]
    done = subprocess.run(
        [*command, "--quiet", "--disable-pip-version-check", *wanted],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"pip could not install {' and '.join(wanted)} into {folder}: {reason}")
    return folder
