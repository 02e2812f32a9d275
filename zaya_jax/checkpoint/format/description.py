"""The description of a checkpoint: where it comes from, readable without the rest of its run."""

import dataclasses
import json
import pathlib

from zaya_jax.checkpoint.format.layout import DESCRIPTION, step_folder
from zaya_jax.config import use_current_names
from zaya_jax.errors import UserError
from zaya_jax.fields import build
from zaya_jax.files import durable
from zaya_jax.files.json_files import read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDescription:
    """Where a checkpoint comes from.

    Attributes:
      step: number of steps that the run had done.
      phase: name of the phase of the step; empty in a run without phases.
      config: config of the run, as plain values with current field names.
      corpora: fingerprints of the run's corpora, by folder as the config names it.
      versions: versions of the packages that affect results and file formats, by package.
      num_processes: number of processes that wrote it.
      num_devices: number of devices of the run.
      written: time at which the save started, in UTC, in ISO 8601.
      weights: origin of weights that are not those of training, such as "mean of steps 100, 200".
    """

    step: int
    phase: str
    config: dict
    corpora: dict
    versions: dict
    num_processes: int
    num_devices: int
    written: str
    weights: str = ""


def write_description(folder: pathlib.Path, description: StepDescription) -> None:
    """Writes the description to a step that is not committed yet, so that the manifest includes it."""
    durable.write(folder / DESCRIPTION, json.dumps(dataclasses.asdict(description), indent=1) + "\n")


def read_description(run_folder: str | pathlib.Path, step: int) -> StepDescription | None:
    """Reads the description of a checkpoint; None for one that was converted or has none yet.

    Raises:
      UserError: if the file is damaged.
    """
    path = step_folder(run_folder, step) / DESCRIPTION
    # Converted checkpoints have no run of this program to describe.
    if not path.exists():
        return None
    try:
        values = read_json(path)
        # Names are mapped here, so that callers can build or compare the config of any version.
        if isinstance(values.get("config"), dict):
            values["config"] = use_current_names(values["config"])
        return build(StepDescription, values, "")
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
