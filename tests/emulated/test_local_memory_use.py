"""Local memory in compiled kernels: right factors without bank conflicts, and a race in Triton's schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cross_entropy import Blocks as LossBlocks
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.emulator import EmulationError
from pallas_kernels.errors import ArgumentError
from pallas_kernels.grouped_matmul import FLOAT32_BLOCKS, grouped_matmul, triton
from pallas_kernels.grouped_matmul.triton import Tile
from pallas_kernels.newton_schulz.triton import Blocks as PolynomialBlocks
from pallas_kernels.newton_schulz.triton import gram
from zaya_jax.errors import UserError
from zaya_jax.plan.rocm.launches.compiler import LaunchCompiler
from zaya_jax.plan.rocm.launches.execution import EmulatedLaunches

RACING = Tile(rows=128, columns=256, contracted=32, num_warps=8, num_stages=2)
"""Tile of float32 numbers that Triton schedules for two groups of wavefronts."""


@pytest.fixture(scope="module")
def executor():
    pytest.importorskip("tinygrad")
    pytest.importorskip("flatbuffers")
    try:
        compiler = LaunchCompiler()
    except UserError as error:
        pytest.skip(str(error))
    yield EmulatedLaunches(compiler, count_memory=True)
    compiler.close()


def numbers(*shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(0), shape).astype(dtype)


def run(executor, function, *arguments):
    with executor.launches():
        return jax.block_until_ready(jax.jit(function)(*arguments))


def loss():
    blocks = LossBlocks(rows=32, entries=32, run=1, num_warps=1)
    whole = functools.partial(cross_entropy, implementation="pallas", blocks=blocks)
    return whole(numbers(32, 64), numbers(32, 64), jnp.arange(32), jnp.ones(32))


def gradient_of_rows():
    tile = Tile(rows=32, columns=32, contracted=32, num_warps=1, num_stages=2)
    sizes, first = jnp.array([32], jnp.int32), jnp.int32(0)
    return triton.product(numbers(32, 64), numbers(1, 32, 64), sizes, first, tile, transposed=True)


def gram_matrix():
    blocks = PolynomialBlocks(side=32, contracted=32, num_warps=1)
    return gram(numbers(1, 32, 64), jnp.zeros(1), transposed=False, blocks=blocks)


@pytest.mark.parametrize("product", [loss, gradient_of_rows, gram_matrix])
def test_a_right_factor_of_rows_is_read_without_bank_conflicts(executor, product):
    """As `load(...).T`, most cycles of local memory were conflicts."""
    run(executor, product)
    (executed,) = executor.executed
    counts = executed.execution.counts
    assert counts.by_class()["matrix"] > 0
    # Results that are stored twice, or reduced, pass through local memory in other layouts.
    assert counts.local_conflicts <= counts.local_cycles // 8


def arguments_of_product():
    return numbers(128, 128, dtype=jnp.float32), numbers(1, 128, 256, dtype=jnp.float32), jnp.array([128])


def check_product(result, rows, weights):
    np.testing.assert_allclose(result, np.float64(rows) @ np.float64(weights[0]), rtol=0, atol=128 * 2.0**-20)


def test_triton_races_in_float32_with_tiles_that_the_check_refuses(executor):
    """jax 0.12 compiles them without the race. When 0.10 and 0.11 go, so can `check_schedule`."""
    rows, weights, sizes = arguments_of_product()
    with pytest.raises(ArgumentError, match="with a race"):
        RACING.check_schedule("grouped_matmul", "product", (128, 256, 32), 4)

    def product():
        return run(executor, lambda *x: triton.product(*x, sizes, jnp.int32(0), RACING), rows, weights)

    if jax.__version_info__ >= (0, 12):
        check_product(product(), rows, weights)
        return
    with pytest.raises(EmulationError) as error:
        product()
    assert error.value.check == "local race"


def test_the_default_tiles_of_float32_do_not_race(executor):
    rows, weights, sizes = arguments_of_product()
    result = run(executor, functools.partial(grouped_matmul, implementation="pallas"), rows, weights, sizes)
    tile = FLOAT32_BLOCKS.product
    assert executor.executed[0].execution.counts.by_class()["matrix"] > 0
    assert (tile.num_warps, tile.num_stages) == (8, 2)
    check_product(result, rows, weights)
