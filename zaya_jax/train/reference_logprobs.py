"""Reference log-probabilities of preference answers under the initial weights, stored in the run folder.

The reference of [DPO] never changes, so the log-probability of each answer is computed once, in a pass before
the first step. No step needs a second network. The pass writes parts, and after a kill it continues with the
missing ones. A hash binds each part to its checkpoint, corpus and windows.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from zaya_jax.checkpoint import identity_of
from zaya_jax.data.corpora.shards import fingerprint
from zaya_jax.data.reading.loader import Share, evaluation_batches, num_sequences
from zaya_jax.data.reading.mixture import mixture_of
from zaya_jax.errors import DamagedError
from zaya_jax.files import durable
from zaya_jax.files.json_files import read_json
from zaya_jax.parallel.mesh import local_rows, place_rows
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import REFERENCE_FILE, REFERENCE_FOLDER
from zaya_jax.train.compiled_programs import reference_program
from zaya_jax.train.heartbeats import EVALUATE, Heartbeats
from zaya_jax.train.hooks.progress import QUIET_SECONDS
from zaya_jax.train.setup import PreparedRun, References
from zaya_jax.train.step.state import TrainState

PART_WINDOWS = 1024
"""Number of windows of a part, or the batch size if that is larger."""
_HASH_BYTES = 16


@dataclasses.dataclass(frozen=True)
class WindowRange:
    """Windows of a split whose results are in one file.

    Attributes:
      corpus: folder of the corpus, as the config names it.
      fingerprint: fingerprint of the corpus.
      split: name of the split.
      first: index of the first window.
      num_windows: number of windows.
    """

    corpus: str
    fingerprint: str
    split: str
    first: int
    num_windows: int

    @property
    def file(self) -> str:
        """File name, which does not depend on the location of the corpus."""
        return f"{self.fingerprint}-{self.split}-{self.first:09d}"


def compute_references(run: PreparedRun, state: TrainState, heartbeats: Heartbeats) -> References:
    """Computes the missing references of a new run, and loads all of them.

    Args:
      run: run on preferences.
      state: state with the initial weights.
      heartbeats: heartbeats of this process.
    """
    parts = parts_of(run)
    # One process decides, so that all compute the same parts.
    missing = hosts.broadcast_from_first(
        "reference", hosts.run_on_first("reference", lambda: _begin(run, parts))
    )
    if missing:
        _compute(run, state, [parts[number] for number in missing], heartbeats)
    return load_references(run)


def load_references(run: PreparedRun) -> References:
    """Loads the references of a resumed run from its folder.

    Raises:
      UserError: if they are missing or damaged.
    """
    return hosts.run_on_all("references", lambda: _load(run))


def parts_of(run: PreparedRun) -> list[WindowRange]:
    """Returns the parts of all splits that the run may read: training splits and the held-out one.

    A part has so few windows that its results fit in memory, and a killed pass repeats at most one part.
    """
    data = run.config.data
    splits = [(folder, "train") for folder in mixture_of(data).folders] + [(data.corpus, "validation")]
    # By fields that a resume cannot change, so that other microbatches or devices find the same parts.
    size = max(PART_WINDOWS, data.batch_size)
    parts = []
    for folder, split in splits:
        corpus = run.corpora[folder]
        num_windows = num_sequences(corpus, split, data.sequence_length)
        parts += [
            WindowRange(folder, fingerprint(corpus), split, first, min(size, num_windows - first))
            for first in range(0, num_windows, size)
        ]
    return parts


def _folder(run: PreparedRun) -> pathlib.Path:
    return pathlib.Path(run.config.run_folder) / REFERENCE_FOLDER


def _begin(run: PreparedRun, parts: Sequence[WindowRange]) -> list[int]:
    """Prepares the folder for the weights that the run starts from; returns the indices of missing parts."""
    assert run.start is not None, "config.dpo requires train.init_from"
    folder, start = _folder(run), run.start
    weights = identity_of(start.run_folder, start.step)
    if folder.exists() and _weights(folder) != weights:  # of other initial weights
        durable.remove_folder(folder)
    durable.make_folder(folder)
    # Before all parts: a part is valid only together with this record of its weights.
    about = {"weights": weights, "init_from": start.run_folder, "step": start.step}
    durable.write(folder / REFERENCE_FILE, json.dumps(about, indent=2) + "\n")
    return [number for number, part in enumerate(parts) if _read(folder, part, weights) is None]


def _weights(folder: pathlib.Path) -> str | None:
    """Reads the identity of the weights of the references; None if it is not recorded."""
    try:
        return read_json(folder / REFERENCE_FILE).get("weights")
    except ValueError:
        return None


def _compute(
    run: PreparedRun, state: TrainState, parts: Sequence[WindowRange], heartbeats: Heartbeats
) -> None:
    """Computes and writes parts, one after the other."""
    config, setup = run.config, run.setup(run.config)
    program = reference_program(state, setup=setup, mesh=run.mesh)
    # The size of a microbatch, for which the run's memory is sized.
    batch_size = config.data.batch_size // config.execution.num_microbatches
    total, done, last_line = sum(part.num_windows for part in parts), 0, time.monotonic()
    print(f"reference: {total:,} windows of pairs under the weights of {config.train.init_from}")
    for part in parts:
        batches = evaluation_batches(
            run.corpora[part.corpus],
            split=part.split,
            sequence_length=config.data.sequence_length,
            batch_size=batch_size,
            first=part.first,
            limit=part.num_windows,
            share=Share(local_rows(run.mesh, batch_size)),
        )
        windows: list[np.ndarray] = []
        # With extensions, as in training: the same tokens of an answer must count.
        for batch in run.extensions.of_batches(batches):
            heartbeats.enter(EVALUATE, 0)
            results = jax.device_get(program(state, place_rows(batch, run.mesh)))
            windows += [of_row.reshape(-1)[: 2 * num] for of_row, num in zip(*results, strict=True)]
        # All devices have all rows, so that one process can write them.
        if hosts.is_first():
            # The last batch is padded with rows after the end of the part.
            _write(_folder(run), part, windows[: part.num_windows])
        done += part.num_windows
        if time.monotonic() - last_line >= QUIET_SECONDS:
            print(f"reference: {done:,} of {total:,} windows")
            last_line = time.monotonic()


def _write(folder: pathlib.Path, part: WindowRange, windows: Sequence[np.ndarray]) -> None:
    # Little-endian on every machine, because a run may be resumed on another one.
    counts = np.array([len(window) for window in windows], "<u4")
    content = counts.tobytes() + np.concatenate(windows).astype("<f4").tobytes()
    durable.write(folder / part.file, _hash(part, str(_weights(folder)), content) + content)


def _read(folder: pathlib.Path, part: WindowRange, weights: str) -> list[np.ndarray] | None:
    """Reads the log-probabilities of the sides of each window of a part; None if it is missing or damaged."""
    path = folder / part.file
    raw = path.read_bytes() if path.is_file() else b""
    content = raw[_HASH_BYTES:]
    if raw[:_HASH_BYTES] != _hash(part, weights, content):
        return None
    # After the hash has matched, all lengths are those that were written.
    counts = np.frombuffer(content[: 4 * part.num_windows], "<u4")
    values = np.frombuffer(content[4 * part.num_windows :], "<f4")
    return np.split(values, np.cumsum(counts)[:-1])


def _hash(part: WindowRange, weights: str, content: bytes) -> bytes:
    # The hash covers weights and name, which are not in the file: a part of other weights, or with the name
    # of another part, does not match.
    bound_to = f"{weights} {part.file} {part.num_windows}\n"
    return durable.hash_of(bound_to.encode() + content)


def _load(run: PreparedRun) -> References:
    folder = _folder(run)
    weights, found = _weights(folder), {}
    for part in parts_of(run):
        windows = None if weights is None else _read(folder, part, weights)
        if windows is None:
            raise DamagedError(
                f"{folder / part.file}, the reference for {part.corpus}, is missing or damaged; "
                "restore it from a copy, or start the run from scratch (--overwrite)"
            )
        found.setdefault((part.corpus, part.split), []).extend(windows)
    return found
