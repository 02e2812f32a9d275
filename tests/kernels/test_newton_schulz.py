"""`newton_schulz`, compared with its specification in float64. It has no gradient."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_base import ROUNDOFF, fast_jit, in_turn, normals, relative_error, rounded

from pallas_kernels.choice import choose
from pallas_kernels.newton_schulz import Blocks, newton_schulz
from pallas_kernels.newton_schulz.reference import newton_schulz_reference
from pallas_kernels.newton_schulz.triton import gram

BLOCKS = Blocks(side=16, contracted=16)
STEP = (3.4445, -4.7750, 2.0315)
SHAPES = [
    (1, 1, 1), (1, 1, 40), (1, 40, 1), (2, 16, 16), (2, 15, 17), (1, 17, 15), (3, 33, 33), (1, 48, 32),
    (1, 32, 48), (2, 5, 90), (2, 90, 5), (1, 64, 64), (1, 31, 32), (1, 32, 31), (4, 16, 32), (4, 32, 16),
    (1, 2, 3), (1, 3, 2), (2, 49, 20), (2, 20, 49), (1, 65, 18), (1, 18, 65), (5, 7, 7), (1, 47, 16),
    (1, 16, 47), (1, 16, 1), (1, 1, 16), (2, 24, 40), (2, 40, 24), (3, 17, 17),
]  # fmt: skip
"""Any aspect ratio, blocks that come out even, one more and one less, a single row and column."""


def matrices(shape):
    """Returns random matrices, scaled to spectral norm 1."""
    (x,) = normals(shape[1], shape)
    return x / np.linalg.norm(x, ord=2, axis=(1, 2), keepdims=True)


@functools.cache
def compiled(num_steps, blocks=BLOCKS):
    return fast_jit(
        functools.partial(
            newton_schulz, coefficients=(STEP,) * num_steps, implementation="pallas", blocks=blocks
        )
    )


def expected(x, num_steps):
    with jax.enable_x64(True):
        return np.asarray(newton_schulz_reference(jnp.asarray(x), (STEP,) * num_steps))


def bound(x, right, dtype):
    """Bound: each product rounds its result, and the terms are larger than their sum.

    With singular values up to 1 the terms have norms of at most |a|, |b| and |c| times that of the matrix;
    the Gram matrix, its square and the sum are rounded.
    """
    a, b, c = map(abs, STEP)
    single = ROUNDOFF["float32"] * (4 + max(x.shape) ** 0.5)
    last = single if dtype == "float32" else ROUNDOFF[dtype]
    return last + (last + single) * (a + 2 * b + 3 * c) * np.linalg.norm(x) / np.linalg.norm(right)


def check(shape, dtype):
    low, exact = rounded(matrices(shape), dtype)
    result, right = compiled(1)(low), expected(exact, 1)
    assert result.dtype == dtype
    error = relative_error(result, right)
    assert error <= bound(exact, right, dtype), (error, bound(exact, right, dtype))


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_one_step(shape, dtype):
    check(shape, dtype)


@settings(derandomize=True, database=None, deadline=None, max_examples=6)
@given(
    num=st.integers(1, 3),
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    dtype=st.sampled_from(list(ROUNDOFF)),
)
def test_any_shape(num, rows, columns, dtype):
    check((num, rows, columns), dtype)


@pytest.mark.parametrize("shape", [(1, 20, 33), (1, 33, 20)])
def test_five_steps_make_singular_values_one(shape):
    (x,) = map(jnp.float32, normals(0, shape))
    x = x / jnp.linalg.norm(x)
    values = np.linalg.svd(compiled(5)(x), compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.3))


@pytest.mark.parametrize("mean", [0.0, 7.0])
def test_gram_matrices_are_mirrored_exactly(mean):
    """The result of `gram` equals its transpose bitwise, in blocks on and off the diagonal."""
    (x,) = map(jnp.bfloat16, normals(0, (2, 40, 24)))
    rest = gram(x, jnp.full(2, mean), transposed=False, blocks=BLOCKS)
    np.testing.assert_array_equal(rest, rest.mT)
    right = np.float64(x) @ np.float64(x.mT) - mean * np.eye(40)
    assert relative_error(rest, right) < 2 * ROUNDOFF["bfloat16"]


@pytest.mark.parametrize("shape", [(2, 9, 21), (2, 21, 9)])
def test_the_default_is_that_of_the_platform(shape):
    (x,) = map(jnp.float32, normals(0, shape))
    default, named = (
        newton_schulz(x / 10, (STEP,), implementation=name) for name in (None, choose("newton_schulz", None))
    )
    np.testing.assert_array_equal(default, named)
    np.testing.assert_allclose(default, compiled(1)(x / 10), rtol=1e-4, atol=1e-6)


def test_no_matrices_and_no_steps():
    assert compiled(1)(jnp.zeros((0, 3, 4))).shape == (0, 3, 4)
    x = jnp.ones((1, 3, 4))
    np.testing.assert_array_equal(compiled(0)(x), x)


@pytest.mark.parametrize(
    ("x", "options", "sentence"),
    [
        (jnp.zeros((3, 4)), {}, r"matrices are \(3, 4\); they must be \[M, R, C\]"),
        (jnp.zeros((1, 3, 4), jnp.float16), {}, "matrices are float16; they must be float32 or bfloat16"),
        (
            jnp.zeros((1, 3, 4)),
            {"blocks": Blocks(side=24)},
            "side is 24; a block's side must be a power of 2",
        ),
        (
            jnp.zeros((1, 3, 4)),
            {"blocks": Blocks(side=256)},
            "bytes of local memory, and",
        ),
        (jnp.zeros((1, 3, 4)), {"implementation": "fast"}, 'implementation is "fast"'),
    ],
)
def test_errors(x, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(newton_schulz)(x, (STEP,), **({"implementation": "pallas"} | options))
