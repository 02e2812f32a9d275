"""Saving and restoring of train states. Orbax writes and reads the arrays; this module commits the steps."""

import asyncio
import concurrent.futures
import contextlib
import pathlib
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from zaya_jax.checkpoint.format.array_index import (
    PER_PROCESS,
    SHAPES_PER_PROCESS,
    merge_indexes,
    shapes_agree,
    wait_until_visible,
)
from zaya_jax.checkpoint.format.description import StepDescription, write_description
from zaya_jax.checkpoint.format.layout import (
    EMA,
    STEP_METADATA,
    TRAINING,
    WEIGHTS,
    all_steps,
    folder_bytes,
    step_folder,
    step_metadata,
)
from zaya_jax.checkpoint.format.manifest import Files, commit, sync_and_describe
from zaya_jax.checkpoint.newest import SavedStep
from zaya_jax.checkpoint.retention import Retention, steps_to_make_room, steps_to_remove
from zaya_jax.checkpoint.storage_errors import SaveFailed, explained, silence_threads
from zaya_jax.checkpoint.stored_arrays import StoredArrays, check_shapes
from zaya_jax.checkpoint.writers import has_parts, move_to_writers
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import CollectiveError
from zaya_jax.platform.background import in_background
from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER

T = TypeVar("T")

CHUNK_BYTES = 64 * 2**20
"""Chunk limit of the embedding and the optimizer's arrays; other weights have a chunk per layer or expert."""
SAVE_SECONDS = 1800.0
"""How much longer one process may write than another, and how long process 0 may take to commit or remove a
step; the file system of a cluster may serve them in turn."""


class Checkpoints:
    """Writes the checkpoints of a run. As a context manager, it waits for pending saves at exit.

    A step is written in the background to a folder with a temporary name, which is renamed to the step number
    when all files and the manifest are on disk. A folder whose name is a number was therefore complete. Each
    process writes and hashes its own shards, or with many processes those of a group; the first process
    commits the step.

    Args:
      run_folder: folder of the run. It must not contain a step that is newer than the one it resumes from.
      retention: rules for keeping steps.
      losses: function that returns the held-out losses by step. It is called in the background, and only if a
        rule needs losses.
      writers: desired maximum of processes that write a step, as `train.checkpoint_writers`; None for all.

    Attributes:
      blocking_seconds: seconds for which this process's own copies and files have delayed its training,
        without waits for other processes.
    """

    def __init__(
        self,
        run_folder: str | pathlib.Path,
        *,
        retention: Retention,
        losses: Callable[[], Mapping[int, float]] = dict,
        writers: int | None = None,
    ):
        silence_threads()
        self._run_folder, self._retention, self._losses = run_folder, retention, losses
        self._writers = writers
        # Absolute, because Orbax requires it.
        self._folder = pathlib.Path(run_folder).absolute() / CHECKPOINTS_FOLDER
        self._committing: concurrent.futures.Future[None] | None = None
        self.blocking_seconds, self._writing_seconds = 0.0, 0.0

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        # After an error other processes may have exited, and a pending save would wait for them.
        if kind is None or hosts.num_processes() == 1:
            self.wait()

    def save(
        self,
        step: int,
        *,
        weights: Any,
        training: Any,
        ema: Any = None,
        about: StepDescription | None = None,
    ) -> None:
        """Copies a state to the host and writes it in the background, unless the step already exists.

        Args:
          step: number of steps that the run has done.
          weights: everything that inference needs.
          training: the rest of the train state.
          ema: average of the weights that train, named like them; None if the run has none.
          about: description of the checkpoint; None for a state without a run.

        Raises:
          SaveFailed: if this save or the previous one fails, or the disk has too little space.
        """
        self.wait()
        # Only the first process prepares the folder, but all wait for it and share its failure.
        self._run_on_all(
            "save", lambda: self._prepare((weights, training, ema)) if hosts.is_first() else None
        )
        # The name is random, so one process must choose it for all.
        name = durable.temporary_path(self._folder / str(step)).name
        aside = hosts.broadcast_from_first("place", None if step in all_steps(self._run_folder) else name)
        if aside is None:
            return
        weights, training, ema = move_to_writers((weights, training, ema), self._writers)
        items = {
            WEIGHTS: _save_in_chunks(weights, _weight_chunks),
            TRAINING: _save_in_chunks(training, lambda *_: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)),
            # With the chunks of the weights, because the same readers read it.
            **({} if ema is None else {EMA: _save_in_chunks(ema, _weight_chunks)}),
        }
        # A process without parts would write an index that lists none.
        items = items if has_parts((weights, training)) else {}
        writing = StepWriter(self._folder / aside, step, about)
        seconds, _ = self._run_on_all("copy", lambda: _timed(lambda: writing.begin(items)))
        self.blocking_seconds += seconds
        # The copies on the host are complete here, so training may donate the arrays.
        self._committing = in_background(lambda: self._commit(writing), "checkpoint")

    def newest(self) -> int | None:
        """Waits for the pending save and returns the newest step; None if there is none.

        Raises:
          SaveFailed: if the save failed.
        """
        self.wait()
        return max(all_steps(self._run_folder), default=None)

    def has_failed(self) -> bool:
        """Whether the save in the background has failed, without waiting; `wait` raises the error."""
        committing = self._committing
        return committing is not None and committing.done() and committing.exception() is not None

    def _prepare(self, state: Any) -> None:
        durable.make_folder(self._folder)
        # Left by a killed process. They are not in use, because the run lock allows only one writer.
        for partial in self._folder.glob(f".*{durable.PARTIAL}*"):
            shutil.rmtree(partial)
        self._make_room(state)

    def wait(self) -> None:
        """Waits for the pending save, if any.

        Raises:
          SaveFailed: if it failed.
        """
        committing, self._committing = self._committing, None
        if committing is not None:
            seconds, _ = _timed(committing.result)
            # The rest of the wait is for other processes, whose files took longer.
            self.blocking_seconds += min(seconds, self._writing_seconds)

    def _commit(self, writing: "StepWriter") -> None:
        """Commits a step when all processes have written their files, and removes older ones."""
        outdated: list[str] = []
        self._writing_seconds = commit_together(
            writing.finish,
            lambda described: outdated.extend(self._publish(writing, described)),
            run_on_all=self._run_on_all,
        )
        folders = [self._folder / name for name in hosts.broadcast_from_first("outdated", outdated)]
        if folders:
            # By all: a file system deletes some thousand files per second for one process.
            self._run_on_all("removal", lambda: [*map(_remove_share, folders)], limit_seconds=SAVE_SECONDS)
            self._run_on_all(
                "rest",
                lambda: [*map(shutil.rmtree, folders)] if hosts.is_first() else None,
                limit_seconds=SAVE_SECONDS,
            )

    def _publish(self, writing: "StepWriter", described: list[Files]) -> list[str]:
        """Publishes a step, and renames those that no rule keeps; returns their names."""
        writing.merge(described)
        writing.commit(described)
        # From this rename on, the step is a checkpoint.
        writing.publish(self._folder / str(writing.step))
        steps = all_steps(self._run_folder)
        outdated = steps_to_remove(steps, self._retention, losses=self._scores(), whole=writing.step)
        return [durable.hide_folder(step_folder(self._run_folder, step)).name for step in outdated]

    def _make_room(self, state: Any) -> None:
        """Removes older steps if the next one would leave too little of the disk free."""
        if self._retention.min_free_bytes is None:
            return
        sizes = {step: folder_bytes(self._folder / str(step)) for step in all_steps(self._run_folder)}
        try:
            chosen = steps_to_make_room(
                sizes,
                self._retention,
                losses=self._scores(),
                whole=max(sizes, default=None),
                # An upper bound: Orbax compresses the arrays on disk.
                step_bytes=sum(array.nbytes for array in jax.tree.leaves(state)),
                free_bytes=shutil.disk_usage(self._folder).free,
            )
        except ValueError as error:
            raise self._not_written(str(error)) from error
        for old in chosen:
            remove_step(self._run_folder, old)

    def _scores(self) -> Mapping[int, float]:
        return self._losses() if self._retention.best else {}

    def _run_on_all(self, name: str, work: Callable[[], T], *, limit_seconds: float | None = None) -> T:
        """Runs a part of a save on all processes; a failure in one of them fails the save in all."""

        def explain() -> T:
            with explained(self._not_written):
                return work()

        try:
            return hosts.run_on_all(name, explain, limit_seconds=limit_seconds)
        # Failures of this process already have the right message.
        except SaveFailed:
            raise
        except CollectiveError as error:
            raise SaveFailed(str(error), is_printed_here=error.is_printed_here) from error

    def _not_written(self, cause: str) -> SaveFailed:
        steps = all_steps(self._run_folder)
        previous = f"the latest one is of step {steps[-1]}" if steps else "there is no earlier one"
        return SaveFailed(f"a checkpoint of {self._run_folder} could not be written: {cause}; {previous}")


def commit_together(
    finish: Callable[[], Files],
    publish: Callable[[list[Files]], None],
    *,
    run_on_all: Callable[..., Any] = hosts.run_on_all,
) -> float:
    """Commits what all processes have written; a failure in one of them is raised in all.

    Args:
      finish: waits for this process's files and describes them.
      publish: commits the files of all processes that have some; called only in process 0.
      run_on_all: runs a function in every process, as `hosts.run_on_all`.

    Returns:
      The seconds of `finish` in this process.
    """
    seconds, files = run_on_all("written", lambda: _timed(finish), limit_seconds=SAVE_SECONDS)
    # Each process hashes its own files in parallel; the first one writes the manifest. Of those that have
    # written nothing, thousands would send that they have not.
    described = hosts.gather_to_first("hashes", [files] if files else [])
    run_on_all(
        "commit", lambda: None if described is None else publish(described), limit_seconds=SAVE_SECONDS
    )
    return seconds


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    """Returns the seconds of a call, and its result."""
    start = time.monotonic()
    result = work()
    return time.monotonic() - start, result


def _failure_of(future: Any) -> Exception | None:
    """Waits for a writer even if others have failed, so that none writes to a folder that is then removed."""
    try:
        future.result()
    except Exception as error:
        return error
    return None


class StepWriter:
    """A step that is being written. Orbax writes the arrays, without its barriers between processes.

    With those barriers all processes would wait for one whose disk is full until the timeout. Instead each
    process waits for its own writers, and `hosts` collects the results.

    Attributes:
      aside: temporary folder that the step is written to.
      step: step of the state.
    """

    def __init__(self, aside: pathlib.Path, step: int, about: StepDescription | None):
        self.aside, self.step, self._about = aside, step, about
        self._handlers: dict[str, ocp.StandardCheckpointHandler] = {}
        self._futures: list[Any] = []

    def begin(self, items: dict[str, Any]) -> None:
        """Copies the arrays to the host and starts writing them."""
        # Of the items of this step: a run without an average has two.
        self._handlers = {item: ocp.StandardCheckpointHandler() for item in items}
        for item, arguments in items.items():
            durable.make_folder(self.aside / item)
            saving = self._handlers[item].async_save(epath.Path(self.aside / item), args=arguments)
            self._futures += _run(saving) or ()

    def finish(self) -> Files:
        """Waits until this process's files are on disk, and returns their sizes and hashes."""
        # All writers are awaited before an error is raised, see `_failure_of`.
        failures = [failure for future in self._futures if (failure := _failure_of(future)) is not None]
        if failures:
            raise failures[0]
        own = []
        for item in self._handlers:
            # Only this process's: files of others may still appear and disappear.
            folder, shapes = (
                f"{item}/{start}{hosts.process()}" for start in (PER_PROCESS, SHAPES_PER_PROCESS)
            )
            own += [f"{folder}/{name}" for name in durable.list_files(self.aside / folder)]
            own += [shapes] if (self.aside / shapes).exists() else []
            # By each process: process 0 would take milliseconds for each of thousands of folders.
            durable.sync_folders(self.aside / folder)
        return sync_and_describe(self.aside, own)

    def merge(self, described: list[Files]) -> None:
        """Merges what all processes have written into one index of arrays for each item.

        Args:
          described: what `finish` has returned in each process.

        Raises:
          FileNotFoundError: if this process does not see what another has written.
          ValueError: if the processes have not written all parts of the same arrays.
        """
        for item, handler in self._handlers.items():
            wait_until_visible(self.aside, item, described)
            if shapes_agree(item, described):
                _run(merge_indexes(self.aside / item))
            else:  # Orbax compares them, and says what differs
                handler.finalize(epath.Path(self.aside / item))
            handler.close()

    def commit(self, described: list[Files]) -> None:
        """Writes manifest and commit marker.

        Args:
          described: what `finish` has returned in each process.
        """
        durable.write(self.aside / STEP_METADATA, step_metadata(self._handlers))
        if self._about is not None:
            write_description(self.aside, self._about)
        known = {name: values for files in described for name, values in files.items()}
        # Files that `merge` and this method wrote, which no process has hashed yet.
        names = durable.list_files(self.aside, skip=_is_of_process)
        rest = [name for name in names if name not in known]
        commit(self.aside, self.step, known | sync_and_describe(self.aside, rest))

    def publish(self, folder: pathlib.Path) -> None:
        """Renames the committed step to its final path."""
        durable.publish(self.aside, folder, skip=_is_of_process)


def _is_of_process(name: str) -> bool:
    """Whether a folder has files of one process, which that process has listed, hashed and synced."""
    return name.startswith(PER_PROCESS)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of Orbax, also if an event loop is already running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # asyncio.run fails inside a running loop; a new thread has none.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _remove_share(folder: pathlib.Path) -> None:
    """Removes the folders of some processes; each process removes others, and all together all of them."""
    for path in folder.glob(f"*/{PER_PROCESS}*"):
        number = path.name.removeprefix(PER_PROCESS)
        # By number, since what exists changes meanwhile. More processes may have written the step.
        if number.isdecimal() and int(number) % hosts.num_processes() == hosts.process():
            shutil.rmtree(path)


def remove_step(run_folder: str | pathlib.Path, step: int) -> None:
    """Removes a checkpoint; renamed first, so that a crash never leaves an incomplete one under its name."""
    durable.remove_folder(step_folder(run_folder, step))


def has_training(run_folder: str | pathlib.Path, step: int) -> bool:
    """Whether a run can resume from a checkpoint; converted ones contain weights only."""
    return (step_folder(run_folder, step) / TRAINING).exists()


def has_average(run_folder: str | pathlib.Path, step: int) -> bool:
    """Whether a checkpoint contains an average of the weights next to them."""
    return (step_folder(run_folder, step) / EMA).exists()


def devices_of(saved: SavedStep) -> tuple[int, int]:
    """Number of devices that a saved state was partitioned over, and of those that shared its experts.

    Raises:
      UserError: if the checkpoint does not record it.
    """
    stored = StoredArrays(saved, TRAINING)
    if "num_devices" not in stored.shapes:
        raise UserError(
            f"{step_folder(saved.run_folder, saved.step)} does not record how many devices wrote it, "
            "because an older version did; start a new run from its weights with --config.train.init_from"
        )
    # Checkpoints of versions that could not share experts lack this value.
    of_node = int(stored.read("node_devices", ())) if "node_devices" in stored.shapes else 1
    return int(stored.read("num_devices", ())), of_node


def restore(run_folder: str | pathlib.Path, step: int, *, weights: Any, training: Any) -> tuple[Any, Any]:
    """Restores a checkpoint into arrays with the given shapes, types and shardings.

    Args:
      run_folder: folder of the run.
      step: step of the checkpoint.
      weights: tree of `jax.ShapeDtypeStruct` with shardings for the item "weights".
      training: the same for the item "training".

    Raises:
      UserError: if it cannot be read.
    """
    items = {WEIGHTS: ocp.args.StandardRestore(weights), TRAINING: ocp.args.StandardRestore(training)}
    restored = _restore(run_folder, step, items)
    return restored[WEIGHTS], restored[TRAINING]


def restore_average(run_folder: str | pathlib.Path, step: int, ema: Any) -> Any:
    """Restores the average of a checkpoint that has one, like `restore`.

    Raises:
      UserError: if it cannot be read.
    """
    return _restore(run_folder, step, {EMA: ocp.args.StandardRestore(ema)})[EMA]


def restore_weights(run_folder: str | pathlib.Path, step: int, weights: Any) -> Any:
    """Restores the weights only, like `restore`.

    Raises:
      UserError: if they cannot be read.
    """
    check_shapes(step_folder(pathlib.Path(run_folder).absolute(), step) / WEIGHTS, weights)
    return _restore(run_folder, step, {WEIGHTS: ocp.args.StandardRestore(weights)})[WEIGHTS]


def _restore(run_folder: str | pathlib.Path, step: int, items: dict[str, Any]) -> dict[str, Any]:
    silence_threads()
    folder = step_folder(pathlib.Path(run_folder).absolute(), step)

    def read(item: str) -> Any:
        # A handler has threads, which must end with the read.
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            return handler.restore(epath.Path(folder / item), args=items[item])

    def unreadable(cause: str) -> UserError:
        return UserError(f"{step_folder(run_folder, step)} cannot be read: {cause}")

    with explained(unreadable, reading=True):
        return {item: read(item) for item in items}


def _save_in_chunks(item: Any, chunks: Callable[[Any, Any], ocp.SaveArgs]) -> Any:
    """Sets chunk sizes: Orbax's default, one chunk per stack of layers, must be read at once."""
    return ocp.args.StandardSave(item, save_args=jax.tree.map_with_path(chunks, item))


def _weight_chunks(path: tuple[Any, ...], weight: Any) -> ocp.SaveArgs:
    del weight
    names = [key.key for key in path]
    if "layers" not in names:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    # One chunk per layer, and per expert where there are experts, the unit of conversions.
    return ocp.SaveArgs(shard_axes=(0, 1) if "experts" in names else (0,))
