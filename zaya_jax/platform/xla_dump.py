"""XLA's own account of what it compiles, as files."""

import os
import pathlib

import jax


def dump_programs(folder: pathlib.Path) -> None:
    """Has XLA write every program that it compiles into a folder: as it came, and as it runs.

    To be called before the first array or device is asked for: XLA reads its flags once. Programs are
    compiled then also where jax keeps them, for one that is kept is not dumped.

    Args:
      folder: in which XLA writes text files, named after the programs.
    """
    flags = f"--xla_dump_to={folder.resolve()} --xla_dump_hlo_as_text"
    # Behind those that are there: of two of one name XLA takes the last.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    jax.config.update("jax_enable_compilation_cache", False)
