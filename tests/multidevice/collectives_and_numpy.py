"""`collectives_and_numpy.py FOLDER`: collectives of eight devices in two groups, and a bench of them."""

import json
import pathlib
import sys

import jax
import numpy as np

from zaya_jax.bench import command
from zaya_jax.parallel.collective_timing import (
    COLLECTIVES,
    group_mesh,
    make_repeated_collective,
    num_message_values,
    run_collective,
)


def by_numpy(collective, x_NC):
    """Returns the expected rows of each device of a group."""
    size, numbers = x_NC.shape
    part = numbers // size
    return {
        "all_reduce": lambda: np.tile(x_NC.sum(axis=0), (size, 1)),
        "reduce_scatter": lambda: x_NC.sum(axis=0).reshape(size, part),
        "all_gather": lambda: np.tile(x_NC[:, :part].reshape(-1), (size, 1)),
        "broadcast": lambda: np.tile(x_NC[0], (size, 1)),
        "all_to_all": lambda: x_NC.reshape(size, size, part).swapaxes(0, 1).reshape(size, numbers),
        "permute": lambda: np.roll(x_NC, 1, axis=0),
    }[collective]()


def differences():
    """Errors of each collective in groups of four, and of one that runs three times."""
    groups = [jax.devices()[:4], jax.devices()[4:]]
    mesh, numbers = group_mesh(groups), num_message_values(100, 4)
    x_DC = np.random.default_rng(1).integers(0, 100, (8, numbers)).astype(np.float32)
    actual = {}
    for name in COLLECTIVES:
        expected = np.concatenate([by_numpy(name, x_DC[:4]), by_numpy(name, x_DC[4:])])
        actual[name] = float(np.abs(np.asarray(run_collective(name, mesh, x_DC)) - expected).max())
        # On zeros: it must run and keep the message's shape.
        assert make_repeated_collective(name, mesh, numbers)(3).shape == (8, numbers)
    return {"numbers": numbers, "differences": actual}


def main(folder):
    words = ["collectives", "--devices-per-node=4", "--max-size=4KiB", "--call-seconds=0.01"]
    names = [
        f"--{kind}={pathlib.Path(folder) / f'found.{ending}'}"
        for kind, ending in (("json", "json"), ("picture", "png"))
    ]
    command.main([*words, *names, "--config=configs/tiny.py"])
    print(json.dumps(differences()))


if __name__ == "__main__":
    main(*sys.argv[1:])
