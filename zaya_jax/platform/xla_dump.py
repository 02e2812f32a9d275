"""Dumps of the programs that XLA compiles."""

import os
import pathlib

import jax


def dump_programs(folder: pathlib.Path) -> None:
    """Makes XLA write every program that it compiles to a folder, before and after optimization.

    Must be called before JAX is first used, because XLA reads its flags only once. The compilation cache is
    disabled, because XLA does not dump cached programs.

    Args:
      folder: output folder of the text files, which are named after the programs.
    """
    flags = f"--xla_dump_to={folder.resolve()} --xla_dump_hlo_as_text"
    # Append the flags: if a flag is repeated, XLA uses the last one.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    jax.config.update("jax_enable_compilation_cache", False)
