"""Each kernel on a GPU, compared with the XLA form, on random data whose sizes fill no block."""

import dataclasses

import jax
import pytest

from pallas_kernels.catalogue import SIZES, cases
from zaya_jax.bench.kernels.kernel_times import difference
from zaya_jax.bench.kernels.other_libraries import OTHERS, others

ODD = dataclasses.replace(
    SIZES["zaya1_8b"],
    batch=2,
    time=778,  # cuDNN's attention needs an even number
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


@pytest.mark.parametrize("case", [case for case in cases(ODD) if case.name in OTHERS], ids=lambda c: c.name)
def test_other_libraries(case):
    arguments = jax.jit(case.make)(jax.random.key(2))
    ours = jax.jit(case.with_gradients("pallas"))(*arguments)
    absent = {other.name: other.absent for other in others(case.name)}
    here = [other for other in others(case.name) if not other.absent]
    for other in here:
        _, gradients = other.make(*arguments)
        if gradients is not None:
            assert difference(gradients(), ours) < case.tolerance, other.name
    if all(name.startswith(("jax", "zaya")) for name in absent if not absent[name]):
        pytest.skip(f"no other library is here: {absent}")


@pytest.mark.parametrize("case", cases(ODD), ids=lambda case: case.name)
def test_a_result_is_the_same_in_every_run(case):
    arguments = jax.jit(case.make)(jax.random.key(1))
    run = jax.jit(case.with_gradients("pallas"))
    assert difference(run(*arguments), run(*arguments)) == 0
