"""Four processes, of which one is slow for some steps and then another one: who is named, and when nobody is.

pytest -n 0 -s -m campaign tests/multiprocess/test_stragglers.py
"""

import dataclasses
import os
import random

import pytest
from groups import start, write_config

from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import CAUGHT_UP, STRAGGLING
from zaya_jax.train.heartbeats import READ

TRIALS = int(os.environ.get("ZAYA_STRAGGLER_TRIALS", "20"))
"""Number of trials with each slowness, and without."""
SECONDS = 2 * 3600
PROCESSES, LOG_EVERY, FIRST_STEP, SLOW_STEPS, TRIAL_STEPS = 4, 2, 10, 20, 32


@dataclasses.dataclass(frozen=True)
class Trial:
    step: int
    process: int
    percent: int

    @property
    def fault(self) -> str:
        return f"slow@step={self.step}:process={self.process}:percent={self.percent}:steps={SLOW_STEPS}"


def plan(seed: int) -> list[Trial]:
    """All slownesses in a random order, each in a random process."""
    numbers = random.Random(seed)
    percentages = numbers.sample([0, 10, 30] * TRIALS, 3 * TRIALS)
    return [
        Trial(FIRST_STEP + n * TRIAL_STEPS, numbers.randrange(PROCESSES), percent)
        for n, percent in enumerate(percentages)
    ]


@pytest.mark.campaign
@pytest.mark.timeout(SECONDS)
def test_slow_processes_are_named_and_others_are_not(corpus, tmp_path, monkeypatch):
    trials, folder = plan(seed=0), tmp_path / "run"
    steps = {"num_steps": FIRST_STEP + len(trials) * TRIAL_STEPS, "log_every": LOG_EVERY}
    rare = {"checkpoint_every": 10**6, "eval_every": 10**6, "eval_sequences": 4}
    config = write_config(folder, corpus, batch_size=PROCESSES, **steps, **rare)
    monkeypatch.setenv("ZAYA_FAULT", ",".join(trial.fault for trial in trials if trial.percent))
    process = start(config, processes=PROCESSES, devices=1)
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, output
    events = read_events(folder)
    alarms = [event for event in events if event["event"] == STRAGGLING]
    right = [(trial, alarm) for trial in trials for alarm in alarms if names(alarm, trial)]
    for percent in (10, 30):
        of_percent = [trial for trial in trials if trial.percent == percent]
        found = {trial for trial, _ in right if trial.percent == percent}
        delays = sorted(alarm["step"] - trial.step for trial, alarm in right if trial.percent == percent)
        print(f"{percent}% slower: {len(found)} of {len(of_percent)} named, after {delays} steps")
        assert len(found) >= 0.9 * len(of_percent)
    wrong = [alarm for alarm in alarms if all(alarm is not each for _, each in right)]
    ended = sum(event["event"] == CAUGHT_UP for event in events)
    print(f"precision {len(right)}/{len(alarms)}, recall {len(right)}/{2 * TRIALS}; {ended} have ended")
    print(f"wrong, among them in {TRIALS} clean trials: {[alarm['reason'] for alarm in wrong]}")
    assert len(right) >= 0.95 * len(alarms)


def names(alarm: dict, trial: Trial) -> bool:
    """Whether an event names the process and section of a trial, in one of its steps."""
    is_within = trial.step <= alarm["step"] < trial.step + TRIAL_STEPS
    is_right = alarm["process"] == trial.process and alarm["section"] == READ
    return trial.percent > 0 and is_within and is_right
