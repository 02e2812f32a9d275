"""Runs of several processes: what one process does on as many devices, bit by bit."""

import os
import pathlib
import re
import shutil
import signal
import time

import numpy as np
import pytest
from groups import LIMIT_SECONDS, children, finish, last_step, rows, start, write_config

from zaya_jax.aegis.journal import DIVERGED, ENDS, FINISHED, STALLED, read_events
from zaya_jax.checkpoint import newest_step


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> pathlib.Path:
    """One process with four devices."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    code, said = finish(start(write_config(folder, corpus), processes=1, devices=4))
    assert code == 0, said
    return folder


def _wait_for_step(step: int, folder: pathlib.Path, process) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while last_step(folder) < step:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"step {step} is not reached after {LIMIT_SECONDS} s"
        time.sleep(0.01)


def test_two_processes_stop_together_and_one_goes_on(corpus, undisturbed, tmp_path):
    """The word comes to the second process alone, at a step that would not be saved."""
    folder = tmp_path / "run"
    config = write_config(folder, corpus)
    process = start(config, processes=2, devices=2)
    _wait_for_step(5, folder, process)
    os.kill(children(process)[1], signal.SIGTERM)
    code, said = finish(process)
    assert code == 75, said
    (step,) = map(int, re.findall(r"saved at step (\d+); the same command goes on\n", said))
    assert newest_step(folder) == step == last_step(folder) < 12
    written = {
        path.parent.name for path in (folder / f"checkpoints/{step}").rglob("ocdbt.process_*/manifest.ocdbt")
    }
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}

    code, said = finish(start(config, processes=1, devices=4))
    assert code == 0, said
    assert f"resuming at step {step}" in said
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
def test_who_stands_still_is_named_and_the_run_goes_on(
    kind, process, corpus, undisturbed, tmp_path, monkeypatch
):
    """In its main thread, or so that not even its watchdog runs; the others wait in a collective.

    Through process 0 all words go: where that one is stopped, the others know that by hearing nothing.
    """
    folder = tmp_path / "run"
    monkeypatch.setenv("ZAYA_FAULT", f"{kind}@step=10:process={process}")
    words = ("--config.train.log_every=1", "--config.watch.least_seconds=3")
    config = write_config(folder, corpus)
    code, said = finish(start(config, processes=2, devices=2, words=words, restarts=1))
    assert code == 0, said
    (late,) = re.findall(r"zaya: late: (.*); the same command goes on", said)
    assert late.startswith(f"process {process} on ")
    silent = "which collects the answers and gives none" if process == 0 else "which gives no answer"
    assert ("at step 10 (read)" if kind == "hang" else silent) in late
    assert "_strike" in said or kind != "hang"  # the stack of its main thread
    assert "exit code 124; beginning anew" in said
    assert re.search("resuming at step [48]", said)  # that of 8 may have been under way
    found = {(row["step"], row["kind"]): row["loss"] for row in rows(folder)}
    assert all(found[row["step"], row["kind"]] == row["loss"] for row in rows(undisturbed))
    ends = [(event["event"], event["step"]) for event in read_events(folder) if event["event"] in ENDS]
    assert ends == [(STALLED, 9), (FINISHED, 12)]


@pytest.mark.slow
def test_processes_share_sequences_to_the_closing_sample(corpus, undisturbed, tmp_path):
    """Four devices of two processes have two chunks each of every sequence; two devices each go on."""
    folder = tmp_path / "run"
    config = write_config(folder, corpus)
    words = ("--config.execution.context_devices=4", "--config.train.sample_tokens=3")
    code, said = finish(start(config, processes=2, devices=2, words=words))
    assert code == 0, said
    assert "sample at temperature" in said
    assert_learned_as(undisturbed, folder)

    for step in (8, 12):
        shutil.rmtree(folder / f"checkpoints/{step}")
    words = ("--config.execution.context_devices=2",)
    code, said = finish(start(config, processes=1, devices=4, words=words))
    assert code == 0, said
    assert "resuming at step 4" in said
    assert_learned_as(undisturbed, folder)


def assert_learned_as(undisturbed: pathlib.Path, folder: pathlib.Path) -> None:
    """The same losses to rounding: sums are of other parts."""
    losses = [[row["loss"] for row in rows(each)] for each in (folder, undisturbed)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_what_all_refuse_is_told_once(corpus, tmp_path):
    config = write_config(tmp_path / "run", corpus, batch_size=6)
    code, said = finish(start(config, processes=2, devices=2))
    assert code == 2, said
    assert said.count("data.batch_size is 6; it must be a multiple of 4") == 1
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_device_that_holds_other_numbers_is_named_before_they_are_saved(
    corpus, undisturbed, tmp_path, monkeypatch
):
    """A bit of the first device of the second process is turned; the run goes on from before it."""
    folder = tmp_path / "run"
    monkeypatch.setenv("ZAYA_FAULT", "flip@step=6:process=1")
    code, said = finish(start(write_config(folder, corpus), processes=2, devices=2, restarts=1))
    assert code == 0, said
    assert re.search("device 2 of process 1 on [^ ]+ has other weights than the 3 others", said)
    assert "exit code 76; beginning anew" in said
    assert "resuming at step 4" in said
    assert rows(folder) == rows(undisturbed)
    ends = [(event["event"], event["step"]) for event in read_events(folder) if event["event"] in ENDS]
    assert ends[-1] == (FINISHED, 12)
    assert ends[0][0] == DIVERGED
