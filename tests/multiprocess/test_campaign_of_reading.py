"""Batches that real processes read: the cases of `tests/runs/test_batches_of_processes.py`, in ten minutes.

pytest -n 0 -m campaign tests/multiprocess/test_campaign_of_reading.py
"""

import pathlib
import random
import shutil
import sys

import numpy as np
import pytest
from groups import finish, start_words
from reading_runs import NUM_STEPS, build_corpora, hash_of_batch

from zaya_jax.data.reading.batch import Batch

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]
PROGRAM = pathlib.Path(__file__).with_name("read_rows.py")
LAYOUTS = [(8, 1), (2, 4), (1, 0)]
"""Processes, and threads that read ahead in each."""
KILLS, KILLED = 20, 137


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return build_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def undisturbed(folders, tmp_path_factory):
    return read(folders, tmp_path_factory.mktemp("undisturbed"), processes=1, threads=0)


def read(folders, out, *, processes, threads, first_step=0, last_step=NUM_STEPS):
    """Returns the hash of each step's batch, read by processes that are killed after the last one."""
    arguments = [threads, out, first_step, last_step, *folders]
    program = "import sys; from zaya_jax.parallel.processes.launch import *; sys.exit(launch(Launch("
    program += f"[sys.executable, *sys.argv[1:]], {processes}, {8 // processes})))"
    words = [sys.executable, "-c", program, PROGRAM, *arguments]
    code, output = finish(start_words(list(map(str, words))))
    assert code == (0 if last_step == NUM_STEPS else KILLED), output
    actual = {}
    for step in range(first_step + 1, last_step + 1):
        files = [out / f"{step}-{process}.npz" for process in range(processes)]
        actual[step] = hash_of_batch([Batch(**np.load(file)) for file in files])
    return actual


@pytest.mark.parametrize(("processes", "threads"), LAYOUTS)
def test_all_layouts_read_the_same_batches(folders, undisturbed, tmp_path, processes, threads):
    assert read(folders, tmp_path, processes=processes, threads=threads) == undisturbed
    assert len(set(undisturbed.values())) == NUM_STEPS


def test_a_run_killed_at_twenty_steps_reads_the_same_batches(folders, undisturbed, tmp_path):
    """Each time it resumes with another number of processes."""
    numbers = random.Random(0)
    kills = sorted(numbers.sample(range(1, NUM_STEPS), KILLS))
    processes, actual = 1, {}
    for first_step, last_step in zip([0, *kills], [*kills, NUM_STEPS], strict=True):
        processes = numbers.choice([each for each in (1, 2, 4, 8) if each != processes])
        out = tmp_path / f"{first_step}"
        out.mkdir()
        actual |= read(
            folders,
            out,
            processes=processes,
            threads=numbers.randrange(5),
            first_step=first_step,
            last_step=last_step,
        )
        shutil.rmtree(out)
    assert actual == undisturbed
