"""Metric files after a kill: they have every row and tag of the completed steps, and a resume continues."""

import math
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from tensorboard_reader import events_in, records, scalars
from tensorboardX.proto.event_pb2 import Event, SessionLog

import zaya_jax
from zaya_jax.run_folder.names import TENSORBOARD_FOLDER
from zaya_jax.train.metrics import tensorboard_events
from zaya_jax.train.metrics.files import MetricsWriter, read_metrics

TAGS = [f"group{number}/norm" for number in range(27)]

# Killed after the save of step 2, when the next step's row and half of its events are written.
WRITING = """
import os, signal, sys
from zaya_jax.train.metrics import tensorboard_events as events
from zaya_jax.train.metrics.files import MetricsWriter

writer = MetricsWriter(sys.argv[1], first_step=0)
tags = sys.argv[2:]
for step in (1, 2):
    writer.write(step, "train", {tag: step + 0.5 for tag in tags})
writer.sync()
given, left = events.scalar, [5]

def scalar(*values):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return given(*values)

events.scalar = scalar
writer.write(3, "train", {tag: 3.5 for tag in tags})
"""


def test_a_killed_run_has_every_tag_of_every_step_before_its_save(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRITING, str(tmp_path), *TAGS],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(zaya_jax.__file__).parents[1])},
        timeout=100,
    )
    assert done.returncode == -signal.SIGKILL
    (file,) = (tmp_path / TENSORBOARD_FOLDER).iterdir()
    expected = {(f"train/{tag}", step): step + 0.5 for tag in TAGS for step in (1, 2)}
    assert {key: value for key, value in scalars(file).items() if key[1] <= 2} == expected
    rows = [row for row in read_metrics(tmp_path, "train") if row["step"] <= 2]
    assert [[row[tag] for tag in TAGS] for row in rows] == [[1.5] * 27, [2.5] * 27]


def test_a_truncated_file_is_followed_by_one_that_sorts_after_it(tmp_path):
    """TensorBoard reads files in the order of their names, each up to its first incomplete record."""
    with MetricsWriter(tmp_path, first_step=0) as writer:
        for step in (1, 2, 3):
            writer.write(step, "train", {"loss": float(step)})
    (first,) = (tmp_path / TENSORBOARD_FOLDER).iterdir()
    first.write_bytes(first.read_bytes()[:-3])
    torn = first.read_bytes()
    with MetricsWriter(tmp_path, first_step=2) as writer:  # in the same second, or near it
        writer.write(3, "train", {"loss": 30.0})
    both = sorted((tmp_path / TENSORBOARD_FOLDER).iterdir())
    assert both[0] == first
    assert first.read_bytes() == torn
    assert scalars(first) == {("train/loss", 1): 1.0, ("train/loss", 2): 2.0}
    assert scalars(both[1]) == {("train/loss", 3): 30.0}
    restart = next(event for event in records(both[1]) if event.HasField("session_log"))
    assert (restart.step, restart.session_log.status) == (3, SessionLog.START)


def test_every_start_has_a_new_file_that_sorts_last(tmp_path):
    """Also within one second, and after a file of a host whose clock is ahead."""
    names = []
    for _ in range(3):
        with MetricsWriter(tmp_path, first_step=0):
            names.append(max(path.name for path in (tmp_path / TENSORBOARD_FOLDER).iterdir()))
    ahead = "events.out.tfevents.9000000000.zz"
    (tmp_path / TENSORBOARD_FOLDER / ahead).write_bytes(b"")
    with MetricsWriter(tmp_path, first_step=0):
        names.append(ahead)
        names.append(max(path.name for path in (tmp_path / TENSORBOARD_FOLDER).iterdir()))
    assert names == sorted(set(names))
    assert names[-1].startswith("events.out.tfevents.9000000001.")


@pytest.mark.parametrize("value", [0.1, -3e-41, 1e300, math.nan, -math.inf])
@pytest.mark.parametrize(("step", "tag"), [(0, ""), (127, "é"), (128, "t" * 127), (2**40, "t" * 20_000)])
def test_records_are_those_of_protobuf(step, tag, value):
    """Sizes around seven bits, and values beyond float32."""
    value_fields = {"tag": tag, "simple_value": value}
    expected = Event(wall_time=1.5e9, step=step, summary={"value": [value_fields]})
    (event,) = events_in(tensorboard_events.scalar(1.5e9, step, tag, value))
    assert (event.wall_time, event.step) == (1.5e9, step)
    assert str(event) == str(expected)  # as text, NaN equals NaN
