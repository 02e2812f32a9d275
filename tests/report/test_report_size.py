"""The page of long runs is small, and is written in seconds."""

import os
import pathlib
import resource
import subprocess
import sys

import pytest
from long_runs import write_long_run

import zaya_jax
from zaya_jax.report.page import page_of
from zaya_jax.report.run_record import read_run

MAX_BYTES = 5_000_000


def long_runs(folder, *, num_rows, num_layers):
    names = [folder / f"run{n}" for n in range(3)]
    for seed, name in enumerate(names):
        write_long_run(name, num_rows=num_rows, num_layers=num_layers, num_experts=16, seed=seed)
    return names


def test_three_runs_are_a_small_page_that_has_their_spikes(tmp_path):
    runs = [read_run(name) for name in long_runs(tmp_path, num_rows=4000, num_layers=40)]
    page = page_of(runs)
    assert 1_000_000 < len(page.encode()) < MAX_BYTES
    for run in runs:
        assert run.metrics.train.columns["loss"].max() == 9
        assert run.metrics.router is not None
        assert run.metrics.router.counts_MLX.shape[1:] == (40, 17)
    # Each run's spike is the maximum of a bin; no other value is close to it.
    assert page.count(",9,") + page.count(",9]") >= 3


@pytest.mark.campaign
def test_three_runs_of_two_hundred_thousand_rows_are_written_in_ten_seconds(tmp_path):
    names = long_runs(tmp_path, num_rows=200_000, num_layers=40)
    # In a separate process, because the tests check type annotations at every call.
    program = "from zaya_jax import cli; cli.run()"
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", program, "report", *map(str, names), f"--output={tmp_path / 'report.html'}"],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(zaya_jax.__file__).parents[1])},
        check=True,
        timeout=100,
    )
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time rather than wall time, because other tests use the machine as well.
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < 10
    assert (tmp_path / "report.html").stat().st_size < MAX_BYTES
