"""The grouped product and both of its gradients, compared with numpy in float64."""

import functools
import inspect
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels.choice import choose
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.blocked import BLOCK_ROWS, ROWS_IN_PLACE
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.product import in_stack

BLOCK = BLOCK_ROWS
FEW, MANY = 24, 3 * BLOCK + 40
CASES = {
    "all groups": (FEW, [8, 3, 1, 12]),
    "empty groups first, between and last": (FEW, [0, 24, 0, 0]),
    "empty groups around others": (FEW, [0, 11, 13, 0]),
    "all rows in the first group": (FEW, [24, 0, 0, 0]),
    "all rows in the last group": (FEW, [0, 0, 0, 24]),
    "one row per group": (FEW, [1, 1, 1, 1]),
    "rows after the last group": (FEW, [3, 0, 9, 2]),
    "no row in any group": (FEW, [0, 0, 0, 0]),
    "one row": (1, [0, 0, 1, 0]),
    "no rows": (0, [0, 0, 0, 0]),
    "one row, of no group": (1, [0, 0, 0, 0]),
    "as many rows as are read in place": (ROWS_IN_PLACE, [ROWS_IN_PLACE - 14, 0, 5, 7]),
    "one row more": (ROWS_IN_PLACE + 1, [3, 0, ROWS_IN_PLACE - 3, 0]),
    "small blocks": (200, [17, 100, 0, 60]),
    "one row more than a block": (BLOCK + 1, [1, 0, BLOCK, 0]),
    "groups of whole blocks": (MANY, [BLOCK, 2 * BLOCK, 0, 40]),
    "many blocks, no boundary on a multiple": (MANY, [BLOCK - 1, 0, 2 * BLOCK + 5, 36]),
    "many blocks in one group": (MANY, [0, 0, MANY, 0]),
    "many blocks, and whole blocks of rows after them": (MANY, [BLOCK + 3, 0, 20, 1]),
}
IMPLEMENTATIONS = ["blocked", "ragged_dot"]
WIDTH, OUTPUT = 6, 10


def operands(name):
    num_rows, sizes = CASES[name]
    random = np.random.default_rng(num_rows)
    shapes = ((num_rows, WIDTH), (len(sizes), WIDTH, OUTPUT), (num_rows, OUTPUT))
    return *(random.standard_normal(shape) for shape in shapes), np.array(sizes, np.int32)


def rounding(name):
    """Bound for sums over all rows: n sums of products of standard normals, each off by 2^-24 of sqrt(n)."""
    return 1e-5 + CASES[name][0] * 2**-24


def in_float64(rows_PD, weights_EDF, grad_PF, sizes_E):
    """Returns the product and its gradients, by one plain matrix product per group."""
    out_PF, grad_rows_PD = np.zeros_like(grad_PF), np.zeros_like(rows_PD)
    grad_weights_EDF = np.zeros_like(weights_EDF)
    for group, (size, end) in enumerate(zip(sizes_E, np.cumsum(sizes_E), strict=True)):
        rows = slice(end - size, end)
        out_PF[rows] = rows_PD[rows] @ weights_EDF[group]
        grad_rows_PD[rows] = grad_PF[rows] @ weights_EDF[group].T
        grad_weights_EDF[group] = rows_PD[rows].T @ grad_PF[rows]
    return out_PF, grad_rows_PD, grad_weights_EDF


# Sizes are data: few programs serve all cases.
@functools.partial(jax.jit, static_argnames="implementation")
def with_gradients(rows_PD, weights_EDF, grad_PF, sizes_E, implementation, stack_LEDF=None, layer=None):
    def product(rows_PD, weights_EDF):
        weights = weights_EDF if stack_LEDF is None else in_stack(weights_EDF, stack_LEDF, layer)
        return grouped_matmul(rows_PD, weights, sizes_E, implementation=implementation)

    out_PF, pull_back = jax.vjp(product, rows_PD, weights_EDF)
    return out_PF, *pull_back(grad_PF)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_product_and_gradients(name, implementation):
    *arrays, sizes_E = operands(name)
    ours = with_gradients(*(jnp.float32(x) for x in arrays), sizes_E, implementation)
    for what, result, expected in zip(
        ("out", "rows", "weights"), ours, in_float64(*arrays, sizes_E), strict=True
    ):
        assert result.dtype == jnp.float32
        # Only the gradient of the weights sums over rows; the others sum over a few channels.
        atol = rounding(name) if what == "weights" else 1e-5
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=atol, err_msg=what)
    behind = int(sizes_E.sum())
    assert not np.any(ours[0][behind:])
    assert not np.any(ours[1][behind:])


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0] <= ROWS_IN_PLACE])
def test_few_rows_and_matrices_large_enough_to_be_read_in_place(name):
    num_rows, sizes = CASES[name]
    random = np.random.default_rng(num_rows)
    rows_PD, stack_LEDF = random.standard_normal((num_rows, 128)), random.standard_normal((3, 4, 128, 160))
    product = jax.jit(functools.partial(grouped_matmul, implementation="blocked"))
    weights = in_stack(jnp.float32(stack_LEDF[1]), jnp.float32(stack_LEDF), jnp.int32(1))
    sizes_E = np.array(sizes, np.int32)
    out_PF = product(jnp.float32(rows_PD), weights, sizes_E)
    expected, *_ = in_float64(rows_PD, stack_LEDF[1], np.zeros((num_rows, 160)), sizes_E)
    np.testing.assert_allclose(out_PF, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_specification(name):
    *arrays, sizes_E = operands(name)
    out_PF = jax.jit(grouped_matmul_reference)(*(jnp.float32(x) for x in arrays[:2]), sizes_E)
    np.testing.assert_allclose(out_PF, in_float64(*arrays, sizes_E)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["empty groups around others", "many blocks, no boundary on a multiple"])
def test_bfloat16(name, implementation):
    *arrays, sizes_E = operands(name)
    rounded = [jnp.bfloat16(x) for x in arrays]
    ours = with_gradients(*rounded, sizes_E, implementation)
    for result, expected in zip(ours, in_float64(*(np.float64(x) for x in rounded), sizes_E), strict=True):
        assert result.dtype == jnp.bfloat16
        # Each block sum of a group is rounded to 8 bits: a few times 2^-9 of the norm.
        assert np.linalg.norm(np.float64(result) - expected) < 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_after_the_last_group_may_contain_anything(implementation):
    *arrays, sizes_E = operands("rows after the last group")
    arrays[0][sizes_E.sum() :] = np.inf
    ours = with_gradients(*(jnp.float32(x) for x in arrays), sizes_E, implementation)
    assert all(np.isfinite(result).all() for result in ours)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "implementation", "sentence"),
    [
        (((4, 3), (2, 3, 5), (3,)), "ff", None, r"group sizes \(3,\): the number of matrices must equal"),
        (((4, 3, 1), (2, 3, 5), (2,)), "ff", None, r"rows \(4, 3, 1\), .* they must be \[P, D\]"),
        (((4, 3), (3, 5), (3,)), "ff", None, r"weights \(3, 5\), .* they must be \[P, D\]"),
        (((4, 3), (2, 6, 5), (2,)), "ff", None, "rows and weights must have the same width D"),
        (
            ((4, 3), (2, 3, 5), (2,)),
            "fe",
            None,
            "rows are float32, weights float16; they must be of one dtype",
        ),
        (
            ((4, 3), (2, 3, 5), (2,)),
            "ff",
            "fast",
            'implementation is "fast"; it must be "pallas", "xla", "blocked"',
        ),
    ],
)
def test_errors(shapes, dtypes, implementation, sentence):
    rows_PD, weights_EDF = (jnp.zeros(shape, dtype) for shape, dtype in zip(shapes[:2], dtypes, strict=True))
    unchecked = inspect.unwrap(grouped_matmul)  # a wrong name must reach the function, past its annotation
    with pytest.raises(ValueError, match=sentence):
        unchecked(rows_PD, weights_EDF, jnp.zeros(shapes[2], jnp.int32), implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matrices_in_a_stack(implementation):
    """The matrices of layer 2 of 3. Forms that read them in place do not read the layer's own slice."""
    *arrays, sizes_E = operands("empty groups around others")
    rows_PD, weights_EDF, grad_PF = (jnp.float32(x) for x in arrays)
    others_EDF = jnp.full_like(weights_EDF, jnp.nan)
    stack_LEDF = jnp.stack([others_EDF, weights_EDF, others_EDF])
    if implementation == "blocked":
        weights_EDF = others_EDF
    ours = with_gradients(rows_PD, weights_EDF, grad_PF, sizes_E, implementation, stack_LEDF, jnp.int32(1))
    for result, expected in zip(ours, in_float64(*arrays, sizes_E), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_the_default_is_that_of_the_platform():
    *arrays, sizes_E = operands("all groups")
    rows_PD, weights_EDF, grad_PF = (jnp.float32(x) for x in arrays)
    default = with_gradients(rows_PD, weights_EDF, grad_PF, sizes_E, None)
    is_cpu = jax.default_backend() == "cpu"  # where "xla" is "blocked"
    name = "blocked" if is_cpu else choose("grouped_matmul", None, has_few_rows=True)
    chex.assert_trees_all_equal(default, with_gradients(rows_PD, weights_EDF, grad_PF, sizes_E, name))


LARGE = (2048, 64, 64, 96)
"""P, E, D, F: large enough that every array which grows with two of P, E and F would stand out."""


def compiled_with_gradients(implementation):
    rows, groups, width, output = LARGE
    shapes = ((rows, width), (groups, width, output), (rows, output))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return with_gradients.trace(*arrays, jax.ShapeDtypeStruct((groups,), jnp.int32), implementation)


def sizes_in(jaxpr):
    for equation in jaxpr.eqns:
        yield from (math.prod(out.aval.shape) for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes_in(inner)


def test_blocked_makes_no_array_of_rows_times_groups():
    """Neither one-hot rows [P, E, ...] nor a matrix per row [P, D, F]: the largest array is the weights'."""
    rows, groups, width, output = LARGE
    trace = compiled_with_gradients("blocked")
    sizes = list(sizes_in(trace.jaxpr.jaxpr))
    assert len(sizes) > 50  # includes the bodies of loops
    assert max(sizes) == groups * width * output
    assert max(sizes) < rows * groups * width
    temporary = trace.lower().compile().memory_analysis().temp_size_in_bytes
    assert temporary < 2 * 4 * (groups * width * output + rows * (width + output))


def test_no_loop_starts_from_a_copied_constant():
    """Zeros of one shape, for several loops, would be one constant that is copied for each."""

    def two_products(rows_PD, first_EDF, second_EDF, sizes_E):
        hidden_PD = grouped_matmul(rows_PD, first_EDF, sizes_E, implementation="blocked")
        return jnp.sum(grouped_matmul(hidden_PD, second_EDF, sizes_E, implementation="blocked") ** 2)

    shapes = ((MANY, 64), (4, 64, 64), (4, 64, 64))
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    gradients = jax.jit(jax.grad(two_products, argnums=(0, 1, 2)))
    program = gradients.lower(*operands, jax.ShapeDtypeStruct((4,), jnp.int32)).compile().as_text()
    copied = re.findall(rf"= f32\[(?:{MANY}|4),64[\d,]*\]\S* copy\(", program)
    assert not copied
