"""The page of long runs stays small, and is written while one waits."""

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

MOST_BYTES = 5_000_000


def long_runs(folder, *, num_rows, num_layers):
    names = [folder / f"run{n}" for n in range(3)]
    for seed, name in enumerate(names):
        write_long_run(name, num_rows=num_rows, num_layers=num_layers, num_experts=16, seed=seed)
    return names


def test_three_runs_are_a_small_page_that_has_their_spikes(tmp_path):
    runs = [read_run(name) for name in long_runs(tmp_path, num_rows=4000, num_layers=40)]
    page = page_of(runs)
    assert 1_000_000 < len(page.encode()) < MOST_BYTES
    for run in runs:
        assert run.metrics.train.columns["loss"].max() == 9
        assert run.metrics.router is not None
        assert run.metrics.router.counts_MLX.shape[1:] == (40, 17)
    # Of each run as the largest value of a bin, and nowhere else is there one near it.
    assert page.count(",9,") + page.count(",9]") >= 3


@pytest.mark.campaign
def test_three_runs_of_two_hundred_thousand_rows_are_written_in_ten_seconds(tmp_path):
    names = long_runs(tmp_path, num_rows=200_000, num_layers=40)
    # In a process of its own, where no annotation is checked a million times.
    program = "from zaya_jax import cli; cli.run()"
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", program, "report", *map(str, names), f"--output={tmp_path / 'report.html'}"],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(zaya_jax.__file__).parents[1])},
        check=True,
        timeout=100,
    )
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Its own time: other tests have the machine too.
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < 10
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
