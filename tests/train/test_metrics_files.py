"""What a kill leaves of a run's metrics: every line and tag of the steps before, and nothing in the way."""

import math
import os
import pathlib
import signal
import struct
import subprocess
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

import zaya_jax
from zaya_jax.train import events
from zaya_jax.train.metrics import EVENTS_FOLDER, MetricsWriter, read_metrics

TAGS = [f"group{number}/norm" for number in range(27)]

# Killed behind the save of step 2, with the next step's line written and its events half under way.
WRITING = """
import os, signal, sys
from zaya_jax.train import events
from zaya_jax.train.metrics import MetricsWriter

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
    (file,) = (tmp_path / EVENTS_FOLDER).iterdir()
    expected = {(f"train/{tag}", step): step + 0.5 for tag in TAGS for step in (1, 2)}
    assert {key: value for key, value in scalars(file).items() if key[1] <= 2} == expected
    rows = [row for row in read_metrics(tmp_path, "train") if row["step"] <= 2]
    assert [[row[tag] for tag in TAGS] for row in rows] == [[1.5] * 27, [2.5] * 27]


def test_a_torn_record_is_followed_by_a_file_that_is_read_behind_it(tmp_path):
    """TensorBoard reads files by the order of their names, each as far as its records are whole."""
    with MetricsWriter(tmp_path, first_step=0) as writer:
        for step in (1, 2, 3):
            writer.write(step, "train", {"loss": float(step)})
    (first,) = (tmp_path / EVENTS_FOLDER).iterdir()
    first.write_bytes(first.read_bytes()[:-3])
    torn = first.read_bytes()
    with MetricsWriter(tmp_path, first_step=2) as writer:  # in the same second, or near it
        writer.write(3, "train", {"loss": 30.0})
    both = sorted((tmp_path / EVENTS_FOLDER).iterdir())
    assert both[0] == first
    assert first.read_bytes() == torn
    assert scalars(first) == {("train/loss", 1): 1.0, ("train/loss", 2): 2.0}
    assert scalars(both[1]) == {("train/loss", 3): 30.0}
    restart = next(event for event in records(both[1]) if event.HasField("session_log"))
    assert (restart.step, restart.session_log.status) == (3, SessionLog.START)


def test_every_start_has_a_file_of_its_own_behind_the_others(tmp_path):
    """In one second, and with a file from a host whose clock is ahead."""
    names = []
    for _ in range(3):
        with MetricsWriter(tmp_path, first_step=0):
            names.append(max(path.name for path in (tmp_path / EVENTS_FOLDER).iterdir()))
    ahead = "events.out.tfevents.9000000000.zz"
    (tmp_path / EVENTS_FOLDER / ahead).write_bytes(b"")
    with MetricsWriter(tmp_path, first_step=0):
        names.append(ahead)
        names.append(max(path.name for path in (tmp_path / EVENTS_FOLDER).iterdir()))
    assert names == sorted(set(names))
    assert names[-1].startswith("events.out.tfevents.9000000001.")


@pytest.mark.parametrize("value", [0.1, -3e-41, 1e300, math.nan, -math.inf])
@pytest.mark.parametrize(("step", "tag"), [(0, ""), (127, "é"), (128, "t" * 127), (2**40, "t" * 20_000)])
def test_records_are_those_of_protobuf(step, tag, value):
    """Sizes around the seven bits of a byte, and what float32 cannot hold."""
    told = {"tag": tag, "simple_value": value}
    expected = Event(wall_time=1.5e9, step=step, summary={"value": [told]})
    (found,) = events_in(events.scalar(1.5e9, step, tag, value))
    assert (found.wall_time, found.step) == (1.5e9, step)
    assert str(found) == str(expected)  # NaN is like itself there


def records(file):
    """Events of a file, up to one that is not whole."""
    return events_in(file.read_bytes())


def events_in(data):
    """As the format of TFRecord has them."""
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        if len(data) < size + 16:
            return
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        assert struct.unpack("<I", data[12 + size : 16 + size]) == (masked_crc32c(data[12 : 12 + size]),)
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def scalars(file):
    """By tag and step."""
    return {
        (value.tag, event.step): value.simple_value
        for event in records(file)
        for value in event.summary.value
    }
