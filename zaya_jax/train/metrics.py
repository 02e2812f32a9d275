"""What a run writes down: a line of JSON and TensorBoard scalars a logged step."""

import contextlib
import json
import logging
import math
import pathlib
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np

from zaya_jax import durable
from zaya_jax.aegis.journal import METRICS_FILE, ROUTER, ROUTERS_FILE, parse_row
from zaya_jax.config import Config
from zaya_jax.parallel import hosts
from zaya_jax.train import events

EVENTS_FOLDER = "tensorboard"
CONFIG_TAG, SAMPLE_TAG = "config", "sample"
"""Of texts, in TensorBoard and elsewhere."""
_EVENTS_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.")

# Dense bfloat16 peaks from the vendors' datasheets, in FLOP/s.
PEAK_FLOPS = {
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI250": 362e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The peak of a device in FLOP/s, None where it is not known (CPUs)."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


def bits_per_byte(nats: float, num_bytes: float | int) -> float:
    """Cross-entropy summed over a text, in bits per byte of it; infinite for an empty text."""
    return nats / math.log(2) / num_bytes if num_bytes else math.inf


def text_loss(loss: float, preferences: Mapping[str, float]) -> float:
    """The cross-entropy of a target of which `loss` is the loss; of a pair, that of the chosen answer."""
    # Kept comparable with the run before: a loss of pairs says nothing of how likely good text is.
    return -preferences["logps/chosen"] if preferences else loss


def text_bytes(targets: np.ndarray, weights: np.ndarray, token_bytes_V: np.ndarray) -> float:
    """Bytes of text that the weighted targets stand for."""
    # Weighted, as the loss is: a target that does not count stands for no text.
    return float((token_bytes_V[targets] * weights).sum())


class MetricsWriter:
    """Writes `metrics.jsonl`, `routers.jsonl` and TensorBoard events of a run.

    A resumed run forgets what an earlier one wrote behind the step it resumes from, so that the
    files read as those of an undisturbed run. One process writes.

    Args:
      run_folder: of the run.
      first_step: steps already done.
      config_text: the config with which the run goes on, for TensorBoard.
    """

    def __init__(self, run_folder: str | pathlib.Path, *, first_step: int, config_text: str = ""):
        self._folder = pathlib.Path(run_folder)
        with durable.naming(self._folder):
            self._file, self._routers = (
                _open_after(self._folder / name, first_step) for name in (METRICS_FILE, ROUTERS_FILE)
            )
            durable.make_folder(self._folder / EVENTS_FOLDER)
            self._events = _new_events_file(self._folder / EVENTS_FOLDER).open("xb")
            self._events.write(events.version(time.time()))
            self._events.write(events.restart(time.time(), first_step + 1))
            if config_text:
                self._events.write(events.text(time.time(), first_step, CONFIG_TAG, as_code(config_text)))

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        # Both, whatever becomes of one: Python would complain at its exit of what is left to be written.
        with durable.naming(self._folder), contextlib.ExitStack() as files:
            files.callback(self._file.close)
            files.callback(self._routers.close)
            files.callback(self._events.close)

    def write(self, step: int, kind: str, values: dict[str, float], *, phase: str = "") -> None:
        """Writes scalars of a step.

        Args:
          step: of the run.
          kind: "train", "validation" or "tasks".
          values: by name.
          phase: its phase's name, if any.

        Raises:
          OSError: with the run folder's name, when the disk is full.
        """
        # A run without phases has one that has no name.
        where = {"step": step, "kind": kind} | ({"phase": phase} if phase else {})
        with durable.naming(self._folder):
            self._file.write(json.dumps(where | values) + "\n")
            self._file.flush()  # a killed run has lost nothing that it said
            for name, value in values.items():
                self._events.write(events.scalar(time.time(), step, f"{kind}/{name}", float(value)))
            self._events.flush()

    def write_router(self, step: int, counts_LX: np.ndarray, entropy_L: np.ndarray) -> None:
        """Writes what each layer's router did with the tokens of a step. TensorBoard has no picture of it.

        Raises:
          OSError: with the run folder's name, when the disk is full.
        """
        row = {
            "step": step,
            "kind": ROUTER,
            "counts": counts_LX.tolist(),
            "entropy": [round(entropy, 4) for entropy in entropy_L.tolist()],
        }
        with durable.naming(self._folder):
            # Without spaces: of 40 layers and 16 experts they would be a fifth of the line.
            self._routers.write(json.dumps(row, separators=(",", ":")) + "\n")
            self._routers.flush()

    def sync(self) -> None:
        """Waits until all that was written is on the disk, so that no step that is saved lacks its lines.

        Raises:
          OSError: with the run folder's name, when the disk cannot take it.
        """
        with durable.naming(self._folder):
            for file in (self._file, self._routers, self._events):
                file.flush()
                durable.sync(file.name)
                durable.sync(pathlib.Path(file.name).parent)  # the file may be new


class _NoWriter:
    """Writes nothing: of several processes one writes for all."""

    def __enter__(self) -> "_NoWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def write(self, step: int, kind: str, values: dict[str, float], *, phase: str = "") -> None:
        """Takes what `MetricsWriter.write` takes, and leaves it to the first process."""

    def write_router(self, step: int, counts_LX: np.ndarray, entropy_L: np.ndarray) -> None:
        """Takes what `MetricsWriter.write_router` takes, and leaves it to the first process."""

    def sync(self) -> None:
        """Has nothing that could be lost."""


Writer = MetricsWriter | _NoWriter


def metrics_writer(config: Config, *, first_step: int) -> Writer:
    """A `MetricsWriter` in process 0; in others what takes the same and writes nothing."""
    # Two writers in one file would tear each other's lines.
    if not hosts.is_first():
        return _NoWriter()
    return MetricsWriter(config.run_folder, first_step=first_step, config_text=config.to_text())


def write_text(run_folder: str | pathlib.Path, step: int, tag: str, text: str) -> None:
    """Gives TensorBoard a text that a run made when its metrics were closed: in a file behind theirs."""
    with _new_events_file(pathlib.Path(run_folder) / EVENTS_FOLDER).open("xb") as file:
        file.write(events.version(time.time()) + events.text(time.time(), step, tag, as_code(text)))


def as_code(text: str) -> str:
    """A text as Markdown that shows it letter by letter."""
    # Not `splitlines`, which takes an untrained network's control characters for ends of lines.
    return "".join(f"    {line}\n" for line in text.removesuffix("\n").split("\n"))


def read_metrics(run_folder: str | pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind that a run wrote; those that a disk has damaged are none."""
    name = ROUTERS_FILE if kind == ROUTER else METRICS_FILE
    lines = (pathlib.Path(run_folder) / name).read_bytes().splitlines()
    return [row for row in map(parse_row, lines) if row is not None and row["kind"] == kind]


def _new_events_file(folder: pathlib.Path) -> pathlib.Path:
    """A name behind those of all files that are there: TensorBoard reads them in the order of their names.

    So what a kill cut short at a file's end is followed by all that the resumed run says, also when it starts
    in the same second, or on a host whose clock is behind.
    """
    seconds = [int(match[1]) for path in folder.iterdir() if (match := _EVENTS_FILE.match(path.name))]
    second = max([int(time.time()), *(number + 1 for number in seconds)])
    return folder / f"events.out.tfevents.{second}.{socket.gethostname()}"


def held_out_losses(run_folder: str | pathlib.Path) -> dict[int, float]:
    """The held-out losses that a run wrote, by step; a line that is still being written is left out."""
    if not (pathlib.Path(run_folder) / METRICS_FILE).exists():
        return {}
    rows = read_metrics(run_folder, "validation")
    return {row["step"]: row["loss"] for row in rows if isinstance(row.get("loss"), float | int)}


def check_places(run_folder: pathlib.Path) -> None:
    """Looks at what lies where a run writes its metrics.

    Raises:
      ValueError: if it could not write there, would wait for ever, or would write somewhere else.
    """
    files = [run_folder / name for name in (METRICS_FILE, ROUTERS_FILE)]
    folder = run_folder / EVENTS_FOLDER
    own_files = [(file, file.is_file(), "file") for file in files]
    for path, is_own, kind in (*own_files, (folder, folder.is_dir(), "folder")):
        # A link would be written through, and a pipe waited for: neither file would be this run's.
        if path.is_symlink() or (path.exists() and not is_own):
            raise ValueError(f"{path} is no {kind}, and a run writes its metrics there; move it away")


def _open_after(path: pathlib.Path, step: int) -> TextIO:
    _forget_after(path, step)
    return path.open("a")


def _forget_after(path: pathlib.Path, step: int) -> None:
    """Drops lines of later steps, and those that are none."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    rows = [parse_row(line) for line in lines]
    if lost := rows[:-1].count(None):
        logging.getLogger(__name__).warning("%s had %d damaged lines, which are dropped", path, lost)
    kept = [line + b"\n" for line, row in zip(lines, rows, strict=True) if row and row["step"] <= step]
    durable.write(path, b"".join(kept))
