"""What a checkpoint says of itself, for whoever finds it without its run."""

import dataclasses
import json
import pathlib

from zaya_jax import durable
from zaya_jax.checkpoint.layout import ABOUT, step_folder
from zaya_jax.fields import build
from zaya_jax.json_files import read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """Where a state comes from.

    Attributes:
      step: that it is behind.
      phase: name of the phase that made the step; empty in a run without phases.
      config: of the run, as its config.json has it.
      corpora: fingerprints of what the run reads, by folder as the config names it.
      versions: of the packages that decide what was computed and written, by name.
      num_processes: that wrote it.
      num_devices: that trained it.
      written: when its save began, in UTC, as ISO 8601 has it.
    """

    step: int
    phase: str
    config: dict
    corpora: dict
    versions: dict
    num_processes: int
    num_devices: int
    written: str


def write_about(folder: pathlib.Path, about: About) -> None:
    """Writes it into a step that is not yet committed, so that the manifest lists it."""
    durable.write(folder / ABOUT, json.dumps(dataclasses.asdict(about), indent=1) + "\n")


def read_about(run_folder: str | pathlib.Path, step: int) -> About | None:
    """What a checkpoint says of itself; None of one that was converted, or is older than that.

    Raises:
      ValueError: if its file is not what `write_about` wrote.
    """
    path = step_folder(run_folder, step) / ABOUT
    if not path.exists():
        return None
    try:
        return build(About, read_json(path), "")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
