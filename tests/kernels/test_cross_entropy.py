"""`cross_entropy`, forward and backward, against its specification in float64."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from kernel_base import (
    FORMS,
    ROUNDOFF,
    assert_close,
    assert_gradients_are_differences,
    fast_jit,
    in_turn,
    normals,
    rounded,
)

from pallas_kernels.choice import choose
from pallas_kernels.cross_entropy import Blocks, cross_entropy
from pallas_kernels.cross_entropy.reference import cross_entropy_reference
from pallas_kernels.cross_entropy.xla import logsumexp_in_one_pass

BLOCKS = Blocks(rows=16, entries=16, width=16, run=2, chunk=48)
SHAPES = [
    # P, D, V
    (1, 1, 1), (17, 16, 33), (16, 33, 48), (33, 8, 96), (40, 20, 100), (5, 64, 250), (15, 17, 15),
]  # fmt: skip
"""Rows, width, vocabulary: even, one more, one less; one entry; a run and a chunk that end inside a block."""


def maskings(rows, entries, random):
    """Targets and weights, by name; a row with weight 0 may have an invalid target."""
    targets = random.integers(0, entries, rows).astype(np.int32)
    some = (random.random(rows) < 0.5).astype(np.float32)
    weights = random.random(rows).astype(np.float32)
    return {
        "all rows": (targets, np.ones(rows, np.float32)),
        "some rows": (np.where(some > 0, targets, -1).astype(np.int32), some * weights),
        "no rows": (targets, np.zeros(rows, np.float32)),
        "one target": (np.full(rows, entries - 1, np.int32), weights),
    }


@functools.cache
def compiled(function, has_bias):
    def both(hidden, table, bias, targets, weights, grad):
        def loss(hidden, table, bias):
            return function(hidden, table, bias if has_bias else None, targets, weights)

        value, pull_back = jax.vjp(loss, hidden, table, bias)
        return value, pull_back(grad)

    return fast_jit(both)


@functools.cache
def ours(z_loss, implementation="pallas", blocks=BLOCKS):
    def loss(hidden, table, bias, targets, weights):
        return cross_entropy(
            hidden,
            table,
            targets,
            weights,
            bias_V=bias,
            z_loss=z_loss,
            chunk=7,
            implementation=implementation,
            blocks=blocks,
        )[0]

    return loss


@functools.cache
def reference(z_loss):
    return lambda *arguments: cross_entropy_reference(*arguments, z_loss=z_loss)[0]


def bounds(shape, dtype):
    """Error bounds. float32: sums of D and of V terms, where a loss of a few nats is a difference of larger
    numbers.

    bfloat16: logits are exact up to float32; their gradient is rounded, and so is each product.
    """
    single = 8 * ROUNDOFF["float32"] * (12 + max(shape) ** 0.5)
    if dtype == "float32":
        return single, (single,) * 3
    half = ROUNDOFF[dtype]
    return single, (2 * half, 2 * half, half)


def check(shape, dtype, *, has_bias=False, z_loss=0.0):
    rows, width, entries = shape
    hidden, table, bias = normals(rows, (rows, width), (entries, width), (entries,))
    # Logits of a few units: the softmax is neither uniform nor one-hot.
    (hidden, table), exact = rounded((hidden * 2 / width**0.5, table), dtype)
    bias = np.float32(bias * has_bias)
    for name, (targets, weights) in maskings(rows, entries, np.random.default_rng(rows)).items():
        with jax.enable_x64(True):
            operands = (*exact, np.float64(bias), targets, np.float64(weights), np.float64(np.float32(0.7)))
            expected = jax.tree.map(np.asarray, compiled(reference(z_loss), has_bias)(*operands))
        for form in (*FORMS, "pallas+xla"):
            operands = hidden, table, jnp.asarray(bias), targets, weights, jnp.float32(0.7)
            results = compiled(ours(z_loss, form), has_bias)(*operands)
            assert results[0].dtype == jnp.float32
            assert results[1][0].dtype == results[1][1].dtype == dtype
            if name == "no rows":
                assert not any(np.any(x) for x in jax.tree.leaves(results))
            elif entries > 1:
                assert_close(results, expected, bounds(shape, dtype))
            else:  # the loss over a single class is 0, and so are its gradients
                assert all(np.all(np.abs(x) < 1e-5) for x in jax.tree.leaves(results)) == (z_loss == 0)


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_loss_and_gradients(shape, dtype):
    check(shape, dtype)


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES[1:3]))
def test_bias_and_z_loss(shape, dtype):
    check(shape, dtype, has_bias=True, z_loss=1e-2)


@settings(derandomize=True, database=None, deadline=None, max_examples=3)
@given(
    rows=st.integers(1, 50),
    width=st.integers(1, 50),
    entries=st.integers(2, 120),
    dtype=st.sampled_from(list(ROUNDOFF)),
    has_bias=st.booleans(),
)
def test_any_shape(rows, width, entries, dtype, has_bias):
    check((rows, width, entries), dtype, has_bias=has_bias, z_loss=1e-3)


def small():
    hidden, table, bias = map(jnp.float32, normals(0, (7, 5), (40, 5), (40,)))
    return hidden, table, bias, jnp.arange(7, dtype=jnp.int32) * 5, jnp.linspace(0, 1, 7)


def test_gradients_are_differences():
    *arguments, targets, weights = small()
    functions = (
        lambda hidden, table, bias, f=f: f(hidden, table, bias, targets, weights)
        for f in (ours(0.1), reference(0.1))
    )
    assert_gradients_are_differences(*functions, tuple(arguments), jnp.float32(1), bound=1e-5)


def test_the_default_is_that_of_the_platform():
    hidden, table, bias, targets, weights = small()
    default, named = (
        cross_entropy(hidden, table, targets, weights, bias_V=bias, implementation=name)
        for name in (None, choose("cross_entropy", None))
    )
    jax.tree.map(np.testing.assert_array_equal, default, named)


def test_weights_take_no_gradient():
    hidden, table, _, targets, weights = small()
    for implementation in (*FORMS, "pallas+xla"):
        loss = functools.partial(
            cross_entropy, hidden, table, targets, implementation=implementation, blocks=BLOCKS
        )
        assert not np.any(jax.grad(lambda weights, loss=loss: loss(weights)[0])(weights))


def test_the_logsumexp_of_each_row():
    hidden, table, _, targets, weights = small()
    expected = np.log(np.exp(np.float64(hidden) @ np.float64(table).T).sum(axis=1))
    for implementation in (*FORMS, "pallas+xla"):

        def logsumexp(hidden, name=implementation):
            return cross_entropy(hidden, table, targets, weights, implementation=name, blocks=BLOCKS)[1]

        found, pull_back = jax.vjp(logsumexp, hidden)
        assert_close((found,), (expected,), (8 * ROUNDOFF["float32"],))
        assert not np.any(pull_back(found)[0]), "it takes no gradient"


def test_no_rows():
    hidden, table, bias, targets, weights = small()
    empty = hidden[:0], table, bias
    for name in ("pallas", "pallas+xla"):
        loss = functools.partial(ours(0.0, name), targets=targets[:0], weights=weights[:0])
        value, pull_back = jax.vjp(loss, *empty)
        assert value == 0
        assert [g.shape for g in pull_back(value)] == [x.shape for x in empty]


def test_the_gradient_of_a_probable_target_is_not_lost_in_rounding():
    """Its probability is within half a unit of bfloat16 of 1; the gradient is the difference."""
    hidden = jnp.ones((1, 16), jnp.bfloat16)
    table = jnp.zeros((32, 16), jnp.bfloat16).at[3].set(0.75)  # logits of 12 and 0
    targets, weights = jnp.int32([3]), jnp.ones(1)

    def loss(table):
        return ours(0.0, "pallas+xla")(hidden, table, None, targets, weights)

    probability = np.exp(12) / (np.exp(12) + 31)
    assert jnp.bfloat16(probability) == 1
    np.testing.assert_allclose(jnp.float32(jax.grad(loss)(table)[3]), probability - 1, rtol=2.0**-8)


def test_no_array_of_rows_times_vocabulary():
    """Forward and backward, no array is larger than the embedding or the gradient of a chunk."""
    rows, width, entries = 256, 32, 2048
    blocks = Blocks(rows=16, entries=16, width=16, run=8, chunk=128)
    shapes = [(rows, width), (entries, width), (entries,)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    traced = compiled(ours(0.0, blocks=blocks), False).trace(
        *arrays,
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    sizes = list(sizes_in(traced.jaxpr.jaxpr))
    assert rows * blocks.chunk in sizes  # the search below includes the bodies of scans
    assert max(sizes) == entries * width


def sizes_in(jaxpr):
    for equation in jaxpr.eqns:
        yield from (out.aval.size for out in equation.outvars if hasattr(out.aval, "size"))
        for inner in jaxprs_in_params(equation.params):
            yield from sizes_in(inner)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"table_VD": jnp.zeros((9, 5))}, r"hidden and table must be \[P, D\] and \[V, D\]"),
        ({"targets_P": jnp.zeros(3, jnp.int32)}, r"targets and weights must be \[P\], \(4,\)"),
        ({"bias_V": jnp.zeros(8)}, r"bias is float32 \(8,\); it must be float32 \[V\], \(9,\)"),
        ({"table_VD": jnp.zeros((9, 6), jnp.bfloat16)}, "hidden is float32, table bfloat16"),
        ({"weights_P": jnp.zeros(4, jnp.int32)}, "targets are int32, weights int32"),
        ({"blocks": Blocks(entries=24)}, "entries is 24; a block's side must be a power of 2, at least 16"),
        ({"blocks": Blocks(chunk=0)}, "chunk is 0; it must be at least 1"),
        ({"blocks": Blocks(width=256)}, "bytes of local memory, and a workgroup has 65,536"),
        ({"implementation": "fast"}, 'implementation is "fast"'),
    ],
)
def test_errors(change, sentence):
    values = {
        "hidden_PD": jnp.zeros((4, 6)),
        "table_VD": jnp.zeros((9, 6)),
        "targets_P": jnp.zeros(4, jnp.int32),
        "weights_P": jnp.zeros(4),
        "implementation": "pallas",
    }
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(cross_entropy)(**(values | change))


@pytest.mark.parametrize(
    "logits",
    [
        np.random.default_rng(0).normal(0, 30, (5, 1000)),
        # Descending, ascending, all equal, a single one, and values at the limits of float32.
        np.stack([np.linspace(80, -80, 77), np.linspace(-80, 80, 77), np.zeros(77)]),
        np.stack([np.full(64, -1e30), np.where(np.arange(64) == 63, 1e30, -1e30)]),
        np.array([[3.5], [-np.inf], [1e38]]),
    ],
)
def test_a_logsumexp_in_one_pass(logits):
    found = jax.jit(logsumexp_in_one_pass)(jnp.asarray(logits, jnp.float32))
    given = np.asarray(logits, np.float32).astype(np.float64)
    np.testing.assert_allclose(found, np.logaddexp.reduce(given, axis=1), rtol=3e-7, atol=1e-6)


def test_a_logsumexp_of_nan_is_nan():
    """Whatever the other values are: the step must notice NaN."""
    logits = jnp.zeros((3, 50)).at[jnp.arange(3), jnp.array([0, 20, 49])].set(jnp.nan)
    assert np.all(np.isnan(jax.jit(logsumexp_in_one_pass)(logits)))
