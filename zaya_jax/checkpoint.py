"""A run's checkpoints: Orbax behind the few questions that a run asks.

A checkpoint has two items: "weights", all that inference needs, and "training", the rest of the
state. Orbax writes a step beside the others and renames it when it is whole; one that a crash left
half-written is never taken for a checkpoint.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from zaya_jax.config import CONFIG_FILE, Config, ModelConfig
from zaya_jax.model.weights import abstract_variables

FOLDER = "checkpoints"
WEIGHTS = "weights"
TRAINING = "training"
CHUNK_BYTES = 64 * 2**20
"""Of the embedding on the disk; other weights are cut by layer and expert."""


class Checkpoints:
    """The checkpoints of one run folder. Use it as a context: leaving waits for what is being written.

    Args:
      run_folder: of the run.
      keep: how many of the newest stay.
    """

    def __init__(self, run_folder: str | pathlib.Path, *, keep: int):
        folder = pathlib.Path(run_folder).absolute() / FOLDER
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder, options=options, item_names=(WEIGHTS, TRAINING))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint; None when there is none."""
        return self._manager.latest_step()

    def save(self, step: int, *, weights: Any, training: Any) -> None:
        """Copies a state and writes it in the background, unless that step is there already."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{WEIGHTS: _save_in_chunks(weights), TRAINING: ocp.args.StandardSave(training)}
            ),
        )

    def has_training(self, step: int) -> bool:
        """Whether a run can go on from a checkpoint; one that was converted has weights only."""
        return (self._manager.directory / str(step) / TRAINING).exists()

    def restore(self, step: int, *, weights: Any, training: Any) -> tuple[Any, Any]:
        """Reads a checkpoint into arrays like those given, `jax.ShapeDtypeStruct`s with shardings."""
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                **{WEIGHTS: ocp.args.StandardRestore(weights), TRAINING: ocp.args.StandardRestore(training)}
            ),
        )
        return restored[WEIGHTS], restored[TRAINING]

    def restore_weights(self, step: int, weights: Any) -> Any:
        """Reads the weights alone."""
        args = ocp.args.Composite(**{WEIGHTS: ocp.args.StandardRestore(weights)})
        return self._manager.restore(step, args=args)[WEIGHTS]


def _save_in_chunks(weights: Any) -> Any:
    """Orbax would write a stack of layers as one chunk, which only a host that holds it whole could read."""
    return ocp.args.StandardSave(weights, save_args=jax.tree.map_with_path(_chunks, weights))


def _chunks(path: tuple[Any, ...], weight: Any) -> ocp.SaveArgs:
    del weight
    names = [key.key for key in path]
    if "layers" not in names:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.SaveArgs(shard_axes=(0, 1) if "experts" in names else (0,))


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
    config = read_config(run_folder)
    no_checkpoint = f"{run_folder} has no checkpoint yet; it must have trained to its first one"
    if not (pathlib.Path(run_folder) / FOLDER).is_dir():  # Orbax would make it
        raise ValueError(no_checkpoint)
    with Checkpoints(run_folder, keep=config.train.keep_checkpoints) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise ValueError(no_checkpoint)
        shapes = abstract_variables(config.model)
        weights = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, place(shapes)
        )
        weights = checkpoints.restore_weights(step, weights)
        return SavedRun(config.phase_at(step).config, step, weights)


def check_init_from(run_folder: str, model: ModelConfig) -> None:
    """Checks that a run can start from another's weights.

    Raises:
      ValueError: if there is no such run or checkpoint, or its network has other weights.
    """
    saved = abstract_variables(read_config(run_folder).model)
    if not (pathlib.Path(run_folder) / FOLDER).is_dir():
        raise ValueError(f"train.init_from: {run_folder} has no checkpoint yet")
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
