"""Train steps on a GPU: the same bits whenever they are repeated."""

import functools

import chex
import jax
import numpy as np
import pytest

from tests.small_runs import small_values
from zaya_jax.config import Config
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import make_example
from zaya_jax.plan.compiled.train_program import lower_train_step
from zaya_jax.train.step.state import init_state, make_setup


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repeated_steps_have_the_same_bits(dtype):
    values = small_values(run_folder="run", corpus="corpus")
    values["execution"]["dtype"] = dtype
    config, devices = Config.from_dict(values), jax.devices()[:1]
    step = lower_train_step(devices, config=config).compile()
    shape = config.data.batch_size, config.data.sequence_length
    # Few different tokens, so that each has many rows of the embedding's gradient to add.
    batch = make_example(np.random.default_rng(0).integers(1, 6, shape), delimiters=NO_DELIMITERS)
    setup = make_setup(config, 1)

    def after_steps():
        state = jax.jit(functools.partial(init_state, config, setup))()
        for _ in range(3):
            state, results = step(state, batch)
        return jax.device_get((state, results))

    first = after_steps()
    for _ in range(3):
        chex.assert_trees_all_equal(after_steps(), first)
