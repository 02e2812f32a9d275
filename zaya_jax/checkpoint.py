"""A run's checkpoints: Orbax behind the few questions that a run asks.

A checkpoint has two items: "weights", all that inference needs, and "training", the rest of the
state. Orbax writes a step beside the others and renames it when it is whole; one that a crash left
half-written is never taken for a checkpoint.
"""

import contextlib
import dataclasses
import gc
import json
import logging
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from zaya_jax.config import CONFIG_FILE, Config, ModelConfig
from zaya_jax.model.weights import abstract_variables
from zaya_jax.pytree import abstract

FOLDER = "checkpoints"
WEIGHTS = "weights"
TRAINING = "training"
METADATA = "_METADATA"
"""In each item that is whole."""
CHUNK_BYTES = 64 * 2**20
"""Of the embedding on the disk; other weights are cut by layer and expert."""


class Checkpoints:
    """The checkpoints of one run folder. Use it as a context: leaving waits for what is being written.

    Args:
      run_folder: of the run.
      keep: how many of the newest stay.
    """

    def __init__(self, run_folder: str | pathlib.Path, *, keep: int):
        _silence_threads()
        folder = pathlib.Path(run_folder).absolute() / FOLDER
        self._run_folder = run_folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder, options=options, item_names=(WEIGHTS, TRAINING))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        with _explained(self._not_written):
            self._manager.wait_until_finished()
        self._manager.close()

    def save(self, step: int, *, weights: Any, training: Any) -> None:
        """Copies a state and writes it in the background, unless that step is there already.

        Raises:
          ValueError: if this one, or the one before, cannot be written.
        """
        if step in self._manager.all_steps():
            return
        with _explained(self._not_written):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{WEIGHTS: _save_in_chunks(weights), TRAINING: ocp.args.StandardSave(training)}
                ),
            )

    def has_training(self, step: int) -> bool:
        """Whether a run can go on from a checkpoint; one that was converted has weights only.

        Raises:
          ValueError: if it can, but for what is missing.
        """
        if not (self._manager.directory / str(step) / TRAINING).exists():
            return False
        _require_item(self._run_folder, step, TRAINING)
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
        """Reads the weights alone.

        Raises:
          ValueError: if they are damaged.
        """
        return self._restore(step, {WEIGHTS: ocp.args.StandardRestore(weights)})[WEIGHTS]

    def _restore(self, step: int, items: dict[str, Any]) -> Any:
        with _explained(lambda cause: _damaged(self._run_folder, step, cause)):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    def _not_written(self, cause: str) -> str:
        return (
            f"a checkpoint of {self._run_folder} could not be written: {cause}; mend that, and the same "
            "command goes on from the one before"
        )


_STATUS = re.compile(r"[A-Z_]+: ")
"""How TensorStore's errors begin, which are ValueErrors: "RESOURCE_EXHAUSTED: "."""
_NOTES = re.compile(r" \[\w+(\[\d+\])?='")
"""How begins what it appends to them: " [os_error_code='28']"."""


@contextlib.contextmanager
def _explained(sentence: Callable[[str], str]) -> Iterator[None]:
    """Makes a sentence of what Orbax and TensorStore raise when the disk fails; a bug stays what it is.

    Raises:
      ValueError: with the sentence about the cause.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if not _is_of_the_disk(error):
            raise
        cause = str(error) if isinstance(error, OSError) else _NOTES.split(str(error))[0].rpartition(": ")[2]
        # What was under way with the rest hangs on the frames; at Python's exit each would complain.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise ValueError(sentence(cause)) from error


def _is_of_the_disk(error: BaseException | None) -> bool:
    if isinstance(error, ValueError) and _STATUS.match(str(error)):
        return True
    return isinstance(error, OSError | json.JSONDecodeError)


def _silence_threads() -> None:
    """Lets nobody but the main thread tell of a failing disk: Orbax's threads would, with ten tracebacks."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_of_the_disk(record.exc_info[1]))


@dataclasses.dataclass(frozen=True)
class _Unraisable:
    """Leaves out what TensorStore says when Orbax no longer waits for the rest of what has failed."""

    told: Callable[[Any], Any]
    """The hook that was there before: Python's own, or pytest's, which makes a failure of it."""

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.told(unraisable)


def _step_folder(run_folder: str | pathlib.Path, step: int) -> pathlib.Path:
    return pathlib.Path(run_folder) / FOLDER / str(step)


def _all_steps(run_folder: str | pathlib.Path) -> list[int]:
    """The steps of a run's checkpoints; what Orbax has not finished bears another name."""
    folder = pathlib.Path(run_folder) / FOLDER
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal() and path.is_dir())


def newest_step(run_folder: str | pathlib.Path) -> int | None:
    """The step of the newest checkpoint; None when there is none.

    An older one is never taken in place of one that lost a part: whoever asks for the newest weights
    would not know that they are not.

    Raises:
      ValueError: if its weights are not whole.
    """
    steps = _all_steps(run_folder)
    if not steps:
        return None
    _require_item(run_folder, steps[-1], WEIGHTS)
    return steps[-1]


def require_step(run_folder: str | pathlib.Path) -> int:
    """The step of the newest checkpoint.

    Raises:
      ValueError: if there is none, or its weights are not whole.
    """
    step = newest_step(run_folder)
    if step is None:
        raise ValueError(f"{run_folder} has no checkpoint yet; it must have trained to its first one")
    return step


def _require_item(run_folder: str | pathlib.Path, step: int, item: str) -> None:
    if not (_step_folder(run_folder, step) / item / METADATA).is_file():
        raise ValueError(_damaged(run_folder, step, f"it has no {item}/{METADATA}"))


def _damaged(run_folder: str | pathlib.Path, step: int, cause: str) -> str:
    """What is wrong with a checkpoint, and what can be done about it."""
    older = [known for known in _all_steps(run_folder) if known < step]
    way_out = f"or remove it to take step {older[-1]}" if older else "there is no older one"
    return f"{_step_folder(run_folder, step)} is damaged: {cause}; restore it from a copy, {way_out}"


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
