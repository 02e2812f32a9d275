"""Fields of a config that depend on what a run finds when it starts."""

import dataclasses
import pathlib

from zaya_jax.checkpoint import has_record, read_config
from zaya_jax.config import CONFIG_FILE, Config
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER, FILES_BEFORE_THE_RUN, LOCK_FILE


def with_base_dtype(config: Config, *, overwrite: bool) -> Config:
    """Names the type of the frozen weights: that of the run in the folder, or of the products.

    The config of a run with adapters always names it, because `execution.dtype` may change when it resumes.

    Args:
      config: config of the run.
      overwrite: whether the run in the folder will be removed.
    """
    if not config.lora.rank or config.lora.base_dtype is not None:
        return config

    def begun() -> str | None:
        held = None if overwrite else find_run_config(pathlib.Path(config.run_folder))
        return None if held is None else held.lora.base_dtype

    # From one process: the others may see the folder later.
    held = hosts.broadcast_from_first("base dtype", hosts.run_on_first("base dtype", begun))
    lora = dataclasses.replace(config.lora, base_dtype=held or config.execution.dtype)
    return dataclasses.replace(config, lora=lora)


def find_run_config(folder: pathlib.Path) -> Config | None:
    """Reads the config of the run in a folder; returns None if the folder is empty or missing.

    Raises:
      UserError: if the folder holds something else than a run.
    """
    for path in (folder / CHECKPOINTS_FOLDER, folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise UserError(
                f"run_folder is {folder}, and {path} is a file; it must be a folder or not exist yet"
            )
    # A kill may leave nothing but a lock and an unfinished config: the same command can then start again.
    unfinished = {LOCK_FILE, CONFIG_FILE + durable.PARTIAL, *FILES_BEFORE_THE_RUN}
    if not folder.exists() or {path.name for path in folder.iterdir()} <= unfinished:
        return None
    if not (folder / CONFIG_FILE).is_file() and not has_record(folder):
        raise UserError(f"{folder} is not empty and not a run folder; choose another --config.run_folder")
    # Read also before it is removed: folders of other programs, such as Hugging Face's, have a config.json.
    return read_config(folder)
