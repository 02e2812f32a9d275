"""A trace contains the configured steps, and the names of the model's blocks in its programs; XLA dumps are
written to the run folder."""

import gzip
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from quick_compilation import FOLDER
from small_runs import build_small_corpus, small_values

import zaya_jax
from zaya_jax.config import Config, ProfileConfig
from zaya_jax.run_folder.names import PROFILE_FOLDER
from zaya_jax.train.hooks.profiling import Profiler

BLOCKS = ("attention", "experts", "loss", "optimizer", "balancing")


def config_of(folder, corpus, **profile) -> Config:
    values = small_values(run_folder=str(folder), corpus=str(corpus))
    values["train"] |= {"num_steps": 6, "eval_every": 6, "checkpoint_every": 6}
    values["optimizer"]["warmup_steps"] = 2
    return Config.from_dict(values | {"profile": profile})


def run_in_a_process(words, code="from zaya_jax import cli; cli.main()"):
    """Runs `zaya` without the compilation cache, whose programs have the names of their first writer."""
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    environment["PYTHONPATH"] = str(pathlib.Path(zaya_jax.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trace_has_the_steps_and_the_blocks(tmp_path):
    corpus = build_small_corpus(tmp_path / "corpus").folder
    config = config_of(tmp_path / "run", corpus, first_step=3, num_steps=2)
    (tmp_path / "config.json").write_text(config.to_text())
    output = run_in_a_process(["train", f"--config={tmp_path}/config.json", "--xla-dump"])
    programs = list((tmp_path / "run/xla").glob("*before_optimizations.txt"))
    assert any("/attention/" in file.read_text() for file in programs)
    assert "trace of steps 3 to 4 in" in output
    (file,) = (tmp_path / "run" / PROFILE_FOLDER).glob("plugins/profile/*/*.xplane.pb")
    # A trace contains its programs with the names of their operations.
    names = set(re.findall(rb"jit\([\x20-\x7e]+", file.read_bytes()))
    for block in BLOCKS:
        assert any(f"/{block}/".encode() in name or f"({block})".encode() in name for name in names), block
    # Not by `jax.profiler.ProfileData`, which aborts on such a file in jax 0.12.
    perfetto = json.loads(gzip.decompress(next(file.parent.glob("perfetto_trace.json.gz")).read_bytes()))
    steps = [event for event in perfetto["traceEvents"] if event.get("name") == "train"]
    numbers = [event["args"]["step_num"] for event in steps if "step_num" in event.get("args", {})]
    assert sorted(map(int, numbers)) == [3, 4]


def test_a_run_that_ends_within_its_trace_writes_it(tmp_path):
    lines = []
    profiler = Profiler(ProfileConfig(first_step=1, num_steps=9), str(tmp_path), lines.append)
    profiler.start(1)
    profiler.stop(1, jax.numpy.ones(3))
    profiler.close()
    assert lines == [f"trace the run ended in {tmp_path / PROFILE_FOLDER}"]
    assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))


@pytest.mark.parametrize(
    ("first", "done", "is_reported"), [(7, 0, True), (2, 4, True), (3, 4, False), (6, 0, False)]
)
def test_a_profile_of_no_remaining_step_is_reported(first, done, is_reported, tmp_path):
    lines = []
    Profiler(ProfileConfig(first_step=first), str(tmp_path), lines.append).check_steps(done, 6)
    sentence = (
        f"profile.first_step is {first}, and the steps to be made are {done + 1} to 6: nothing is traced"
    )
    assert lines == [sentence] * is_reported


def test_a_trace_ends_once_after_its_last_step(tmp_path):
    profiler = Profiler(ProfileConfig(first_step=2, num_steps=2), str(tmp_path))
    ends = []
    for step in (1, 2, 3, 4):
        profiler.start(step)
        ends.append(profiler.stop(step, jax.numpy.ones(3)))
    assert ends == [False, False, True, False]


def test_a_profiler_in_use_ends_nothing(tmp_path):
    lines = []
    jax.profiler.start_trace(tmp_path / "theirs")
    try:
        profiler = Profiler(ProfileConfig(first_step=1), str(tmp_path / "run"), lines.append)
        for step in (1, 2):
            profiler.start(step)
            profiler.stop(step, None)
        profiler.close()
    finally:
        jax.profiler.stop_trace()
    (sentence,) = lines
    assert sentence.startswith("no trace: the profiler does not start: ")


@pytest.mark.parametrize(("processes", "traces"), [((0,), True), ((1, 2), False), (None, True)])
def test_only_configured_processes_trace(processes, traces, tmp_path, monkeypatch):
    starts = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: starts.append(1))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    config = ProfileConfig(first_step=1, num_steps=1, processes=processes)
    profiler = Profiler(config, str(tmp_path))
    profiler.start(1)
    profiler.close()
    assert bool(starts) == traces


DUMPING = """
import pathlib, sys, types
from zaya_jax.commands import train as train_command

def train(config, **_):
    import jax
    jax.jit(lambda x: x * 3 + 1)(jax.numpy.ones(7))
    sys.exit(0)

train_command.train = train
train_command.main(sys.argv[1:])
"""


def test_each_process_may_dump_its_programs(tmp_path):
    (tmp_path / "config.json").write_text(config_of(tmp_path / "run", "corpus").to_text())
    run_in_a_process([f"--config={tmp_path}/config.json", "--xla-dump=all"], DUMPING)
    assert list((tmp_path / "run/xla/process-0").glob("*lambda*before_optimizations.txt"))
