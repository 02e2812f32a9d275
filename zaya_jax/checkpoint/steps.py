"""A run's states on the disk: Orbax behind the few questions that a run asks."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from zaya_jax import durable
from zaya_jax.checkpoint.failures import explained, silence_threads
from zaya_jax.checkpoint.layout import FOLDER, TRAINING, UNFINISHED, WEIGHTS, damaged, require_item

CHUNK_BYTES = 64 * 2**20
"""Of the embedding on the disk; other weights are cut by layer and expert."""


class Checkpoints:
    """The checkpoints of one run folder. Use it as a context: leaving waits for what is being written.

    Args:
      run_folder: of the run.
      keep: how many of the newest stay.
    """

    def __init__(self, run_folder: str | pathlib.Path, *, keep: int):
        silence_threads()
        self._run_folder = run_folder
        self._folder = pathlib.Path(run_folder).absolute() / FOLDER
        # Its name promises more than it does: it is called before the step gets its name.
        background = ocp.AsyncOptions(post_finalization_callback=self._sync_unfinished)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, async_options=background
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=(WEIGHTS, TRAINING))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        with explained(self._not_written):
            self._manager.wait_until_finished()
            durable.sync(self._folder)
        self._manager.close()

    def save(self, step: int, *, weights: Any, training: Any) -> None:
        """Copies a state and writes it in the background, unless that step is there already.

        Raises:
          ValueError: if this one, or the one before, cannot be written.
        """
        if step in self._manager.all_steps():
            return
        with explained(self._not_written):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{WEIGHTS: _save_in_chunks(weights), TRAINING: ocp.args.StandardSave(training)}
                ),
            )

    def _sync_unfinished(self) -> None:
        """Orbax waits for the disk to have the arrays, but not for what says which they are."""
        for folder in self._folder.glob(f"*{UNFINISHED}*"):
            durable.sync_tree(folder)

    def has_training(self, step: int) -> bool:
        """Whether a run can go on from a checkpoint; one that was converted has weights only.

        Raises:
          ValueError: if it can, but for what is missing.
        """
        if not (self._manager.directory / str(step) / TRAINING).exists():
            return False
        require_item(self._run_folder, step, TRAINING)
        return True

    def restore(self, step: int, *, weights: Any, training: Any) -> tuple[Any, Any]:
        """Reads a checkpoint into arrays like those given, `jax.ShapeDtypeStruct`s with shardings.

        Raises:
          ValueError: if it is damaged.
        """
        items = {WEIGHTS: ocp.args.StandardRestore(weights), TRAINING: ocp.args.StandardRestore(training)}
        restored = self._restore(step, items)
        return restored[WEIGHTS], restored[TRAINING]

    def restore_weights(self, step: int, weights: Any) -> Any:
        """Reads the weights alone, as `restore` does.

        Raises:
          ValueError: if they are damaged.
        """
        return self._restore(step, {WEIGHTS: ocp.args.StandardRestore(weights)})[WEIGHTS]

    def _restore(self, step: int, items: dict[str, Any]) -> Any:
        with explained(lambda cause: damaged(self._run_folder, step, cause)):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    def _not_written(self, cause: str) -> str:
        return (
            f"a checkpoint of {self._run_folder} could not be written: {cause}; mend that, and the same "
            "command goes on from the one before"
        )


def _save_in_chunks(weights: Any) -> Any:
    """Orbax would write a stack of layers as one chunk, which only a host that holds it whole could read."""
    return ocp.args.StandardSave(weights, save_args=jax.tree.map_with_path(_chunks, weights))


def _chunks(path: tuple[Any, ...], weight: Any) -> ocp.SaveArgs:
    del weight
    names = [key.key for key in path]
    if "layers" not in names:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.SaveArgs(shard_axes=(0, 1) if "experts" in names else (0,))
