"""A custom attention is added by one entry of `VARIANTS`: plain multi-head attention learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EXECUTION, SMALL

from pallas_kernels.cca import rotate
from pallas_kernels.product import product
from zaya_jax.config import Config, DataConfig, OptimizerConfig
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import make_example
from zaya_jax.inference.engine.generate import generate
from zaya_jax.model.attention.block import VARIANTS, AttentionVariant
from zaya_jax.model.weights import count_parameters
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

MODEL = dataclasses.replace(SMALL, initializer_range=0.1, attention="mha")


def declare(declare):
    shapes = {"q_proj": ("LDNH", "NH"), "k_proj": ("LDKH", "KH"), "v_proj": ("LDKH", "KH")}
    return {name: declare.normal(axes, ("D", output)) for name, (axes, output) in shapes.items()}


def queries_keys_values(x_BTD, weights, state, rotation, segments_BT, *, implementation):
    del segments_BT, implementation  # no token depends on another here, and there is no kernel

    def project(name):
        kernel_DNH = weights[name].astype(x_BTD.dtype)
        out_PC = product(x_BTD.reshape(-1, x_BTD.shape[2]), kernel_DNH.reshape(x_BTD.shape[2], -1))
        return out_PC.reshape(*x_BTD.shape[:2], *kernel_DNH.shape[1:])

    q_BTNH, k_BTKH = (rotate(project(name), rotation).astype(x_BTD.dtype) for name in ("q_proj", "k_proj"))
    return q_BTNH, k_BTKH, project("v_proj"), state


@pytest.fixture
def _mha(monkeypatch):
    variant = AttentionVariant(declare, lambda weights: weights, queries_keys_values, lambda *_: ())
    monkeypatch.setitem(VARIANTS, "mha", variant)


@pytest.mark.slow
@pytest.mark.usefixtures("_mha")
def test_multi_head_attention_learns_in_twenty_steps_and_decodes():
    """One repeated sentence: from a uniform guess to less than half of its loss. Decoding uses a cache."""
    config = Config(
        model=MODEL, data=DataConfig(sequence_length=16, batch_size=4),
        execution=EXECUTION,
        optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=0, weight_decay=0.0),
    )  # fmt: skip
    setup, mesh = make_setup(config), data_mesh(jax.devices()[:1])
    # The sharding of a step's result: another sharding of the state would compile a second program.
    placed = shardings(abstract_state(config, setup, mesh), mesh)
    state = jax.jit(functools.partial(init_state, config, setup), out_shardings=placed)()
    step, losses = compiled_step(state, setup=setup, mesh=mesh), []
    tokens_BT = np.tile(1 + np.arange(17) % 8, (4, 1))
    batch = jax.tree.map(jnp.asarray, make_example(tokens_BT, delimiters=NO_DELIMITERS))
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert abs(losses[0] - np.log(MODEL.vocab_size)) < 1
    assert losses[-1] < losses[0] / 2
    assert count_parameters(MODEL) == sum(x.size for x in jax.tree.leaves(state.params))
    new = generate(setup.model, state.variables, [1, 2, 3], max_new_tokens=8, temperature=0.0)
    assert list(new) == [4, 5, 6, 7, 8, 1, 2, 3]


def test_an_unknown_attention_is_an_error():
    with pytest.raises(ValueError, match=r'model.attention is "mha"; it must be one of "cca"'):
        count_parameters(MODEL)
