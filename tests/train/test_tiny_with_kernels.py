"""configs/tiny.py with interpreted Pallas kernels learns the same as without them.

Optimizer and balancing are the preset's; experts and vocabulary are smaller, and a step has 96 tokens instead
of 2,048. Muon iterates once instead of five times, and without its kernel, which is compiled separately for
each shape of matrix and would take most of this test's time: tests/kernels/test_newton_schulz.py and
tests/optim/test_muon.py check its values, and a test below that a run uses it.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zaya_jax.data.reading.batch import Batch
from zaya_jax.model.weights import abstract_variables
from zaya_jax.optim.buckets import to_buckets
from zaya_jax.options import load_config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUM_STEPS, ROWS, TIME = 10, 2, 48
NEWTON_SCHULZ = "execution.newton_schulz_implementation"
SMALLER = (
    "data.tokenizer=byte", "model.vocab_size=264", "model.moe_intermediate_size=128",
    "optimizer.newton_schulz_steps=1",
)  # fmt: skip


def batches():
    """Text of two documents per row; the last row ends with padding."""
    text = np.frombuffer((ROOT / "README.md").read_bytes(), np.uint8).astype(np.int32)
    time_T = np.arange(TIME)
    segments_BT = np.tile(1 + (time_T >= 19), (ROWS, 1)).astype(np.int32)
    segments_BT[-1, -5:] = 0
    positions_BT = np.where(segments_BT == 2, time_T - 19, time_T).astype(np.int32)
    for i in range(NUM_STEPS):
        rows = text[i * ROWS * (TIME + 1) :][: ROWS * (TIME + 1)].reshape(ROWS, TIME + 1)
        weights_BT = (segments_BT > 0).astype(np.float32)
        yield jax.tree.map(
            jnp.asarray, Batch(rows[:, :-1], rows[:, 1:], weights_BT, positions_BT, segments_BT)
        )


def tiny(*options):
    return load_config("configs/tiny.py", [f"--config.{option}" for option in options])


def curve(implementation):
    """Returns the losses of all steps, and token counts of each expert."""
    config = tiny(*SMALLER, f"execution.implementation={implementation}", f"{NEWTON_SCHULZ}=xla")
    data = dataclasses.replace(config.data, batch_size=ROWS, sequence_length=TIME)
    config = dataclasses.replace(config, data=data)
    setup, mesh = make_setup(config), data_mesh(jax.devices()[:1])
    # With the sharding of a step's result: another sharding would need a second program.
    placed = shardings(abstract_state(config, setup, mesh), mesh)
    state = jax.jit(lambda: init_state(config, setup), out_shardings=placed)()
    step, losses, counts = compiled_step(state, setup=setup, mesh=mesh), [], []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        counts.append(np.asarray(metrics.router_counts_LX))
    return np.array(losses), np.array(counts)


@pytest.mark.campaign
def test_ten_steps_have_the_same_losses():
    """Gradients differ by the rounding of sums, about 1e-7 of their norm.

    An iteration of Newton-Schulz multiplies that by up to 3.4445 where singular values are small, and ten
    steps accumulate it if it has one sign: updates are wrong by at most 3e-6 of their norm, and a loss that
    falls to two thirds by no larger a part.
    """
    (plain, counts), (ours, our_counts) = map(curve, ("xla", "pallas"))
    assert plain[-1] < 0.8 * plain[0]
    np.testing.assert_allclose(ours, plain, rtol=3e-6)
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-6)
    np.testing.assert_array_equal(our_counts, counts, "a token goes to another expert")


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_muon_of_a_run_uses_its_kernel(implementation):
    config = tiny(*SMALLER, f"{NEWTON_SCHULZ}={implementation}")
    setup = make_setup(config)

    def update(params):
        buckets = to_buckets(setup.partition, params)
        optimizer = optax.with_extra_args_support(setup.optimizer)
        return optimizer.update(buckets, optimizer.init(buckets), buckets, step=0)[0]

    program = str(jax.make_jaxpr(update)(abstract_variables(config.model)["params"]))
    assert ("pallas_call" in program) == (implementation == "pallas")
