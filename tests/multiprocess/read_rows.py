"""One of several processes that read a run without training, and record their rows of each step.

usage: read_rows.py THREADS OUT FIRST_STEP LAST_STEP CORPUS...

After LAST_STEP, if that is not the run's last, it exits as if it were killed.
"""

import os
import pathlib
import signal
import sys

import numpy as np
from reading_runs import NUM_STEPS, config_of, rows_of_steps

from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import find_process_group


def main(threads: str, out: str, first_step: str, last_step: str, *folders: str) -> None:
    with hosts.joined(find_process_group(os.environ)):
        config = config_of([pathlib.Path(folder) for folder in folders], read_threads=int(threads))
        corpora = {folder: open_corpus(folder) for folder in folders}
        for step, batch in rows_of_steps(config, corpora, data_mesh(), first_step=int(first_step)):
            np.savez(pathlib.Path(out) / f"{step}-{hosts.process()}.npz", **vars(batch))
            hosts.gather("step", step)  # no process is a step ahead of the others, as in training
            if step == int(last_step) < NUM_STEPS:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
