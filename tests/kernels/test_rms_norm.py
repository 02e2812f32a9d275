"""`residual_rms_norm`, forward and backward, compared with its specification in float64."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_base import (
    FORMS,
    ROUNDOFF,
    assert_close,
    assert_gradients_are_differences,
    in_float64,
    in_turn,
    normals,
    value_and_pullback,
)

from pallas_kernels.rms_norm import Blocks, ResidualScaling, residual_rms_norm
from pallas_kernels.rms_norm.reference import residual_rms_norm_reference

EPS = 1e-5
SHAPES = [
    (1, 1), (1, 2), (2, 1), (3, 5), (1, 64), (64, 1), (7, 16), (8, 16), (9, 16), (10, 16),
    (11, 16), (16, 17), (5, 31), (5, 32), (5, 33), (33, 8), (17, 100), (2, 128), (40, 3), (4, 63),
    (6, 65), (13, 24), (81, 2), (1, 255), (1, 256), (1, 257), (85, 7), (12, 48), (26, 15), (4, 127),
]  # fmt: skip
"""Rows and width: blocks that come out even, by one too few and one too many, of one row, of one channel."""


def operands(rows, width, seed=0):
    output, residual, scaling, scale = normals(seed, (rows, width), (rows, width), (4, width), (width,))
    # Scales like trained ones: around 1, on both sides of it.
    return (
        output,
        residual,
        ResidualScaling(scaling[0], 1 + scaling[1], scaling[2], 1 + scaling[3]),
        1 + scale,
    )


def run(rows, width, dtype, blocks, seed=0):
    output, residual, scaling, scale = operands(rows, width, seed)
    arguments = jnp.asarray(output, dtype), *jax.tree.map(jnp.float32, (residual, scaling, scale))
    cotangents = normals(seed + 1, (rows, width), (rows, width))
    cotangents = jnp.float32(cotangents[0]), jnp.asarray(cotangents[1], dtype)
    forms = (
        functools.partial(residual_rms_norm, eps=EPS, implementation=name, blocks=blocks) for name in FORMS
    )
    ours = [value_and_pullback(form, arguments, cotangents) for form in forms]
    reference = functools.partial(residual_rms_norm_reference, eps=EPS)
    return ours, in_float64(reference, arguments, cotangents)


def bounds(rows, width, dtype, stream):
    """Bounds: one rounding to the result's dtype, and those of a dozen float32 operations and of the sums.

    A mean over D or a sum over P adds at most as many roundings as it has terms; a tree of D lanes, by chunks
    of rows, has far fewer. The merge of two terms may cancel, by a factor below 4 in the norm. A norm's
    gradient is the difference of two terms, each divided by the row's root mean square; with one channel
    almost nothing remains of it, and without a kernel, where XLA may reorder, the rounding of both terms
    dominates. The kernel stays within the bound of wider rows.
    """
    divided = 1 if stream is None else max(1, np.sqrt(np.mean(1 / (np.mean(stream**2, axis=1) + EPS))))
    single = ROUNDOFF["float32"]
    last = 0 if dtype == "float32" else ROUNDOFF[dtype]
    row = 4 * single * (12 + np.log2(width + 1))
    column = 4 * single * (12 + rows**0.5)
    of_scaling = ResidualScaling(*(divided * column,) * 4)
    gradients = last + divided * row, divided * row, of_scaling, column
    return (row, last + row), gradients


def check(rows, width, dtype, blocks, seed=0):
    ours, expected = run(rows, width, dtype, blocks, seed)
    for form, (results, gradients) in zip(FORMS, ours, strict=True):
        assert results[0].dtype == jnp.float32
        assert results[1].dtype == gradients[0].dtype == dtype
        stream = expected[0][0] if form == "xla" and width == 1 else None
        assert_close((results, gradients), expected, bounds(rows, width, dtype, stream))


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_results_and_gradients(shape, dtype):
    check(*shape, dtype, Blocks(rows=2, run=5))


@settings(derandomize=True, database=None, deadline=None, max_examples=5)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 90),
    dtype=st.sampled_from(list(ROUNDOFF)),
    block=st.sampled_from([1, 2, 4]),
    run=st.integers(1, 9),
)
def test_any_shape(rows, width, dtype, block, run):
    check(rows, width, dtype, Blocks(rows=block, run=run), seed=rows)


@functools.cache
def small(dtype="float32"):
    output, residual, scaling, scale = operands(5, 6)
    arguments = jnp.asarray(output, dtype), *jax.tree.map(jnp.float32, (residual, scaling, scale))
    cotangents = [jnp.asarray(x, dtype) for x in normals(1, (5, 6), (5, 6))]
    return arguments, (jnp.float32(cotangents[0]), cotangents[1])


PALLAS = functools.partial(residual_rms_norm, eps=EPS, implementation="pallas", blocks=Blocks(rows=2, run=2))


def test_gradients_are_differences():
    reference = functools.partial(residual_rms_norm_reference, eps=EPS)
    assert_gradients_are_differences(PALLAS, reference, *small(), bound=1e-5)


def test_a_gradient_is_the_same_in_every_run():
    first, second = (value_and_pullback(PALLAS, *small("bfloat16")) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_xla_takes_the_same_place():
    """On a CPU, None selects the XLA form; its results have the dtypes of the kernel's."""
    arguments, _ = small("bfloat16")
    default = residual_rms_norm(*arguments, eps=EPS)
    jax.tree.map(
        np.testing.assert_array_equal, default, residual_rms_norm(*arguments, eps=EPS, implementation="xla")
    )
    assert [x.dtype for x in default] == [x.dtype for x in PALLAS(*arguments)]
    assert_close(default[0], np.float64(PALLAS(*arguments)[0]), 1e-6)


def test_rows_may_be_of_any_number_of_axes():
    """As [B, T] in the network; each form sums over all of these axes for the gradients of the weights."""
    arguments, cotangents = small()
    shaped = jax.tree.map(lambda x: x.reshape(5, 1, 6) if x.ndim == 2 else x, (arguments, cotangents))
    for form in FORMS:
        function = functools.partial(residual_rms_norm, eps=EPS, implementation=form)
        found, expected = (
            value_and_pullback(function, *shaped),
            value_and_pullback(function, arguments, cotangents),
        )
        for ours, flat in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours.reshape(flat.shape), flat, rtol=1e-5, atol=1e-6)


def test_no_rows():
    output, residual, scaling, scale = operands(0, 6)
    arguments = jax.tree.map(jnp.float32, (output, residual, scaling, scale))
    results, gradients = value_and_pullback(PALLAS, arguments, (arguments[0], arguments[0]))
    assert results[0].shape == results[1].shape == (0, 6)
    assert not any(np.any(x) for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"output": (4, 7)}, r"output \(4, 7\), residual \(4, 6\): they must both be \[\.\.\., P, D\]"),
        ({"output": (6,), "residual": (6,)}, r"they must both be \[\.\.\., P, D\]"),
        ({"scale_D": (5,)}, r"scale_D is \(5,\); it must be \[D\], \(6,\)"),
        ({"blocks": Blocks(rows=3)}, "rows is 3; a block's side must be a power of 2"),
        ({"blocks": Blocks(run=0)}, "run is 0; it must be at least 1"),
        ({"implementation": "fast"}, 'implementation is "fast"; it must be "pallas", "xla" or None'),
        (
            {"output": (4, 20_000), "residual": (4, 20_000), "scale_D": (20_000,)},
            "rows are 20000 wide; the kernel supports up to 16384",
        ),
    ],
)
def test_errors(change, sentence):
    values = {
        "output": (4, 6),
        "residual": (4, 6),
        "scale_D": (6,),
        "implementation": "pallas",
    } | change
    width = values["scale_D"][0] if values["scale_D"][0] > 6 else 6
    arrays = {
        name: jnp.zeros(value, jnp.float32) if isinstance(value, tuple) else value
        for name, value in values.items()
    }
    scaling = ResidualScaling(*(jnp.zeros(width),) * 4)
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(residual_rms_norm)(scaling=scaling, eps=EPS, **arrays)


@pytest.mark.parametrize("name", ["residual", "scale_D", "output"])
def test_wrong_dtypes(name):
    arrays = {"output": jnp.zeros((4, 6)), "residual": jnp.zeros((4, 6)), "scale_D": jnp.zeros(6)}
    arrays[name] = arrays[name].astype(jnp.float16)
    with pytest.raises(ValueError, match="float16"):
        residual_rms_norm(scaling=ResidualScaling(*(jnp.zeros(6),) * 4), eps=EPS, **arrays)
