"""Saves and restores the state of six devices, whose number divides few dimensions of the weights."""

import json
import math
import pathlib
import tempfile

import jax
import numpy as np
from hlo import instructions
from small_runs import small_values

from zaya_jax.checkpoint import Checkpoints, Retention
from zaya_jax.checkpoint.steps import restore, restore_average
from zaya_jax.config import Config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.pytree import abstract
from zaya_jax.train.compiled_programs import make_programs, saved_weights
from zaya_jax.train.step.state import (
    abstract_state,
    checkpoint_shardings,
    from_checkpoint,
    init_state,
    make_setup,
    shardings,
    to_checkpoint,
)

DEVICES = 6


def save(node_devices: int) -> dict[str, object]:
    values = small_values(run_folder="run", corpus="corpus") | {"ema": {"decay": 0.9}}
    values["execution"]["node_devices"] = node_devices
    config = Config.from_dict(values)
    mesh = data_mesh(jax.devices()[:DEVICES], node_devices=node_devices)
    setup = make_setup(config, DEVICES)
    like = abstract_state(config, setup, mesh)
    state = jax.jit(lambda: init_state(config, setup), out_shardings=shardings(like, mesh))()
    arrays = make_programs(like, setup=setup, mesh=mesh).checkpoint(state)
    whole = jax.jit(lambda state: state.stored)(state)
    weights = jax.tree.leaves(arrays["weights"])
    text = saved_weights(like, mesh).lower(like).compile().as_text()
    return {
        "equal": _equal(arrays["weights"], whole),
        "values": sum(x.size for x in weights),
        "values of a device": sum(x.addressable_shards[0].data.size for x in weights),
        "largest weight": max(x.size for x in weights),
        "largest in the program": max(
            math.prod(shape) for _, shapes, _, _ in instructions(text) for shape in shapes
        ),
        "restored": _equal(_restored(arrays, like, mesh, setup), state),
    }


def _restored(arrays, like, mesh, setup):
    shapes = jax.eval_shape(to_checkpoint, like)
    saved = abstract(shapes, checkpoint_shardings(shapes, mesh, setup.partition))
    average = saved.pop("ema")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with Checkpoints(folder, retention=Retention(newest=1)) as checkpoints:
            checkpoints.save(1, **arrays)
        weights, training = restore(folder, 1, **saved)
        read = {"weights": weights, "training": training, "ema": restore_average(folder, 1, average)}
    program = jax.jit(
        lambda read: from_checkpoint(read, like=like, written=like), out_shardings=shardings(like, mesh)
    )
    return program(read)


def _equal(ours, theirs) -> bool:
    pairs = zip(*(map(_values, jax.tree.leaves(tree)) for tree in (ours, theirs)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _values(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


print(json.dumps([save(node_devices) for node_devices in (1, 2)]))
