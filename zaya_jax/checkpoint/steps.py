"""A run's states on the disk: Orbax writes and reads the arrays; when a step counts is decided here."""

import concurrent.futures
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from zaya_jax import durable
from zaya_jax.checkpoint.failures import explained, silence_threads
from zaya_jax.checkpoint.layout import FOLDER, TRAINING, WEIGHTS, all_steps, step_folder
from zaya_jax.checkpoint.manifest import commit
from zaya_jax.checkpoint.stored_weights import check_shapes

CHUNK_BYTES = 64 * 2**20
"""Of the embedding on the disk; other weights are cut by layer and expert."""


class Checkpoints:
    """Writes the checkpoints of a run. Use it as a context: leaving waits for what is being written.

    A step is written aside, in the background, and gets its name when all of it is on the disk, with the
    manifest of its files: whatever has a number for its name was whole.

    Args:
      run_folder: of the run.
      keep: how many of the newest stay.
    """

    def __init__(self, run_folder: str | pathlib.Path, *, keep: int):
        silence_threads()
        self._run_folder, self._keep = run_folder, keep
        self._folder = pathlib.Path(run_folder).absolute() / FOLDER
        self._writer = ocp.AsyncCheckpointer(_handler())
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._committing: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._wait()
        finally:
            self._background.shutdown()
            self._writer.close()

    def save(self, step: int, *, weights: Any, training: Any) -> None:
        """Copies a state and writes it in the background, unless that step is there already.

        Raises:
          ValueError: if this one, or the one before, cannot be written.
        """
        self._wait()
        if step in all_steps(self._run_folder):
            return
        items = {WEIGHTS: _save_in_chunks(weights), TRAINING: ocp.args.StandardSave(training)}
        with explained(self._not_written):
            durable.make_folder(self._folder)
            self._remove_partial()
            aside = durable.name_beside(self._folder / str(step))
            self._writer.save(aside, args=ocp.args.Composite(**items))
        self._committing = self._background.submit(self._commit, step, aside)

    def check(self) -> None:
        """Tells at once of a save that has failed in the background; costs nothing.

        Raises:
          ValueError: if it has.
        """
        if self._committing is not None and self._committing.done():
            self._wait()

    def _wait(self) -> None:
        committing, self._committing = self._committing, None
        if committing is not None:
            committing.result()

    def _commit(self, step: int, aside: pathlib.Path) -> None:
        """Gives a step its name, when Orbax has written it."""
        with explained(self._not_written):
            self._writer.wait_until_finished()
            # Orbax waits for the disk to have the arrays, but not for what says which they are.
            durable.sync_tree(aside)
            commit(aside, step)
            durable.publish(aside, self._folder / str(step))
            for old in all_steps(self._run_folder)[: -self._keep]:
                durable.remove_folder(self._folder / str(old))

    def _remove_partial(self) -> None:
        """What a killed process left: one process writes into a run folder."""
        for partial in self._folder.glob(f".*{durable.PARTIAL}*"):
            shutil.rmtree(partial)

    def _not_written(self, cause: str) -> str:
        return (
            f"a checkpoint of {self._run_folder} could not be written: {cause}; mend that, and the same "
            "command goes on from the one before"
        )


def has_training(run_folder: str | pathlib.Path, step: int) -> bool:
    """Whether a run can go on from a checkpoint; one that was converted has weights only."""
    return (step_folder(run_folder, step) / TRAINING).exists()


def restore(run_folder: str | pathlib.Path, step: int, *, weights: Any, training: Any) -> tuple[Any, Any]:
    """Reads a checkpoint into arrays like those given, `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      ValueError: if it cannot be read.
    """
    items = {WEIGHTS: ocp.args.StandardRestore(weights), TRAINING: ocp.args.StandardRestore(training)}
    restored = _restore(run_folder, step, items)
    return restored[WEIGHTS], restored[TRAINING]


def restore_weights(run_folder: str | pathlib.Path, step: int, weights: Any) -> Any:
    """Reads the weights alone, as `restore` does.

    Raises:
      ValueError: if they cannot be read.
    """
    check_shapes(step_folder(pathlib.Path(run_folder).absolute(), step) / WEIGHTS, weights)
    return _restore(run_folder, step, {WEIGHTS: ocp.args.StandardRestore(weights)})[WEIGHTS]


def _restore(run_folder: str | pathlib.Path, step: int, items: dict[str, Any]) -> Any:
    silence_threads()
    folder = step_folder(pathlib.Path(run_folder).absolute(), step)
    with (
        explained(lambda cause: f"{step_folder(run_folder, step)} cannot be read: {cause}", reading=True),
        ocp.Checkpointer(_handler()) as reader,
    ):
        return reader.restore(folder, args=ocp.args.Composite(**items))


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(WEIGHTS, TRAINING)


def _save_in_chunks(weights: Any) -> Any:
    """Orbax would write a stack of layers as one chunk, which only a host that holds it whole could read."""
    return ocp.args.StandardSave(weights, save_args=jax.tree.map_with_path(_chunks, weights))


def _chunks(path: tuple[Any, ...], weight: Any) -> ocp.SaveArgs:
    del weight
    names = [key.key for key in path]
    if "layers" not in names:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.SaveArgs(shard_axes=(0, 1) if "experts" in names else (0,))
