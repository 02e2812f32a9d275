"""What a run's first weights give the answers of its preferences: computed once, and kept in the run folder.

The reference of [DPO] never moves, so that what it gives an answer is a number of the corpus like its tokens.
A pass before the first step writes these numbers down, and no step needs a second network, with adapters or
without. They are written in parts: a pass that was killed goes on with the parts that are missing. Each part
is bound by its hash to the checkpoint, the corpus and the windows that it is of.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from zaya_jax import durable
from zaya_jax.aegis.heartbeats import EVALUATE, Heartbeats
from zaya_jax.checkpoint import identity_of
from zaya_jax.data.loader import Share, evaluation_batches, num_sequences
from zaya_jax.data.mixture import mixture_of
from zaya_jax.data.shards import fingerprint
from zaya_jax.json_files import read_json
from zaya_jax.parallel import hosts
from zaya_jax.parallel.mesh import local_rows, place_rows
from zaya_jax.train.opening import OpenRun, References
from zaya_jax.train.programs import reference_program
from zaya_jax.train.progress import QUIET_SECONDS
from zaya_jax.train.state import TrainState

FOLDER = "reference"
ABOUT = "reference.json"
"""Says whose weights they are."""
PART_WINDOWS = 1024
"""Windows of a part, or a batch of the run if that is more."""
_HASH_BYTES = 16


@dataclasses.dataclass(frozen=True)
class _Part:
    """Windows of a split whose numbers are in one file.

    Attributes:
      corpus: its folder, as the config names it.
      fingerprint: of the corpus.
      split: of the corpus.
      first: of the windows.
      num_windows: how many they are.
    """

    corpus: str
    fingerprint: str
    split: str
    first: int
    num_windows: int

    @property
    def file(self) -> str:
        """Its name, the same wherever the corpus lies."""
        return f"{self.fingerprint}-{self.split}-{self.first:09d}"


def compute_references(run: OpenRun, state: TrainState, heartbeats: Heartbeats) -> References:
    """The references of a run that begins: those parts that are not there are computed.

    Args:
      run: whose preferences they are of.
      state: with the weights that it begins with.
      heartbeats: of this process.
    """
    parts = _parts(run)
    # One looks, so that all compute the same parts.
    missing = hosts.from_first("reference", hosts.first_does("reference", lambda: _begin(run, parts)))
    if missing:
        _compute(run, state, [parts[number] for number in missing], heartbeats)
    return load_references(run)


def load_references(run: OpenRun) -> References:
    """The references of a run that has begun, from its folder.

    Raises:
      ValueError: if they are not there or not as they were written.
    """
    return hosts.together("references", lambda: _load(run))


def _parts(run: OpenRun) -> list[_Part]:
    """All that the run may read: the training splits, and the one that is held out."""
    data = run.config.data
    splits = [(folder, "train") for folder in mixture_of(data).folders] + [(data.corpus, "validation")]
    # By what never changes while a run goes on: other microbatches or devices find the same parts.
    size = max(PART_WINDOWS, data.batch_size)
    parts = []
    for folder, split in splits:
        corpus = run.corpora[folder]
        num_windows = num_sequences(corpus, split, data.sequence_length)
        parts += [
            _Part(folder, fingerprint(corpus), split, first, min(size, num_windows - first))
            for first in range(0, num_windows, size)
        ]
    return parts


def _folder(run: OpenRun) -> pathlib.Path:
    return pathlib.Path(run.config.run_folder) / FOLDER


def _begin(run: OpenRun, parts: Sequence[_Part]) -> list[int]:
    """Has the folder be of the weights that the run starts from; returns which parts are not in it."""
    assert run.start is not None, "config.dpo asks for train.init_from"
    folder, start = _folder(run), run.start
    weights = identity_of(start.run_folder, start.step)
    if folder.exists() and _weights(folder) != weights:  # of weights that have trained on since
        durable.remove_folder(folder)
    durable.make_folder(folder)
    # First of all files: parts without it would be of nobody's weights.
    about = {"weights": weights, "init_from": start.run_folder, "step": start.step}
    durable.write(folder / ABOUT, json.dumps(about, indent=2) + "\n")
    return [number for number, part in enumerate(parts) if _read(folder, part, weights) is None]


def _weights(folder: pathlib.Path) -> str | None:
    """Whose weights the folder is of; None if it does not say."""
    try:
        return read_json(folder / ABOUT).get("weights")
    except ValueError:
        return None


def _compute(run: OpenRun, state: TrainState, parts: Sequence[_Part], heartbeats: Heartbeats) -> None:
    """Writes parts, one after the other."""
    config, setup = run.config, run.setup(run.config)
    program = reference_program(state, setup=setup, mesh=run.mesh)
    # No larger than what the steps will hold, which are sized for their microbatches.
    batch_size = config.data.batch_size // config.execution.num_microbatches
    total, done, spoke = sum(part.num_windows for part in parts), 0, time.monotonic()
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
        # As they are learned from: what counts of an answer must count here too.
        for batch in run.extensions.of_batches(batches):
            heartbeats.enter(EVALUATE, 0)
            found = jax.device_get(program(state, place_rows(batch, run.mesh)))
            windows += [of_row.reshape(-1)[: 2 * num] for of_row, num in zip(*found, strict=True)]
        # All devices have all rows, so that one process writes what others have read.
        if hosts.is_first():
            # The last batch has rows behind the part's end.
            _write(_folder(run), part, windows[: part.num_windows])
        done += part.num_windows
        if time.monotonic() - spoke >= QUIET_SECONDS:
            print(f"reference: {done:,} of {total:,} windows")
            spoke = time.monotonic()


def _write(folder: pathlib.Path, part: _Part, windows: Sequence[np.ndarray]) -> None:
    # Little-endian whatever writes it: a run may go on elsewhere.
    counts = np.array([len(window) for window in windows], "<u4")
    content = counts.tobytes() + np.concatenate(windows).astype("<f4").tobytes()
    durable.write(folder / part.file, _hash(part, str(_weights(folder)), content) + content)


def _read(folder: pathlib.Path, part: _Part, weights: str) -> list[np.ndarray] | None:
    """What a part has for the sides of each of its windows; None if it is not there as it was written."""
    path = folder / part.file
    raw = path.read_bytes() if path.is_file() else b""
    content = raw[_HASH_BYTES:]
    if raw[:_HASH_BYTES] != _hash(part, weights, content):
        return None
    # Behind the hash nothing can be of another length than was written.
    counts = np.frombuffer(content[: 4 * part.num_windows], "<u4")
    values = np.frombuffer(content[4 * part.num_windows :], "<f4")
    return np.split(values, np.cumsum(counts)[:-1])


def _hash(part: _Part, weights: str, content: bytes) -> bytes:
    # What is bound is no part of the file: a part of other weights, or under another part's name, has another
    # hash, and is as good as none.
    bound_to = f"{weights} {part.file} {part.num_windows}\n"
    return durable.hash_of(bound_to.encode() + content)


def _load(run: OpenRun) -> References:
    folder = _folder(run)
    weights, found = _weights(folder), {}
    for part in _parts(run):
        windows = None if weights is None else _read(folder, part, weights)
        if windows is None:
            raise durable.Damaged(
                f"{folder / part.file}, what the reference gives {part.corpus}, is missing or not as it was "
                "written; put it back from a copy, or begin the run anew (--overwrite)"
            )
        found.setdefault((part.corpus, part.split), []).extend(windows)
    return found
