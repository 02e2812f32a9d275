"""Each kernel as a GPU runs it, against XLA's form, on random data of sizes that fill no block."""

import dataclasses

import jax
import pytest

from pallas_kernels.catalogue import SIZES, cases
from zaya_jax.bench.kernels import difference

ODD = dataclasses.replace(
    SIZES["zaya1_8b"],
    batch=2,
    time=777,
    width=520,
    expert_width=328,
    vocabulary=9001,
    slots=3001,
    sequences=3,
)


@pytest.mark.parametrize("case", cases(ODD), ids=lambda case: case.name)
def test_results_and_gradients(case):
    arguments = jax.jit(case.make)(jax.random.key(0))
    ours, *others = (jax.jit(case.with_gradients(name))(*arguments) for name in case.implementations)
    assert others
    for other in others:
        assert difference(other, ours) < case.tolerance


@pytest.mark.parametrize("case", cases(ODD), ids=lambda case: case.name)
def test_a_result_is_the_same_in_every_run(case):
    arguments = jax.jit(case.make)(jax.random.key(1))
    run = jax.jit(case.with_gradients("pallas"))
    assert difference(run(*arguments), run(*arguments)) == 0
