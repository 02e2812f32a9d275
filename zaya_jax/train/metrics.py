"""What a run writes down: a line of JSON and TensorBoard scalars a logged step."""

import contextlib
import json
import logging
import math
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from zaya_jax import durable

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"

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


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Cross-entropy summed over a text, in bits per byte of it; infinite for an empty text."""
    return nats / math.log(2) / num_bytes if num_bytes else math.inf


def text_bytes(targets: np.ndarray, weights: np.ndarray, token_bytes_V: np.ndarray) -> float:
    """Bytes of text that the weighted targets stand for."""
    # Weighted, as the loss is: a target that does not count stands for no text.
    return float((token_bytes_V[targets] * weights).sum())


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard events of a run.

    A resumed run forgets what an earlier one wrote behind the step it resumes from, so that the
    files read as those of an undisturbed run.

    Args:
      run_folder: of the run.
      first_step: steps already done.
    """

    def __init__(self, run_folder: str | pathlib.Path, *, first_step: int):
        # Here, because it imports torch where it finds it: two seconds that a dry run need not wait.
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        self._folder = pathlib.Path(run_folder)
        self._event, self._scalar = Event, scalar
        with self._naming():
            _forget_after(self._folder / METRICS_FILE, first_step)
            self._file = (self._folder / METRICS_FILE).open("a")
            events = self._folder / EVENTS_FOLDER
            events.mkdir(exist_ok=True)
            # Records alone: SummaryWriter's thread dies of a full disk, and then its queue is full for good.
            self._events = RecordWriter(
                str(events / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}")
            )
            self._write_event(file_version="brain.Event:2")
            restart = SessionLog(status=SessionLog.START)  # hides what TensorBoard has of later steps
            self._write_event(step=first_step + 1, session_log=restart)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        # Both, whatever becomes of one: Python would complain at its exit of what is left to be written.
        with self._naming(), contextlib.ExitStack() as files:
            files.callback(self._file.close)
            files.callback(self._events.close)

    def write(self, step: int, kind: str, values: dict[str, float], *, phase: str = "") -> None:
        """Writes scalars of a step; `kind` is "train" or "validation", `phase` its phase's name, if any.

        Raises:
          OSError: with the run folder's name, when the disk is full.
        """
        # A run without phases has one that has no name.
        where = {"step": step, "kind": kind} | ({"phase": phase} if phase else {})
        with self._naming():
            self._file.write(json.dumps(where | values) + "\n")
            self._file.flush()  # a killed run has lost nothing that it said
            for name, value in values.items():
                self._write_event(step=step, summary=self._scalar(f"{kind}/{name}", value))
            self._events.flush()

    def _write_event(self, **fields: Any) -> None:
        self._events.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Says where, in an error of a file that is open: the system does not."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self._folder)
            raise


def read_metrics(run_folder: str | pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind that a run wrote; those that a disk has damaged are none."""
    lines = (pathlib.Path(run_folder) / METRICS_FILE).read_bytes().splitlines()
    return [row for row in map(_parse, lines) if row is not None and row["kind"] == kind]


def check_places(run_folder: pathlib.Path) -> None:
    """Looks at what lies where a run writes its metrics.

    Raises:
      ValueError: if it could not write there, would wait for ever, or would write somewhere else.
    """
    file, events = run_folder / METRICS_FILE, run_folder / EVENTS_FOLDER
    for path, is_own, kind in ((file, file.is_file(), "file"), (events, events.is_dir(), "folder")):
        # A link would be written through, and a pipe waited for: neither file would be this run's.
        if path.is_symlink() or (path.exists() and not is_own):
            raise ValueError(f"{path} is no {kind}, and a run writes its metrics there; move it away")


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line of the file; None if it is none, as the last one that a kill cut short."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the second of a line of a hundred thousand brackets
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("kind"), str)
    return row if is_row else None


def _forget_after(path: pathlib.Path, step: int) -> None:
    """Drops lines of later steps, and those that are none."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    rows = [_parse(line) for line in lines]
    if lost := rows[:-1].count(None):
        logging.getLogger(__name__).warning("%s had %d damaged lines, which are dropped", path, lost)
    kept = [line + b"\n" for line, row in zip(lines, rows, strict=True) if row and row["step"] <= step]
    durable.write(path, b"".join(kept))
