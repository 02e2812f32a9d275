"""Metric files of a run: a line of JSON and TensorBoard scalars for each logged step."""

import contextlib
import math
import pathlib
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np

from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import dump_json
from zaya_jax.run_folder.events import parse_row
from zaya_jax.run_folder.names import METRICS_FILE, ROUTER, ROUTERS_FILE, TENSORBOARD_FOLDER
from zaya_jax.train.metrics import tensorboard_events
from zaya_jax.train.metrics.repair import repair_rows

CONFIG_TAG, SAMPLE_TAG = "config", "sample"
"""Tags of texts in TensorBoard and experiment trackers."""
_EVENTS_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


def bits_per_byte(nats: float, num_bytes: float | int) -> float:
    """Converts the total cross-entropy of a text to bits per byte; infinite for an empty text."""
    return nats / math.log(2) / num_bytes if num_bytes else math.inf


def text_loss(loss: float, preferences: Mapping[str, float]) -> float:
    """Returns the cross-entropy per target; for preferences, that of the chosen answer."""
    # Comparable with the preceding run: the loss of pairs does not say how likely good text is.
    if "text_nats" in preferences:
        return preferences["text_nats"]
    return -preferences["logps/chosen"] if preferences else loss


def text_bytes(targets: np.ndarray, weights: np.ndarray, token_bytes_V: np.ndarray) -> float:
    """Returns the bytes of text of the weighted targets."""
    # Weighted like the loss: a target without weight counts no text.
    return float((token_bytes_V[targets] * weights).sum())


class MetricsWriter:
    """Writes `metrics.jsonl`, `routers.jsonl` and TensorBoard events of a run, in one process.

    A resumed run removes rows after the step that it resumes from, so that the files equal those of an
    uninterrupted run.

    Args:
      run_folder: folder of the run.
      first_step: number of completed steps.
      config_text: current config of the run, for TensorBoard.
    """

    def __init__(self, run_folder: str | pathlib.Path, *, first_step: int, config_text: str = ""):
        self._folder = pathlib.Path(run_folder)
        with durable.path_in_errors(self._folder):
            self._file, self._routers = (
                _open_after(self._folder / name, first_step) for name in (METRICS_FILE, ROUTERS_FILE)
            )
            durable.make_folder(self._folder / TENSORBOARD_FOLDER)
            self._events = _new_events_file(self._folder / TENSORBOARD_FOLDER).open("xb")
            self._events.write(tensorboard_events.version(time.time()))
            self._events.write(tensorboard_events.restart(time.time(), first_step + 1))
            if config_text:
                self._events.write(
                    tensorboard_events.text(time.time(), first_step, CONFIG_TAG, as_code(config_text))
                )

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files.

        Raises:
          OSError: with the run folder's name, when the disk is full.
        """
        # All of them, also if one fails: Python would complain at exit about unwritten data.
        with durable.path_in_errors(self._folder), contextlib.ExitStack() as files:
            files.callback(self._file.close)
            files.callback(self._routers.close)
            files.callback(self._events.close)

    def write(self, step: int, kind: str, values: Mapping[str, float], *, phase: str = "") -> None:
        """Writes scalars of a step; NaN and infinities as in `zaya_jax.files.json_files.dump_json`.

        Args:
          step: step of the run.
          kind: "train", "validation" or "tasks".
          values: scalars by name.
          phase: name of the phase; empty in a run without phases.

        Raises:
          OSError: with the run folder's name, when the disk is full.
        """
        where = {"step": step, "kind": kind} | ({"phase": phase} if phase else {})
        with durable.path_in_errors(self._folder):
            self._file.write(dump_json({**where, **values}) + "\n")
            self._file.flush()  # a killed run loses no row
            for name, value in values.items():
                self._events.write(
                    tensorboard_events.scalar(time.time(), step, f"{kind}/{name}", float(value))
                )
            self._events.flush()

    def write_router(self, step: int, counts_LX: np.ndarray, entropy_L: np.ndarray) -> None:
        """Writes token counts and entropies of each layer's router, which TensorBoard does not show.

        Raises:
          OSError: with the run folder's name, when the disk is full.
        """
        row = {
            "step": step,
            "kind": ROUTER,
            "counts": counts_LX.tolist(),
            "entropy": [round(entropy, 4) for entropy in entropy_L.tolist()],
        }
        with durable.path_in_errors(self._folder):
            # Without spaces, which would be a fifth of the line with 40 layers and 16 experts.
            self._routers.write(dump_json(row, separators=(",", ":")) + "\n")
            self._routers.flush()

    def sync(self) -> None:
        """Waits until all rows are on the disk, so that no saved step lacks its rows.

        Raises:
          OSError: with the run folder's name, when the disk cannot take it.
        """
        with durable.path_in_errors(self._folder):
            for file in (self._file, self._routers, self._events):
                file.flush()
                durable.sync(file.name)
                durable.sync(pathlib.Path(file.name).parent)  # the file may be new


def write_text(run_folder: str | pathlib.Path, step: int, tag: str, text: str) -> None:
    """Writes a text for TensorBoard after a run has closed its metrics, in a new file."""
    with _new_events_file(pathlib.Path(run_folder) / TENSORBOARD_FOLDER).open("xb") as file:
        file.write(
            tensorboard_events.version(time.time())
            + tensorboard_events.text(time.time(), step, tag, as_code(text))
        )


def as_code(text: str) -> str:
    """Returns a text as a Markdown code block, which shows it unchanged."""
    # Not `splitlines`, which treats control characters of an untrained network as line ends.
    return "".join(f"    {line}\n" for line in text.removesuffix("\n").split("\n"))


def read_metrics(run_folder: str | pathlib.Path, kind: str) -> list[dict[str, Any]]:
    """Returns the rows of one kind; damaged lines are ignored."""
    name = ROUTERS_FILE if kind == ROUTER else METRICS_FILE
    lines = (pathlib.Path(run_folder) / name).read_bytes().splitlines()
    return [row for row in map(parse_row, lines) if row is not None and row["kind"] == kind]


def _new_events_file(folder: pathlib.Path) -> pathlib.Path:
    """Returns a file name that sorts after those of all existing files: TensorBoard reads them in that order.

    So a file that a kill has truncated is followed by the one of the resumed run, also if the run is resumed
    in the same second, or on a host whose clock is late.
    """
    seconds = [int(match[1]) for path in folder.iterdir() if (match := _EVENTS_FILE.match(path.name))]
    second = max([int(time.time()), *(number + 1 for number in seconds)])
    return folder / f"events.out.tfevents.{second}.{socket.gethostname()}"


def held_out_losses(run_folder: str | pathlib.Path) -> dict[int, float]:
    """Returns the held-out losses of a run by step; a line that is still being written is ignored."""
    if not (pathlib.Path(run_folder) / METRICS_FILE).exists():
        return {}
    rows = read_metrics(run_folder, "validation")
    return {row["step"]: row["loss"] for row in rows if isinstance(row.get("loss"), float | int)}


def check_metric_paths(run_folder: pathlib.Path) -> None:
    """Checks the paths of a run's metric files.

    Raises:
      UserError: for a link, a pipe or another kind of file in their place.
    """
    files = [run_folder / name for name in (METRICS_FILE, ROUTERS_FILE)]
    folder = run_folder / TENSORBOARD_FOLDER
    own_files = [(file, file.is_file(), "file") for file in files]
    for path, is_own, kind in (*own_files, (folder, folder.is_dir(), "folder")):
        # Writes would go through a link to another file, and block on a pipe.
        if path.is_symlink() or (path.exists() and not is_own):
            raise UserError(f"{path} is not a {kind}, and the run writes its metrics there; move it away")


def _open_after(path: pathlib.Path, step: int) -> TextIO:
    repair_rows(path, until=step)
    return path.open("a")
