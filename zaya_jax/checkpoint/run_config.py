"""The config of a run: the file in its folder, or if that is lost, the copy in its newest checkpoint."""

import functools
import logging
import pathlib

from zaya_jax.checkpoint.format.description import StepDescription, read_description
from zaya_jax.checkpoint.format.layout import DESCRIPTION, all_steps, step_folder
from zaya_jax.checkpoint.format.manifest import damage_of, description_files
from zaya_jax.config import CONFIG_FILE, Config
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import parse_object, read_limited


def read_config(run_folder: str | pathlib.Path) -> Config:
    """Reads the resolved config of a run.

    If config.json is missing or damaged, reads the copy in the newest checkpoint and logs a warning.

    Raises:
      UserError: if the folder is not a run folder, or its config is invalid in this version.
    """
    path = pathlib.Path(run_folder) / CONFIG_FILE
    lost = config_loss(run_folder)
    if lost is None:
        try:
            return Config.from_text(read_limited(path).decode())
        except ValueError as error:
            raise UserError(f"{path} is not the config of a run: {error}") from error
    record = _newest_record(run_folder)
    if record is None and path.is_file():
        raise UserError(f"{path} is not the config of a run: {lost}")
    if record is None:
        raise UserError(
            f"{run_folder} is not a run folder: it has no {CONFIG_FILE}; give a folder written by zaya train"
        )
    warn_once(f"{path}: {lost}; using its copy in {step_folder(run_folder, record.step) / DESCRIPTION}")
    return Config.from_dict(record.config)


def config_loss(run_folder: str | pathlib.Path) -> str | None:
    """Why the config file of a run cannot be read, if it is missing or not JSON; None if it can."""
    path = pathlib.Path(run_folder) / CONFIG_FILE
    if not path.is_file():
        return "it is missing"
    try:
        # The size is limited, because a hostile or damaged file could fill the memory.
        parse_object(read_limited(path), "it")
    except UserError as error:
        return str(error)
    return None


def has_record(run_folder: str | pathlib.Path) -> bool:
    """Whether a checkpoint in the folder contains a copy of its run's config."""
    return _newest_record(run_folder) is not None


def _newest_record(run_folder: str | pathlib.Path) -> StepDescription | None:
    """The newest intact description of a checkpoint, which contains the config; None if there is none."""
    # Only the description is verified, so that a config can be recovered from a damaged checkpoint.
    for step in reversed(all_steps(run_folder)):
        if damage_of(run_folder, step, part=description_files) is None:
            description = read_description(run_folder, step)
            if description is not None:
                return description
    return None


@functools.cache  # a command reads the config several times, and should warn once
def warn_once(message: str) -> None:
    """Logs a warning, once per message."""
    logging.getLogger(__name__).warning(message)
