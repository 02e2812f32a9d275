"""Loading of weights for inference, and for runs that start from the weights of another run."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from zaya_jax.checkpoint.format.layout import EMA, NUM_UPDATES, WeightsKind
from zaya_jax.checkpoint.format.manifest import damage_of
from zaya_jax.checkpoint.newest import SavedStep, Verify, require_step
from zaya_jax.checkpoint.run_config import read_config
from zaya_jax.checkpoint.steps import restore_average, restore_weights
from zaya_jax.config import Config, ModelConfig
from zaya_jax.errors import UserError
from zaya_jax.model.adapters import ADAPTERS, declare_run, merged
from zaya_jax.model.weights import Weight, abstract_variables, flatten_weights, map_weights
from zaya_jax.pytree import abstract


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """Weights of a run with the config that they belong to.

    Attributes:
      config: config of the phase of the step.
      step: step of the checkpoint.
      variables: variables of `Zaya.apply`.
    """

    config: Config
    step: int
    variables: dict


def load_run(run_folder: str | pathlib.Path, weights: WeightsKind = "raw") -> SavedRun:
    """Loads a run's config and its newest intact weights onto the first device of this process.

    Args:
      run_folder: folder of the run.
      weights: the weights to load, "raw" or their average, "ema".

    Raises:
      UserError: if the folder is not a run folder, or has no checkpoint or no average.
    """
    # One device: programs that use more pass their own shardings to `load_weights`.
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    read_config(run_folder)  # first, for the better message if the folder is not a run folder
    saved = SavedStep(str(run_folder), require_step(run_folder, weights_only=True, weights=weights))
    return load_weights(saved, lambda tree: jax.tree.map(lambda _: device, tree), weights)


def load_weights(saved: SavedStep, place: Callable[[Any], Any], weights: WeightsKind = "raw") -> SavedRun:
    """Loads the weights of a checkpoint as float32 onto any devices, dequantized and with adapters merged.

    Args:
      saved: the checkpoint.
      place: function from a tree of shapes to a tree of shardings.
      weights: the weights to load, "raw" or their average, "ema".
    """
    config = read_config(saved.run_folder)
    # Weights may be stored in a narrower type, and Orbax converts them to float32.
    declared, shapes = declare_run(config), abstract_variables(config.model)
    stored = shapes | {"params": map_weights(_loaded, declared)}
    if weights == EMA:
        stored |= {NUM_UPDATES: jax.ShapeDtypeStruct((), jnp.int32)}
    there = abstract(stored, place(stored))
    if weights == EMA:
        variables = _read_average(saved, declared, there)
    else:
        variables = restore_weights(saved.run_folder, saved.step, there)
    if ADAPTERS in declared:
        variables = variables | {"params": _merge(declared, variables["params"], place(shapes["params"]))}
    return SavedRun(config.phase_at(saved.step).config, saved.step, variables)


def _loaded(weight: Weight) -> jax.ShapeDtypeStruct:
    # Bits of quantized experts stay as they are; they are dequantized where adapters are merged.
    is_float = jnp.issubdtype(weight.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(weight.shape, jnp.float32 if is_float else weight.dtype)


def _read_average(saved: SavedStep, declared: Mapping, stored: dict) -> dict:
    """Reads the average of the weights that train, and the other weights."""
    trains = {path for path, weight in flatten_weights(declared).items() if weight.trains}
    shapes: dict[str, Any] = cast(Any, flatten_dict(stored["params"], sep="/"))
    averaged = {path: shape for path, shape in shapes.items() if path in trains}
    # Orbax restores whole items: the number of updates is read with the weights, and dropped.
    item = stored | {"params": unflatten_dict(averaged, sep="/")}
    average = restore_average(saved.run_folder, saved.step, item)
    # Weights that do not train are in the item of the weights alone.
    of_weights = {}
    if len(averaged) < len(shapes):
        weights = {name: tree for name, tree in stored.items() if name != NUM_UPDATES}
        of_weights = restore_weights(saved.run_folder, saved.step, weights)["params"]
    flat = flatten_dict(of_weights, sep="/") | flatten_dict(average["params"], sep="/")
    return {"params": unflatten_dict(flat, sep="/"), "router_bias": average["router_bias"]}


def _merge(declared: Mapping, params: dict, shardings: Any) -> dict:
    """Merges adapters into the weights; donation reuses the weights' memory, and shardings stay."""

    def merge(weights: dict, adapters: dict) -> dict:
        return merged(flatten_weights(declared), weights | {ADAPTERS: adapters})

    # Removed first, because only the weights are donated and returned.
    adapters = params.pop(ADAPTERS)
    # Quantized weights have other shapes than the result, so that their memory cannot be reused.
    donated = () if jax.tree.structure(params) != jax.tree.structure(shardings) else (0,)
    return jax.jit(merge, donate_argnums=donated, out_shardings=shardings)(params, adapters)


def check_init_from(run_folder: str, model: ModelConfig, *, verify: Verify = damage_of) -> SavedStep:
    """The checkpoint of another run that this run can start from.

    Args:
      run_folder: folder of the other run.
      model: the model of this run.
      verify: see `newest_step`.

    Raises:
      UserError: if there is no such run or checkpoint, or its model has different weights.
    """
    saved = abstract_variables(read_config(run_folder).model)
    try:
        step = require_step(run_folder, weights_only=True, verify=verify)
    except ValueError as error:
        raise type(error)(f"train.init_from: {error}") from error  # keeps the class, which tells damage apart
    new, old = (dict(jax.tree.leaves_with_path(tree)) for tree in (abstract_variables(model), saved))
    # Both directions, so that weights that are missing on either side are found.
    for path in [*new, *old]:
        expected, actual = (tree[path].shape if path in tree else None for tree in (new, old))
        if expected != actual:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UserError(
                f"train.init_from: {name} of {run_folder} is {actual or 'absent'}, and of this run "
                f"{expected or 'absent'}; both models must have weights of the same names and shapes"
            )
    return SavedStep(run_folder, step)
