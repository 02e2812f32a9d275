"""Runs of several processes equal runs of one process with as many devices, bitwise."""

import os
import pathlib
import re
import shutil
import signal
import time

import numpy as np
import pytest
from groups import LIMIT_SECONDS, children, finish, last_step, rows, start, write_config

from zaya_jax.checkpoint import newest_step
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import DIVERGED, ENDS, FINISHED, STALLED


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> pathlib.Path:
    """One process with four devices."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    code, output = finish(start(write_config(folder, corpus), processes=1, devices=4))
    assert code == 0, output
    return folder


def _wait_for_step(step: int, folder: pathlib.Path, process) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while last_step(folder) < step:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"step {step} is not reached after {LIMIT_SECONDS} s"
        time.sleep(0.01)


def test_two_processes_stop_together_and_one_resumes(corpus, undisturbed, tmp_path):
    """The second process alone receives the signal, at a step that would not be saved."""
    folder = tmp_path / "run"
    config = write_config(folder, corpus)
    process = start(config, processes=2, devices=2)
    _wait_for_step(5, folder, process)
    os.kill(children(process)[1], signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    (step,) = map(int, re.findall(r"saved at step (\d+); run the same command again to resume\n", output))
    assert newest_step(folder) == step == last_step(folder) < 12
    written = {
        path.parent.name for path in (folder / f"checkpoints/{step}").rglob("ocdbt.process_*/manifest.ocdbt")
    }
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}

    code, output = finish(start(config, processes=1, devices=4))
    assert code == 0, output
    assert f"resuming at step {step}" in output
    assert rows(folder) == rows(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "process"),
    [
        ("hang", 1),
        *(
            pytest.param(kind, process, marks=pytest.mark.campaign)
            for kind, process in (("lock", 1), ("pause", 1), ("hang", 0), ("lock", 0), ("pause", 0))
        ),
    ],
)
def test_a_stalled_process_is_named_and_the_run_resumes(
    kind, process, corpus, undisturbed, tmp_path, monkeypatch
):
    """Stalled in its main thread, or so that not even its watchdog runs; the others wait in a collective.

    Process 0 relays all messages: if it is the one that stalls, the others notice that it is silent.
    """
    folder = tmp_path / "run"
    monkeypatch.setenv("ZAYA_FAULT", f"{kind}@step=10:process={process}")
    words = ("--config.train.log_every=1", "--config.watch.min_seconds=3")
    config = write_config(folder, corpus)
    code, output = finish(start(config, processes=2, devices=2, words=words, restarts=1))
    assert code == 0, output
    (late,) = re.findall(r"zaya: late: (.*); run the same command again to resume", output)
    assert late.startswith(f"process {process} on ")
    silent = "which collects the answers and does not respond" if process == 0 else "which does not respond"
    assert ("at step 10 (read)" if kind == "hang" else silent) in late
    assert "_inject" in output or kind != "hang"  # the stack of its main thread
    assert "exit code 124; restarting" in output
    assert re.search("resuming at step [48]", output)  # the save of step 8 may have been in progress
    actual = {(row["step"], row["kind"]): row["loss"] for row in rows(folder)}
    assert all(actual[row["step"], row["kind"]] == row["loss"] for row in rows(undisturbed))
    ends = [(event["event"], event["step"]) for event in read_events(folder) if event["event"] in ENDS]
    assert ends == [(STALLED, 9), (FINISHED, 12)]


@pytest.mark.campaign  # tests/multidevice has the same programs on the devices of one process
def test_processes_share_sequences_to_the_closing_sample(corpus, undisturbed, tmp_path):
    """Four devices of two processes have two chunks of every sequence each; two devices each resume."""
    folder = tmp_path / "run"
    config = write_config(folder, corpus)
    words = ("--config.execution.context_devices=4", "--config.train.sample_tokens=3")
    code, output = finish(start(config, processes=2, devices=2, words=words))
    assert code == 0, output
    assert "sample at temperature" in output
    assert_learned_as(undisturbed, folder)

    for step in (8, 12):
        shutil.rmtree(folder / f"checkpoints/{step}")
    words = ("--config.execution.context_devices=2",)
    code, output = finish(start(config, processes=1, devices=4, words=words))
    assert code == 0, output
    assert "resuming at step 4" in output
    assert_learned_as(undisturbed, folder)


def assert_learned_as(undisturbed: pathlib.Path, folder: pathlib.Path) -> None:
    """Compares losses up to rounding, because sums have other parts."""
    losses = [[row["loss"] for row in rows(each)] for each in (folder, undisturbed)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_an_error_of_all_processes_is_printed_once(corpus, tmp_path):
    config = write_config(tmp_path / "run", corpus, batch_size=6)
    code, output = finish(start(config, processes=2, devices=2))
    assert code == 2, output
    assert output.count("data.batch_size is 6; it must be a multiple of 4") == 1
    assert "Traceback" not in output


@pytest.mark.campaign
def test_a_diverged_device_is_named_before_a_save(corpus, undisturbed, tmp_path, monkeypatch):
    """A bit of the first device of the second process is flipped; the run resumes from an earlier step."""
    folder = tmp_path / "run"
    monkeypatch.setenv("ZAYA_FAULT", "flip@step=6:process=1")
    code, output = finish(start(write_config(folder, corpus), processes=2, devices=2, restarts=1))
    assert code == 0, output
    assert re.search("device 2 of process 1 on [^ ]+ holds other weights than the 3 others", output)
    assert "exit code 76; restarting" in output
    assert "resuming at step 4" in output
    assert rows(folder) == rows(undisturbed)
    ends = [(event["event"], event["step"]) for event in read_events(folder) if event["event"] in ENDS]
    assert ends[-1] == (FINISHED, 12)
    assert ends[0][0] == DIVERGED
