"""Restores a run on the current devices, as a resume does, and hashes its state.

usage: state_hashes.py CONFIG_TEXT_FILE OUT
"""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import optax

from zaya_jax.checkpoint import run_lock
from zaya_jax.config import Config
from zaya_jax.optim.buckets import from_buckets
from zaya_jax.parallel.mesh import data_mesh, replicated
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import find_process_group
from zaya_jax.train.heartbeats import Heartbeats
from zaya_jax.train.setup import prepare_run
from zaya_jax.train.starting_state import starting_state
from zaya_jax.train.step.state import TrainState, _map_buckets, to_checkpoint


def main(config_file: str, out: str) -> None:
    with hosts.joined(find_process_group(os.environ)):
        config = Config.from_text(pathlib.Path(config_file).read_text())
        with contextlib.ExitStack() as held:
            heartbeats = Heartbeats()
            lock = held.enter_context(run_lock(config.run_folder)) if hosts.is_first() else None
            run = prepare_run(config, data_mesh(), lock, heartbeats=heartbeats, overwrite=False)
        state = starting_state(run, heartbeats)
        whole = jax.jit(_declared, out_shardings=replicated(run.mesh))(state)
        whole = jax.tree.map(_as_array, whole)
        if hosts.is_first():
            hashes = {
                jax.tree_util.keystr(path): _hash(leaf) for path, leaf in jax.tree.leaves_with_path(whole)
            }
            pathlib.Path(out).write_text(json.dumps({"step": int(state.step), "hashes": hashes}))


def _declared(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, independent of the number of devices."""

    def whole(buckets: dict) -> dict:
        present = {name: x for name, x in buckets.items() if not isinstance(x, optax.MaskedNode)}
        return from_buckets(state.partition, present)

    saved = to_checkpoint(state)
    del saved["training"]["num_devices"]
    saved["training"]["optimizer"] = _map_buckets(whole, state, state.optimizer)
    return saved


def _as_array(leaf: jax.Array) -> np.ndarray:
    data = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(data)


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(f"{array.shape} {array.dtype}".encode() + array.tobytes()).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
