"""Campaigns of minutes: every number of processes and devices, and sixty kills. Run them by name:

pytest -n 0 -m campaign tests/multiprocess
"""

import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time

import jax
import numpy as np
import pytest
from groups import LIMIT_SECONDS, children, finish, last_step, rows, start, start_words, write_config

from zaya_jax.checkpoint import all_steps, damage_of, load_run, newest_step
from zaya_jax.config import Config

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(4 * 3600)]
HASHES = pathlib.Path(__file__).with_name("state_hashes.py")
GROUPS = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
"""Processes, and devices of each."""
KILLS = int(os.environ.get("ZAYA_KILLS", "60"))
SIGNALS = int(os.environ.get("ZAYA_SIGNALS", "50"))
GRACE_SECONDS = 60.0
"""Time limit on two cores that four processes share."""


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    code, output = finish(start(write_config(folder, corpus), processes=1, devices=8))
    assert code == 0, output
    return folder


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory) -> pathlib.Path:
    """Four processes with two devices each, of which two write the checkpoints, killed after a save."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    process = start(write_config(folder, corpus, checkpoint_writers=2), processes=4, devices=2)
    deadline = time.monotonic() + LIMIT_SECONDS
    while 8 not in all_steps(folder):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for pid in children(process):
        os.kill(pid, signal.SIGKILL)
    code, _ = finish(process)
    assert code == 128 + signal.SIGKILL
    return folder


def _copy(run: pathlib.Path, corpus: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copies a run to another folder, and returns its config file."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints/12", ignore_errors=True)
    file = write_config(folder, corpus)
    values = json.loads((folder / "config.json").read_text()) | {"run_folder": str(folder)}
    (folder / "config.json").write_text(Config.from_dict(values).to_text())
    return file


def test_the_restored_state_is_the_saved_one_on_any_number(killed, corpus, tmp_path):
    actual = {}
    for processes, devices in GROUPS:
        folder = tmp_path / f"{processes}x{devices}"
        _copy(killed, corpus, folder)
        out = tmp_path / f"{folder.name}.json"
        program = "import sys; from zaya_jax.parallel.processes.launch import *; sys.exit(launch(Launch("
        program += f"[sys.executable, *sys.argv[1:]], {processes}, {devices})))"
        words = [sys.executable, "-c", program, str(HASHES), str(folder / "config.json"), str(out)]
        code, output = finish(start_words(words))
        assert code == 0, output
        actual[processes, devices] = json.loads(out.read_text())
    first = actual[1, 1]
    assert first["step"] == 8
    assert len(first["hashes"]) > 50
    assert all(each == first for each in actual.values())


def test_the_finished_run_equals_the_undisturbed_one(killed, undisturbed, corpus, tmp_path):
    """Bitwise on as many devices, and up to rounding on others."""
    expected, weights = rows(undisturbed), load_run(undisturbed).variables
    for processes, devices in GROUPS:
        folder = tmp_path / f"{processes}x{devices}"
        code, output = finish(start(_copy(killed, corpus, folder), processes=processes, devices=devices))
        assert code == 0, output
        assert "resuming at step 8" in output
        actual = rows(folder)
        assert [(row["step"], row["kind"]) for row in actual] == [
            (row["step"], row["kind"]) for row in expected
        ]
        if processes * devices == 8:
            assert actual == expected
            jax.tree.map(np.testing.assert_array_equal, load_run(folder).variables, weights)
        for row, right in zip(actual, expected, strict=True):
            assert row["loss"] == pytest.approx(right["loss"], rel=1e-5)


def _events(folder: pathlib.Path) -> dict[str, set[int]]:
    """Returns the steps of each tag that TensorBoard shows; of a repeated step it shows the last value.

    Without the config, which each attempt writes at its first step.
    """
    from tensorboardX.proto.event_pb2 import Event

    actual: dict[str, set[int]] = {}
    for file in sorted((folder / "tensorboard").iterdir()):
        data, place = file.read_bytes(), 0
        while place + 12 <= len(data):
            size = int.from_bytes(data[place : place + 8], "little")
            if place + size + 16 > len(data):
                break  # truncated by a kill
            event = Event.FromString(data[place + 12 : place + 12 + size])
            place += size + 16
            for value in event.summary.value:
                actual.setdefault(value.tag, set()).add(event.step)
    del actual["config"]
    return actual


def test_sixty_kills(corpus, tmp_path):
    """At random moments from the first import on, of any process or of all at once."""
    moments, kills, number = random.Random(0), 0, 0
    settings = {"num_steps": 120, "checkpoint_every": 3, "eval_every": 40}
    undisturbed = tmp_path / "undisturbed"
    code, output = finish(start(write_config(undisturbed, corpus, **settings), processes=2, devices=1))
    assert code == 0, output
    while kills < KILLS:
        number += 1
        folder = tmp_path / f"killed{number}"
        config = write_config(folder, corpus, **settings)
        while True:
            before = newest_step(folder) or 0
            process = start(config, processes=2, devices=1)
            if kills < KILLS and not _kill(process, moments, folder):
                kills += 1
            code, output = finish(process)
            assert "Traceback" not in output or code, output
            newest = newest_step(folder) or 0  # raises an error if none is intact
            assert newest >= before
            damaged = {step: damage for step in all_steps(folder) if (damage := damage_of(folder, step))}
            assert not damaged
            if code == 0:
                break
        assert rows(folder) == rows(undisturbed)
        ours, theirs = (load_run(each).variables for each in (folder, undisturbed))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        assert _events(folder) == _events(undisturbed)
    print(f"{kills} kills of {number} runs: every one went on from a whole step to the undisturbed end")


def _kill(process, moments: random.Random, folder: pathlib.Path) -> bool:
    """Kills one process or all at a moment; returns whether the run had ended before."""
    victim, everyone = moments.randrange(2), moments.random() < 0.25
    _wait_for_a_moment(process, moments, folder)
    if process.poll() is not None:
        return True
    pids = children(process)
    for pid in pids if everyone else pids[victim : victim + 1]:
        os.kill(pid, signal.SIGKILL)
    return False


def _wait_for_a_moment(process, moments: random.Random, folder: pathlib.Path) -> None:
    """Half of the moments are relative to the start, half to a step, near saves."""
    if moments.random() < 0.5:
        until = time.monotonic() + moments.uniform(0, 15)
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.002)
    else:
        step = last_step(folder) + moments.randrange(1, 30)
        extra = moments.uniform(0, 0.3)
        while last_step(folder) < step and process.poll() is None:
            time.sleep(0.002)
        time.sleep(extra)


def test_fifty_signals(corpus, tmp_path):
    """SIGTERM and Ctrl-C, to one process or to all of them, from the first import to the last step."""
    moments, signals, number, longest = random.Random(1), 0, 0, 0.0
    settings = {"num_steps": 60, "checkpoint_every": 25, "eval_every": 30}
    undisturbed = {}
    for processes in (1, 4):
        folder = tmp_path / f"undisturbed{processes}"
        code, output = finish(start(write_config(folder, corpus, **settings), processes=processes, devices=1))
        assert code == 0, output
        undisturbed[processes] = rows(folder)
    while signals < SIGNALS:
        processes, number = (1, 4)[number % 2], number + 1
        folder = tmp_path / f"stopped{number}"
        config = write_config(folder, corpus, **settings)
        code = -1
        while code != 0:
            process = start(config, processes=processes, devices=1)
            asked = _signal(process, moments, folder) if signals < SIGNALS else None
            code, output = finish(process)
            if asked is None or code == 0:  # the run had ended before
                continue
            signals += 1
            which, since = asked
            longest = max(longest, time.monotonic() - since)
            assert code == {signal.SIGTERM: 75, signal.SIGINT: 130}[which], output
            # No completed work is lost, and no file is incomplete.
            assert (newest_step(folder) or 0) == last_step(folder)
        assert rows(folder) == undisturbed[processes]
    print(f"{signals} signals of {number} runs: each left after {longest:.1f} s at most, with its last step")
    assert longest < GRACE_SECONDS


def _signal(process, moments: random.Random, folder: pathlib.Path) -> tuple[int, float] | None:
    """Sends a signal at a moment; returns signal and time, or None if the run had ended before."""
    which, everyone = moments.choice((signal.SIGTERM, signal.SIGINT)), moments.random() < 0.5
    time.sleep(3)  # until all have printed their first line
    _wait_for_a_moment(process, moments, folder)
    if process.poll() is not None:
        return None
    since = time.monotonic()
    os.kill(process.pid if everyone else moments.choice(children(process)), which)
    return which, since
