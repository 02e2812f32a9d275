"""A step's batch is the same, row by row, however many processes and threads read it, also when they resume.

Each process reads its rows alone, by what a run reads by; together they are the batch. `reading_runs.py` has
the run that is read; real processes read it in `tests/multiprocess/test_campaign_of_reading.py`.
"""

import itertools
import random

import pytest
from reading_runs import NUM_STEPS, Device, build_corpora, config_of, hash_of_batch, rows_of_steps

from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.parallel.mesh import data_mesh

LAYOUTS = [(8, 1), (2, 4), (1, 0)]
"""Processes, and threads that read ahead in each."""
DEVICES = 8
KILLS = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return build_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def undisturbed(folders):
    return list(hashes_of_steps(folders, processes=1, threads=0))


def hashes_of_steps(folders, *, processes, threads, first_step=0):
    """Yields the global batches that processes read together, from a step on."""
    config = config_of(folders, read_threads=threads)
    corpora = {str(folder): open_corpus(folder) for folder in folders}
    mesh = data_mesh([Device(process_index=i * processes // DEVICES, id=i) for i in range(DEVICES)])
    readers = [
        rows_of_steps(config, corpora, mesh, process=process, first_step=first_step)
        for process in range(processes)
    ]
    try:
        for rows in zip(*readers, strict=True):
            yield hash_of_batch([batch for _, batch in rows])
    finally:
        for reader in readers:
            reader.close()


@pytest.mark.parametrize(("processes", "threads"), LAYOUTS)
def test_all_layouts_read_the_same_batches(folders, undisturbed, processes, threads):
    assert list(hashes_of_steps(folders, processes=processes, threads=threads)) == undisturbed
    assert len(set(undisturbed)) == NUM_STEPS


def test_a_run_that_is_killed_repeatedly_reads_the_batches_of_an_uninterrupted_one(folders, undisturbed):
    """Each time it resumes from an earlier saved step, with another number of processes."""
    numbers = random.Random(0)
    processes, actual = 1, {}
    saved = [0, *sorted(numbers.sample(range(1, NUM_STEPS), KILLS))]
    for first_step, killed in itertools.zip_longest(saved, saved[1:]):
        processes = numbers.choice([each for each in (1, 2, 4, 8) if each != processes])
        steps = hashes_of_steps(
            folders, processes=processes, threads=numbers.randrange(5), first_step=first_step
        )
        # Batches after the last save are read again.
        last = NUM_STEPS if killed is None else min(killed + numbers.randrange(3), NUM_STEPS)
        for step, found_hash in enumerate(itertools.islice(steps, last - first_step), start=first_step):
            assert actual.setdefault(step, found_hash) == found_hash
        steps.close()
    assert [actual[step] for step in range(NUM_STEPS)] == undisturbed
