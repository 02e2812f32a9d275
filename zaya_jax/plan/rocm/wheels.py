"""Location and installation of JAX's ROCm plugin.

The plugin contains the whole compiler, and must have the same version as jaxlib. Next to the ordinary
packages of a machine without an AMD GPU it would print a traceback at every start of jax, so it has its own
folder, which only the compiling process adds to its search path.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys

from zaya_jax.errors import UserError

VERSION = ".".join(importlib.metadata.version("jaxlib").split(".")[:3])
"""Version of the plugin: jaxlib's. A fourth number is a patch of jaxlib, which the plugin may not have."""
PACKAGES = ("jax-rocm7-plugin", "jax-rocm7-pjrt")
FOLDER_VARIABLE = "ZAYA_ROCM_WHEELS"
"""Environment variable that selects another folder for the plugin."""
MODULE = "jax_plugins.xla_rocm7"
LIBRARY = "xla_rocm_plugin.so"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """An installed plugin.

    Attributes:
      library: its shared library.
      folder: folder that a process must add to its search path; None if the packages are next to jax.
    """

    library: pathlib.Path
    folder: pathlib.Path | None

    @property
    def versions(self) -> tuple[str, ...]:
        """Names and versions of the plugin's packages: code of another version differs."""
        # The library is in jax_plugins/xla_rocm7 of the folder of packages.
        packages = self.library.parents[2].glob("jax_rocm7_*.dist-info")
        return tuple(sorted(path.name.removesuffix(".dist-info") for path in packages))


def default_folder() -> pathlib.Path:
    """The plugin's folder for this jaxlib and Python."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return pathlib.Path(named)
    # The folder is per jaxlib and Python version, so that upgrades do not mix plugins.
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"  # a part of the plugin is for one Python
    return pathlib.Path(cache) / "zaya_jax" / f"rocm-{VERSION}-{python}"


def find_plugin() -> Plugin:
    """Returns the plugin next to jax, as on a machine with ROCm, or else the one in its own folder.

    Raises:
      UserError: if there is none, or it has another version.
    """
    if library := _library_beside_jax():
        return Plugin(library, folder=None)
    folder = default_folder()
    library = folder / "jax_plugins" / "xla_rocm7" / LIBRARY
    if not library.is_file():
        raise UserError(
            f"compiling needs JAX's ROCm plugin {VERSION}, which is not in {folder}; `zaya plan rocm-wheels` "
            "installs it (0.5 GB)"
        )
    # pip writes the dashes of a package's name as underscores in the names of folders.
    versions = {
        path.name.removesuffix(".dist-info").split("-")[1] for path in folder.glob("jax_rocm7_*.dist-info")
    }
    if {".".join(version.split(".")[:3]) for version in versions} != {VERSION}:
        raise UserError(
            f"{folder} has the ROCm plugin of {' and '.join(sorted(versions))}; jaxlib here is "
            f"{VERSION}, and they must be the same: remove the folder, then `zaya plan rocm-wheels`"
        )
    return Plugin(library, folder)


def _library_beside_jax() -> pathlib.Path | None:
    try:
        spec = importlib.util.find_spec(MODULE)
    except ModuleNotFoundError:  # the shared namespace of plugins does not exist either
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    library = pathlib.Path(spec.submodule_search_locations[0], LIBRARY)
    return library if library.is_file() else None


def install() -> pathlib.Path:
    """Installs the plugin into its own folder with pip, unless it is installed.

    Raises:
      UserError: if pip fails.
    """
    folder = default_folder()
    if (folder / "jax_plugins" / "xla_rocm7" / LIBRARY).is_file():
        return folder
    wanted = [f"{package}=={VERSION}.*" for package in PACKAGES]  # any patch of the plugin
    # With a target folder pip ignores what is installed: with dependencies it would install jax a second
    # time.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(folder)]
    done = subprocess.run(
        [*command, "--quiet", "--disable-pip-version-check", *wanted],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"pip could not install {' and '.join(wanted)} into {folder}: {reason}")
    return folder
