"""What inference, and a run that starts from another's weights, read of a run folder."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from zaya_jax.checkpoint.layout import require_step
from zaya_jax.checkpoint.steps import Checkpoints
from zaya_jax.config import CONFIG_FILE, Config, ModelConfig
from zaya_jax.model.weights import abstract_variables
from zaya_jax.pytree import abstract


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """What inference needs of a run."""

    config: Config
    """Of the phase that the run has reached."""
    step: int
    variables: dict
    """What `Zaya.apply` takes."""


def load_run(run_folder: str | pathlib.Path) -> SavedRun:
    """Reads a run's config and its newest weights, onto the first device.

    Raises:
      ValueError: when the folder is no run, or holds no checkpoint.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return load_weights(run_folder, lambda tree: jax.tree.map(lambda _: device, tree))


def load_weights(run_folder: str | pathlib.Path, place: Callable[[Any], Any]) -> SavedRun:
    """`load_run` onto any devices; float32, whatever the checkpoint holds.

    Args:
      run_folder: of the run.
      place: gives shardings for a tree of shapes.
    """
    config, step = read_config(run_folder), require_step(run_folder)
    with Checkpoints(run_folder, keep=config.train.keep_checkpoints) as checkpoints:
        shapes = abstract_variables(config.model)
        weights = checkpoints.restore_weights(step, abstract(shapes, place(shapes)))
        return SavedRun(config.phase_at(step).config, step, weights)


def check_init_from(run_folder: str, model: ModelConfig) -> None:
    """Checks that a run can start from another's weights.

    Raises:
      ValueError: if there is no such run or checkpoint, or its network has other weights.
    """
    saved = abstract_variables(read_config(run_folder).model)
    try:
        require_step(run_folder)
    except ValueError as error:
        raise ValueError(f"train.init_from: {error}") from error
    ours, theirs = (dict(jax.tree.leaves_with_path(tree)) for tree in (abstract_variables(model), saved))
    for path in [*ours, *theirs]:
        here, there = (tree[path].shape if path in tree else None for tree in (ours, theirs))
        if here != there:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"train.init_from: {name} of {run_folder} is {there or 'absent'}, and of this run "
                f"{here or 'absent'}; the networks must have the same weights"
            )


def read_config(run_folder: str | pathlib.Path) -> Config:
    """The resolved config that a run folder keeps.

    Raises:
      ValueError: when the folder is no run, or its config is not one of this version.
    """
    path = pathlib.Path(run_folder) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{run_folder} is not a run folder: it has no {CONFIG_FILE}; zaya train makes one")
    try:
        return Config.from_text(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not the config of a run: {error}") from error
