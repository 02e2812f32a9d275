"""What a run writes down: a line of JSON and TensorBoard scalars a logged step."""

import json
import math
import os
import pathlib
from typing import Any

import numpy as np

METRICS_FILE = "metrics.jsonl"

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
        from tensorboardX import SummaryWriter

        folder = pathlib.Path(run_folder)
        _forget_after(folder / METRICS_FILE, first_step)
        self._file = (folder / METRICS_FILE).open("a")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()
        self._events.close()

    def write(self, step: int, kind: str, values: dict[str, float], *, phase: str = "") -> None:
        """Writes scalars of a step; `kind` is "train" or "validation", `phase` its phase's name, if any."""
        where = {"step": step, "kind": kind} | ({"phase": phase} if phase else {})
        self._file.write(json.dumps(where | values) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)


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
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    aside = path.with_suffix(".partial")
    aside.write_text("".join(kept))
    os.replace(aside, path)
