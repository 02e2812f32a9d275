"""Four processes save a state three times, of which two write; the oldest step is removed.

usage: saved_by_groups.py RUN_FOLDER
"""

import os
import sys

import jax
import numpy as np

from zaya_jax.checkpoint import Checkpoints, Retention
from zaya_jax.parallel.mesh import data_mesh, replicated, sharded
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import find_process_group

STEPS = (1, 2, 3)
SHAPES = {"sharded": (8, 6), "whole": (4, 5), "scalar": ()}


def values(step: int, name: str) -> np.ndarray:
    """Returns what an array has at a step."""
    return np.random.default_rng([step, len(name)]).normal(size=SHAPES[name]).astype("float32")


def main(run_folder: str) -> None:
    with hosts.joined(find_process_group(os.environ), limit_seconds=60):
        mesh = data_mesh()
        places = {"sharded": sharded(mesh), "whole": replicated(mesh), "scalar": replicated(mesh)}

        def tree(step: int) -> dict[str, jax.Array]:
            return {
                name: jax.make_array_from_callback(
                    SHAPES[name], place, lambda index, name=name: values(step, name)[index]
                )
                for name, place in places.items()
            }

        key = jax.jit(jax.random.key, out_shardings=replicated(mesh))
        with Checkpoints(run_folder, retention=Retention(newest=2), writers=2) as checkpoints:
            for step in STEPS:
                training = tree(step) | {"key": key(step), "num_devices": np.int32(mesh.size)}
                checkpoints.save(step, weights=tree(step), training=training, ema=tree(-step % 7))


if __name__ == "__main__":
    main(sys.argv[1])
