"""What inference, and a run that starts from another's weights, read of a run folder."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.checkpoint.newest import SavedStep, require_step
from zaya_jax.checkpoint.steps import restore_weights
from zaya_jax.config import CONFIG_FILE, Config, ModelConfig
from zaya_jax.json_files import read_limited
from zaya_jax.model.adapters import ADAPTERS, declare_run, merged
from zaya_jax.model.weights import abstract_variables, flatten_weights, map_weights
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
    """Reads a run's config and its newest weights, onto the first device of this process.

    Raises:
      ValueError: when the folder is no run, or holds no checkpoint.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    read_config(run_folder)  # whether it is a run comes before whether its checkpoint is whole
    saved = SavedStep(str(run_folder), require_step(run_folder))
    return load_weights(saved, lambda tree: jax.tree.map(lambda _: device, tree))


def load_weights(saved: SavedStep, place: Callable[[Any], Any]) -> SavedRun:
    """The weights of a checkpoint on any devices; float32, whatever it holds. Adapters are merged.

    Args:
      saved: the checkpoint.
      place: gives shardings for a tree of shapes.
    """
    config = read_config(saved.run_folder)
    declared, shapes = declare_run(config), abstract_variables(config.model)
    stored = shapes | {"params": map_weights(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declared)}
    weights = restore_weights(saved.run_folder, saved.step, abstract(stored, place(stored)))
    if ADAPTERS in declared:
        weights = weights | {"params": _merge(declared, weights["params"], place(shapes["params"]))}
    return SavedRun(config.phase_at(saved.step).config, saved.step, weights)


def _merge(declared: Mapping, params: dict, shardings: Any) -> dict:
    """Weights with their adapters' changes, in the weights' own memory, wherever their parts lie."""

    def merge(weights: dict, adapters: dict) -> dict:
        return merged(flatten_weights(declared), weights | {ADAPTERS: adapters})

    adapters = params.pop(ADAPTERS)
    return jax.jit(merge, donate_argnums=0, out_shardings=shardings)(params, adapters)


def check_init_from(run_folder: str, model: ModelConfig) -> SavedStep:
    """The checkpoint of another run from whose weights a run can start.

    Raises:
      ValueError: if there is no such run or checkpoint, or its network has other weights.
    """
    saved = abstract_variables(read_config(run_folder).model)
    try:
        step = require_step(run_folder)
    except ValueError as error:
        raise type(error)(f"train.init_from: {error}") from error  # a damaged one is told by its class
    ours, theirs = (dict(jax.tree.leaves_with_path(tree)) for tree in (abstract_variables(model), saved))
    for path in [*ours, *theirs]:
        here, there = (tree[path].shape if path in tree else None for tree in (ours, theirs))
        if here != there:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"train.init_from: {name} of {run_folder} is {there or 'absent'}, and of this run "
                f"{here or 'absent'}; the networks must have the same weights"
            )
    return SavedStep(run_folder, step)


def read_config(run_folder: str | pathlib.Path) -> Config:
    """The resolved config that a run folder keeps.

    Raises:
      ValueError: when the folder is no run, or its config is not one of this version.
    """
    path = pathlib.Path(run_folder) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{run_folder} is not a run folder: it has no {CONFIG_FILE}; zaya train makes one")
    text = read_limited(path)
    try:
        return Config.from_text(text.decode())
    except ValueError as error:
        raise ValueError(f"{path} is not the config of a run: {error}") from error
