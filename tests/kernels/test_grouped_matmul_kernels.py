"""The Triton kernels of `grouped_matmul` and `grouped_swiglu`, with gradients, compared with float64.

Group sizes are data: one compiled shape runs with many of them. Blocks have 16 rows, so that small shapes
have many.
"""

import functools
import inspect
import re
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_base import (
    ROUNDOFF,
    assert_close,
    assert_gradients_are_differences,
    fast_jit,
    in_turn,
    normals,
    rounded,
)

from pallas_kernels import choice
from pallas_kernels.grouped_matmul import Blocks, grouped_feed_forward, grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.activation import swiglu_backward
from pallas_kernels.grouped_matmul.pallas import FEW_ROWS
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference, grouped_swiglu_reference
from pallas_kernels.grouped_matmul.triton import Tile
from pallas_kernels.product import in_stack

TILE = Tile(rows=16, columns=16, contracted=16)
BLOCKS = Blocks(product=TILE, swiglu=TILE, grad_weights=TILE)
SHAPES = [
    # P, D, F, E
    (33, 16, 16, 4), (48, 40, 17, 3), (1, 5, 31, 2), (40, 32, 32, 5), (50, 3, 48, 1), (17, 33, 1, 6),
]  # fmt: skip
"""Rows, widths and groups: blocks that come out even, one more, one less; one row, one column, one group."""


def group_sizes(rows, groups):
    """Group sizes: even, uneven, empty, all in one, one row per group, rows after the last group, none at
    all.
    """
    random = np.random.default_rng(rows)
    even = np.full(groups, rows // groups)
    uneven = random.multinomial(rows, random.dirichlet(np.full(groups, 0.3)))
    first, last = np.eye(groups, dtype=int)[[0, -1]] * rows
    single = np.minimum(1, np.maximum(rows - np.arange(groups), 0))
    behind = uneven // 2
    return {
        "even": even, "uneven": uneven, "first": first, "last": last, "single": single, "after": behind,
        "none": np.zeros(groups),
    }  # fmt: skip


@functools.cache
def compiled(function):
    def both(rows, weights, sizes, grad):
        out, pull_back = jax.vjp(lambda r, w: function(r, w, sizes), rows, weights)
        return out, pull_back(grad)

    return fast_jit(both)


def pallas(operation):
    return functools.partial(operation, implementation="pallas", blocks=BLOCKS)


OPERATIONS = {
    "product": (pallas(grouped_matmul), grouped_matmul_reference, 1),
    "swiglu": (pallas(grouped_swiglu), grouped_swiglu_reference, 2),
}


def bounds(name, shape, dtype):
    """Bounds: sums of D, F or P terms in float32, and a rounding of each result.

    SwiGLU multiplies two sums and, backward, rounds gate, up and their gradient to the dtype before the next
    product: each counts twice, because two of them are multiplied.
    """
    single = 4 * ROUNDOFF["float32"] * (8 + max(shape) ** 0.5)
    if dtype == "float32":
        return single, (single, single)
    half = ROUNDOFF[dtype]
    return (half + single, (half + single,) * 2) if name == "product" else (2 * half, (4 * half, 4 * half))


def check(name, shape, dtype, sizes_by_name):
    rows, width, output, groups = shape
    ours, reference, halves = OPERATIONS[name]
    arrays = normals(rows, (rows, width), (groups, width, halves * output), (rows, output))
    low, exact = rounded(arrays, dtype)
    for kind, sizes in sizes_by_name.items():
        sizes = np.asarray(sizes, np.int32)
        results = compiled(ours)(*low[:2], sizes, low[2])
        with jax.enable_x64(True):
            expected = jax.tree.map(np.asarray, compiled(reference)(*exact[:2], sizes, exact[2]))
        assert results[0].dtype == results[1][0].dtype == results[1][1].dtype == dtype
        assert_close(results, expected, bounds(name, shape, dtype))
        assert not np.any(results[0][sizes.sum() :]), kind


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_results_and_gradients(name, shape, dtype):
    check(name, shape, dtype, group_sizes(shape[0], shape[3]))


@settings(derandomize=True, database=None, deadline=None, max_examples=20)
@given(sizes=st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(lambda s: sum(s) <= 64))
def test_any_group_sizes(sizes):
    check("product", (64, 17, 18, 4), "float32", {"any": sizes})


@settings(derandomize=True, database=None, deadline=None, max_examples=3)
@given(
    rows=st.integers(1, 60),
    width=st.integers(1, 40),
    output=st.integers(1, 40),
    groups=st.integers(1, 5),
    dtype=st.sampled_from(list(ROUNDOFF)),
)
def test_any_shape(rows, width, output, groups, dtype):
    check("swiglu", (rows, width, output, groups), dtype, group_sizes(rows, groups))


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_differences(name):
    ours, reference, halves = OPERATIONS[name]
    arrays = normals(3, (9, 4), (3, 4, halves * 5), (9, 5))
    arguments, sizes = tuple(map(jnp.float32, arrays[:2])), jnp.int32([4, 0, 3])
    ours, reference = (functools.partial(f, group_sizes_E=sizes) for f in (ours, reference))
    assert_gradients_are_differences(ours, reference, arguments, jnp.float32(arrays[2]), bound=1e-5)


def test_rows_after_the_last_group_may_contain_anything_in_kernels():
    rows, weights, grad = map(jnp.float32, normals(0, (20, 16), (2, 16, 32), (20, 16)))
    rows = rows.at[11:].set(jnp.inf)
    for name in OPERATIONS:
        halves = OPERATIONS[name][2]
        out, gradients = compiled(OPERATIONS[name][0])(
            rows, weights[:, :, : 16 * halves], jnp.int32([4, 7]), grad
        )
        assert all(np.isfinite(x).all() for x in (out, *gradients))


@pytest.mark.parametrize("name", OPERATIONS)
def test_matrices_in_a_stack(name):
    """The matrices of layer 2 of 3, read in the stack: neither other layers nor the layer's own slice is
    read.
    """
    ours, _, halves = OPERATIONS[name]
    rows, weights, grad = map(jnp.float32, normals(1, (20, 16), (2, 16, 16 * halves), (20, 16)))
    others, sizes = jnp.full_like(weights, jnp.nan), jnp.int32([9, 5])
    del grad
    stack = jnp.stack([others, weights, others])
    among = fast_jit(ours)(rows, in_stack(others, stack, jnp.int32(1)), sizes)
    chex.assert_trees_all_equal(among, fast_jit(ours)(rows, weights, sizes))


def test_with_gradients_the_layer_s_own_are_read():
    """All of them are needed then, and reading the stack would only complicate the counting of bytes."""
    rows, weights, grad = map(jnp.float32, normals(1, (20, 16), (2, 16, 16), (20, 16)))
    sizes, stack = jnp.int32([9, 5]), jnp.full((3, *weights.shape), jnp.nan)
    product = pallas(grouped_matmul)
    among = compiled(lambda r, w, s: product(r, in_stack(w, stack, jnp.int32(1)), s))(
        rows, weights, sizes, grad
    )
    chex.assert_trees_all_equal(among, compiled(product)(rows, weights, sizes, grad))


@pytest.mark.parametrize("operation", [grouped_matmul, grouped_swiglu])
def test_an_implementation_for_each_direction(operation):
    """`ragged_dot` forward and the kernels for the gradients."""
    rows, weights, grad = map(jnp.float32, normals(4, (20, 16), (2, 16, 32), (20, 32)))
    grad = grad[:, :16] if operation is grouped_swiglu else grad
    sizes = jnp.int32([9, 5])
    both = functools.partial(operation, implementation="ragged_dot+pallas", blocks=BLOCKS)
    alone = functools.partial(operation, implementation="ragged_dot")
    ours, theirs = (compiled(f)(rows, weights, sizes, grad) for f in (both, alone))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, theirs)
    forward = str(jax.make_jaxpr(lambda *a: both(*a))(rows, weights, sizes))
    gradients = str(jax.make_jaxpr(jax.grad(lambda r: both(r, weights, sizes).sum()))(rows))
    assert "ragged_dot" in forward
    assert "pallas_call" not in forward
    assert "pallas_call" in gradients


def feed_forward_reference(rows, gate_up, down, scale, sizes):
    hidden = grouped_swiglu_reference(rows, gate_up, sizes) * scale[:, None]
    return grouped_matmul_reference(hidden, down, sizes)


@functools.cache
def compiled_feed_forward(function):
    def both(rows, gate_up, down, scale, sizes, grad):
        out, pull_back = jax.vjp(lambda *x: function(*x, sizes), rows, gate_up, down, scale)
        return out, pull_back(grad)

    return fast_jit(both)


def joint_feed_forward(rows, gate_up, down, scale, sizes):
    implementation = "ragged_dot+pallas"
    return grouped_feed_forward(
        rows, gate_up, down, sizes, scale_P=scale, implementation=implementation, blocks=BLOCKS
    )


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_both_products_with_the_gradients_of_the_activation_in_one_pass(shape, dtype):
    rows, width, hidden, groups = shape
    arrays = normals(rows, (rows, width), (groups, width, 2 * hidden), (groups, hidden, width), (rows, width))
    low, exact = rounded(arrays, dtype)
    scale = np.float32(np.random.default_rng(rows).uniform(0.1, 1, rows))
    single = 8 * ROUNDOFF["float32"] * (8 + max(shape) ** 0.5)
    # In bfloat16, gate and up, the activations, their gradient and that of gate and up are rounded before the
    # products that read them; a gradient depends on up to four roundings.
    bound = single if dtype == "float32" else 6 * ROUNDOFF[dtype]
    for kind, sizes in group_sizes(rows, groups).items():
        sizes = np.asarray(sizes, np.int32)
        results = compiled_feed_forward(joint_feed_forward)(*low[:3], scale, sizes, low[3])
        with jax.enable_x64(True):
            expected = compiled_feed_forward(feed_forward_reference)(
                *exact[:3], np.float64(scale), sizes, exact[3]
            )
            expected = jax.tree.map(np.asarray, expected)
        assert results[1][3].dtype == jnp.float32
        if kind == "none":
            assert not any(np.any(x) for x in jax.tree.leaves(results))
        else:
            assert_close(results, expected, (bound, (bound,) * 4))


def test_gate_and_up_must_have_the_width_of_the_second_product():
    rows, gate_up, down = (jnp.zeros(shape) for shape in ((4, 8), (2, 8, 12), (2, 4, 8)))
    with pytest.raises(ValueError, match="gate and up must have the width of the rows of the second product"):
        inspect.unwrap(joint_feed_forward)(rows, gate_up, down, jnp.ones(4), jnp.zeros(2, jnp.int32))


def test_a_result_that_is_computed_again_has_separate_backward_passes():
    """It computes the activations again in any case."""
    rows, gate_up, down = (jnp.ones(shape) for shape in ((4, 8), (2, 8, 12), (2, 6, 8)))

    def loss(rows, is_kept):
        options = {"implementation": "ragged_dot+pallas", "blocks": BLOCKS, "is_kept": is_kept}
        out = grouped_feed_forward(rows, gate_up, down, jnp.int32([2, 2]), scale_P=jnp.ones(4), **options)
        return out.sum()

    gradients = [jax.grad(functools.partial(loss, is_kept=kept)) for kept in (True, False)]
    programs = [str(jax.make_jaxpr(gradient)(rows)) for gradient in gradients]
    assert ["activation_backward" in program for program in programs] == [True, False]


def test_activations_far_from_zero_have_finite_gradients():
    """exp(-gate) overflows where silu is 0, and vanishes where it is the identity."""
    gate = jnp.array([[-1e4, -100.0, 0.0, 100.0, 1e4]])
    gate_up = jnp.concatenate([gate, jnp.full_like(gate, 2.0)], axis=1)
    hidden, grad, grad_scale = swiglu_backward(gate_up, jnp.array([0.5]), jnp.ones((1, 5)))
    np.testing.assert_allclose(hidden, [[0, 0, 0, 100, 1e4]], atol=1e-30)
    np.testing.assert_allclose(grad, [[0, 0, 0.5, 1, 1, 0, 0, 0, 50, 5e3]], atol=1e-30)
    np.testing.assert_allclose(grad_scale, [2 * (100 + 1e4)])


def test_the_vendor_package_gets_the_arguments_that_it_supports(monkeypatch):
    """Uses a fake with its signature, which leaves rows of no group unchanged."""
    asked = []

    def grouped_gemm(rows, weights, lengths):
        asked.append(lengths.dtype)
        out = jax.lax.ragged_dot(rows, weights, lengths.astype(jnp.int32), precision="highest")
        return jnp.where((jnp.arange(len(rows)) < lengths.sum())[:, None], out, 7)

    package = types.ModuleType("primus_turbo.jax.lax")
    package.grouped_gemm = grouped_gemm
    monkeypatch.setitem(sys.modules, "primus_turbo.jax.lax", package)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name == "primus_turbo")
    rows, weights, grad = map(jnp.float32, normals(5, (20, 16), (2, 16, 8), (20, 8)))
    sizes = jnp.int32([9, 5])
    vendor, ragged = (
        jax.jit(lambda r, w, g, name=name: with_gradients(name, r, w, sizes, g))(rows, weights, grad)
        for name in ("primus_turbo", "ragged_dot")
    )
    assert set(asked) == {jnp.dtype("int64")}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), vendor, ragged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 21, FEW_ROWS, FEW_ROWS + 1])
def test_default_blocks_of_few_and_of_many_rows(rows, dtype):
    """Widths that no block divides."""
    x, gate_up, down = (jnp.asarray(a, dtype) for a in normals(8, (rows, 70), (3, 70, 180), (3, 90, 70)))
    sizes = jnp.int32(group_sizes(rows, 3)["uneven"])

    def feed_forward(x, gate_up, down):
        hidden = grouped_swiglu(x, gate_up, sizes, implementation="pallas")
        return hidden, grouped_matmul(hidden, down, sizes, implementation="pallas")

    hidden, out = fast_jit(feed_forward)(x, gate_up, down)
    # The references multiply in float32, too, and GPUs approximate exponentials.
    bound = 8 * ROUNDOFF[dtype]
    assert_close(hidden, grouped_swiglu_reference(x, gate_up, sizes), bound)
    assert_close(out, grouped_matmul_reference(hidden, down, sizes), bound)


def test_kernels_of_few_rows_have_other_names():
    """Profiles and reports would otherwise add up two kernels."""

    def names(rows):
        x, weights = jnp.zeros((rows, 8)), jnp.zeros((2, 8, 8))
        traced = jax.make_jaxpr(lambda x, weights: grouped_matmul(x, weights, sizes, implementation="pallas"))
        return set(re.findall(r"name=(grouped_matmul\w*)", str(traced(x, weights))))

    sizes = jnp.int32([1, 0])
    assert names(FEW_ROWS) == {"grouped_matmul_few_rows"}
    assert names(FEW_ROWS + 1) == {"grouped_matmul"}


def with_gradients(implementation, rows, weights, sizes, grad):
    product = functools.partial(grouped_matmul, group_sizes_E=sizes, implementation=implementation)
    out, pull_back = jax.vjp(product, rows, weights)
    return out, pull_back(grad)


def test_the_xla_form_of_swiglu_is_equal():
    rows, weights = map(jnp.float32, normals(2, (24, 8), (3, 8, 12)))
    sizes = jnp.int32([4, 0, 19])
    np.testing.assert_allclose(
        grouped_swiglu(rows, weights, sizes),
        pallas(grouped_swiglu)(rows, weights, sizes),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("operation", [grouped_matmul, grouped_swiglu])
def test_empty_arguments(operation):
    for rows, width in ((0, 8), (5, 0)):
        arrays = jnp.zeros((rows, width)), jnp.ones((3, width, 4))
        out, pull_back = jax.vjp(
            functools.partial(pallas(operation), group_sizes_E=jnp.zeros(3, jnp.int32)), *arrays
        )
        assert not np.any(out)
        assert [g.shape for g in pull_back(out)] == [a.shape for a in arrays]


@pytest.mark.parametrize(
    ("blocks", "columns", "sentence"),
    [
        (Blocks(product=Tile(rows=8, columns=16, contracted=16), swiglu=TILE, grad_weights=TILE), 4,
         "product.rows is 8; a block's side must be a power of 2, at least 16"),
        (Blocks(product=TILE, swiglu=TILE, grad_weights=Tile(rows=256, columns=256, contracted=64)), 4,
         "needs 131,072 bytes of local memory, and a workgroup has 65,536"),
        (BLOCKS, 5, "gate and up must have the same width"),
    ],
)  # fmt: skip
def test_errors(blocks, columns, sentence):
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(grouped_swiglu)(
            jnp.zeros((4, 8)),
            jnp.zeros((2, 8, columns)),
            jnp.zeros(2, jnp.int32),
            implementation="pallas",
            blocks=blocks,
        )
