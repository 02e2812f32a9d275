"""A run's states on the disk: Orbax writes and reads the arrays; when a step counts is decided here."""

import asyncio
import concurrent.futures
import contextlib
import pathlib
import shutil
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from zaya_jax import durable
from zaya_jax.checkpoint.about import About, write_about
from zaya_jax.checkpoint.failures import SaveFailed, explained, silence_threads
from zaya_jax.checkpoint.layout import (
    FOLDER,
    STEP_METADATA,
    TRAINING,
    WEIGHTS,
    all_steps,
    folder_bytes,
    step_folder,
    step_metadata,
)
from zaya_jax.checkpoint.manifest import Files, commit, sync_and_describe
from zaya_jax.checkpoint.newest import SavedStep
from zaya_jax.checkpoint.retention import Retention, steps_to_make_room, steps_to_remove
from zaya_jax.checkpoint.stored_arrays import StoredArrays, check_shapes
from zaya_jax.parallel import hosts
from zaya_jax.parallel.failures import Shared

T = TypeVar("T")

CHUNK_BYTES = 64 * 2**20
"""Of the embedding on the disk, and of the optimiser's arrays; other weights are cut by layer and expert."""
SAVE_SECONDS = 1800.0
"""That one process may write longer than another: a file system of a cluster serves them in turn."""
_PER_PROCESS = "ocdbt.process_"
"""Begins the names of the folders that Orbax gives each process to write in."""


class Checkpoints:
    """Writes the checkpoints of a run. Use it as a context: leaving waits for what is being written.

    A step is written aside, in the background, and gets its name when all of it is on the disk, with the
    manifest of its files: whatever has a number for its name was whole. Of several processes each writes
    its shards and hashes what it wrote; the first one commits what all have written.

    Args:
      run_folder: of the run, in which no step is newer than the one that it goes on from.
      retention: which steps stay.
      losses: gives the held-out losses by step; called in the background, where a rule asks for them.
    """

    def __init__(
        self,
        run_folder: str | pathlib.Path,
        *,
        retention: Retention,
        losses: Callable[[], Mapping[int, float]] = dict,
    ):
        silence_threads()
        self._run_folder, self._retention, self._losses = run_folder, retention, losses
        self._folder = pathlib.Path(run_folder).absolute() / FOLDER
        self._committing: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        # Behind an error the others may be gone, and what is written waits for them.
        if kind is None or hosts.num_processes() == 1:
            self.wait()

    def save(self, step: int, *, weights: Any, training: Any, about: About | None = None) -> None:
        """Copies a state and writes it in the background, unless that step is there already.

        Args:
          step: that the state is behind.
          weights: all that inference needs.
          training: the rest of the state.
          about: what the checkpoint is to say of itself; None of a state without a run.

        Raises:
          SaveFailed: if this one, or the one before, cannot be written, or the disk has no room for it.
        """
        self.wait()
        self._together("save", lambda: self._prepare((weights, training)) if hosts.is_first() else None)
        aside = hosts.from_first("place", None if self._has(step) else self._name(step))
        if aside is None:
            return
        items = {WEIGHTS: _save_in_chunks(weights, _chunks), TRAINING: _save_in_chunks(training, _pieces)}
        writing = _Writing(self._folder / aside, step, about)
        self._together("copy", lambda: writing.begin(items))
        self._committing = _in_background(lambda: self._commit(writing))

    def newest(self) -> int | None:
        """Waits for what is being written, and gives the newest step by its name; None without any.

        Raises:
          SaveFailed: if it cannot be written.
        """
        self.wait()
        return max(all_steps(self._run_folder), default=None)

    def has_failed(self) -> bool:
        """Whether a save has failed in the background, of which `wait` tells; costs nothing."""
        committing = self._committing
        return committing is not None and committing.done() and committing.exception() is not None

    def _has(self, step: int) -> bool:
        return step in all_steps(self._run_folder)

    def _name(self, step: int) -> str:
        return durable.name_beside(self._folder / str(step)).name

    def _prepare(self, state: Any) -> None:
        durable.make_folder(self._folder)
        # What a killed process left: one run writes into a run folder.
        for partial in self._folder.glob(f".*{durable.PARTIAL}*"):
            shutil.rmtree(partial)
        self._make_room(state)

    def wait(self) -> None:
        """Waits for the save that is under way, if any.

        Raises:
          SaveFailed: if it fails.
        """
        committing, self._committing = self._committing, None
        if committing is not None:
            committing.result()

    def _commit(self, writing: "_Writing") -> None:
        """Gives a step its name, when all processes have written it."""
        files = self._together("written", writing.finish, limit_seconds=SAVE_SECONDS)
        described = hosts.gather("hashes", files)
        self._together("commit", lambda: self._publish(writing, described) if hosts.is_first() else None)

    def _publish(self, writing: "_Writing", described: list[Files]) -> None:
        writing.commit(described)
        durable.publish(writing.aside, self._folder / str(writing.step))
        steps = all_steps(self._run_folder)
        for old in steps_to_remove(steps, self._retention, losses=self._scores(), whole=writing.step):
            remove_step(self._run_folder, old)

    def _make_room(self, state: Any) -> None:
        """Removes older steps where the next one would leave too little of the disk free."""
        if self._retention.min_free_bytes is None:
            return
        sizes = {step: folder_bytes(self._folder / str(step)) for step in all_steps(self._run_folder)}
        try:
            chosen = steps_to_make_room(
                sizes,
                self._retention,
                losses=self._scores(),
                whole=max(sizes, default=None),
                # As the arrays are in memory; on the disk they are less, for Orbax compresses them.
                step_bytes=sum(array.nbytes for array in jax.tree.leaves(state)),
                free_bytes=shutil.disk_usage(self._folder).free,
            )
        except ValueError as error:
            raise self._not_written(str(error)) from error
        for old in chosen:
            remove_step(self._run_folder, old)

    def _scores(self) -> Mapping[int, float]:
        return self._losses() if self._retention.best else {}

    def _together(self, name: str, work: Callable[[], T], *, limit_seconds: float | None = None) -> T:
        """Has all processes do a part of a save; what one of them cannot is a failure of the save in all."""

        def explain() -> T:
            with explained(self._not_written):
                return work()

        try:
            return hosts.together(name, explain, limit_seconds=limit_seconds)
        except SaveFailed:
            raise
        except Shared as error:
            raise SaveFailed(str(error), is_told_here=error.is_told_here) from error

    def _not_written(self, cause: str) -> SaveFailed:
        steps = all_steps(self._run_folder)
        stands = f"that of step {steps[-1]} stands" if steps else "there is none before it"
        return SaveFailed(f"a checkpoint of {self._run_folder} could not be written: {cause}; {stands}")


def _in_background(work: Callable[[], None]) -> concurrent.futures.Future[None]:
    """Runs something in a thread that does not keep a process from leaving, as those of a pool do."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits is to have it, whatever it is
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _failure_of(future: Any) -> Exception | None:
    """Waits for a writer, whatever became of the others: none may write on in a folder that is given up."""
    try:
        future.result()
    except Exception as error:
        return error
    return None


class _Writing:
    """A step on its way to the disk: Orbax writes the arrays, without its barriers.

    Those would have all processes wait for one whose disk is full, for as long as a save may take. So each
    process asks its own writers, and hears of the others through `hosts`.

    Attributes:
      aside: the folder that it is written in.
      step: whose state it is.
    """

    def __init__(self, aside: pathlib.Path, step: int, about: About | None):
        self.aside, self.step, self._about = aside, step, about
        self._handlers = {item: ocp.StandardCheckpointHandler() for item in (WEIGHTS, TRAINING)}
        self._futures: list[Any] = []

    def begin(self, items: dict[str, Any]) -> None:
        """Copies the arrays to the host, and begins to write them."""
        for item, arguments in items.items():
            durable.make_folder(self.aside / item)
            saving = self._handlers[item].async_save(epath.Path(self.aside / item), args=arguments)
            self._futures += _run(saving) or ()

    def finish(self) -> Files:
        """Waits until this process' files are on the disk; their sizes and hashes."""
        failures = [failure for future in self._futures if (failure := _failure_of(future)) is not None]
        if failures:
            raise failures[0]
        own = []
        for item in self._handlers:
            # No more than this: in what others write, files come and go still.
            mine = f"{item}/{_PER_PROCESS}{hosts.process()}"
            own += [f"{mine}/{name}" for name in durable.list_files(self.aside / mine)]
        return sync_and_describe(self.aside, own)

    def commit(self, described: list[Files]) -> None:
        """Puts together what all processes have written, and marks it as whole."""
        for item, handler in self._handlers.items():
            handler.finalize(epath.Path(self.aside / item))
            handler.close()
        durable.write(self.aside / STEP_METADATA, step_metadata((WEIGHTS, TRAINING)))
        if self._about is not None:
            write_about(self.aside, self._about)
        known = {name: about for files in described for name, about in files.items()}
        rest = [name for name in durable.list_files(self.aside) if name not in known]
        commit(self.aside, self.step, known | sync_and_describe(self.aside, rest))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs Orbax' work to its end, also within a loop that runs already, as that of a notebook does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # A thread has no loop yet.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def remove_step(run_folder: str | pathlib.Path, step: int) -> None:
    """Removes a checkpoint: its name first, so that a crash on the way leaves none without its files."""
    durable.remove_folder(step_folder(run_folder, step))


def has_training(run_folder: str | pathlib.Path, step: int) -> bool:
    """Whether a run can go on from a checkpoint; one that was converted has weights only."""
    return (step_folder(run_folder, step) / TRAINING).exists()


def devices_of(saved: SavedStep) -> tuple[int, int]:
    """How many devices a state was partitioned among when it was written, and how many shared its experts.

    Raises:
      ValueError: if its checkpoint does not say.
    """
    stored = StoredArrays(saved, TRAINING)
    if "num_devices" not in stored.shapes:
        raise ValueError(
            f"{step_folder(saved.run_folder, saved.step)} does not say how many devices wrote it: an older "
            "version did; a new run can start from its weights, with --config.train.init_from"
        )
    # Before they could, they had no number.
    of_node = int(stored.read("node_devices", ())) if "node_devices" in stored.shapes else 1
    return int(stored.read("num_devices", ())), of_node


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


def _restore(run_folder: str | pathlib.Path, step: int, items: dict[str, Any]) -> dict[str, Any]:
    silence_threads()
    folder = step_folder(pathlib.Path(run_folder).absolute(), step)

    def read(item: str) -> Any:
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            return handler.restore(epath.Path(folder / item), args=items[item])

    def unreadable(cause: str) -> ValueError:
        return ValueError(f"{step_folder(run_folder, step)} cannot be read: {cause}")

    with explained(unreadable, reading=True):
        return {item: read(item) for item in items}


def _save_in_chunks(item: Any, chunks: Callable[[Any, Any], ocp.SaveArgs]) -> Any:
    """Orbax would write a stack of layers as one chunk, which only a host that holds it whole could read."""
    return ocp.args.StandardSave(item, save_args=jax.tree.map_with_path(chunks, item))


def _pieces(path: tuple[Any, ...], array: Any) -> ocp.SaveArgs:
    del path, array
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)


def _chunks(path: tuple[Any, ...], weight: Any) -> ocp.SaveArgs:
    del weight
    names = [key.key for key in path]
    if "layers" not in names:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.SaveArgs(shard_axes=(0, 1) if "experts" in names else (0,))
