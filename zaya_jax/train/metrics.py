"""What a run writes down: a line of JSON and TensorBoard scalars a logged step."""

import contextlib
import json
import math
import pathlib
import socket
import time
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
        with durable.naming(self._folder):
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
        with durable.naming(self._folder), contextlib.ExitStack() as files:
            files.callback(self._file.close)
            files.callback(self._events.close)

    def write(self, step: int, kind: str, values: dict[str, float], *, phase: str = "") -> None:
        """Writes scalars of a step; `kind` is "train" or "validation", `phase` its phase's name, if any.

        Raises:
          OSError: with the run folder's name, when the disk is full.
        """
        # A run without phases has one that has no name.
        where = {"step": step, "kind": kind} | ({"phase": phase} if phase else {})
        with durable.naming(self._folder):
            self._file.write(json.dumps(where | values) + "\n")
            self._file.flush()  # a killed run has lost nothing that it said
            for name, value in values.items():
                self._write_event(step=step, summary=self._scalar(f"{kind}/{name}", value))
            self._events.flush()

    def _write_event(self, **fields: Any) -> None:
        self._events.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def read_metrics(run_folder: str | pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind that a run wrote."""
    lines = (pathlib.Path(run_folder) / METRICS_FILE).read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def _forget_after(path: pathlib.Path, step: int) -> None:
    """Drops lines of later steps, and a last line that a crash cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that a kill cut short
        if row["step"] <= step:
            kept.append(line + "\n")
    durable.write(path, "".join(kept))
