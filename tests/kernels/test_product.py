"""`product`, its gradient, and matrices that are read in place in a stack."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.product import in_stack, product
from pallas_kernels.product.in_place import product_in_place
from pallas_kernels.product.reference import product_reference
from pallas_kernels.product.xla import transposed_product
from zaya_jax.model.remat import REMAT_POLICIES

SHAPES = [((5, 3), (3, 4)), ((1, 8), (8, 1)), ((256, 64), (64, 32)), ((3, 7, 6), (3, 6, 2))]


@pytest.mark.parametrize(("x_shape", "kernel_shape"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_a_product(x_shape, kernel_shape, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = (jax.random.normal(k, s, dtype) for k, s in zip(keys, (x_shape, kernel_shape), strict=False))
    out, pull = jax.vjp(lambda x, w: product(x, w, dtype=jnp.float32), x, kernel)
    expected, expected_pull = jax.vjp(product_reference, x, kernel)
    # Representable in the operands' type, to which the backward pass rounds it.
    grad = jax.random.normal(keys[2], out.shape, dtype).astype(out.dtype)
    # One rounding of a gradient to its own type, and the order of a sum of up to 256 terms.
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    chex.assert_trees_all_close(out, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(pull(grad), expected_pull(grad), rtol=tolerance, atol=tolerance)
    chex.assert_trees_all_equal_dtypes(pull(grad), (x, kernel))


def test_a_policy_that_keeps_products_computes_none_twice():
    x, kernel = jnp.ones((4, 8)), jnp.ones((8, 8))

    def loss(x, kernel):
        return jnp.sum(jnp.sin(product(jnp.sin(x), kernel)))

    kept = jax.checkpoint(loss, policy=REMAT_POLICIES["products"])
    recomputed = jax.checkpoint(loss, policy=REMAT_POLICIES["layer"])
    assert _num_products(kept, x, kernel) == 3  # one forward, two backward
    assert _num_products(recomputed, x, kernel) == 4


def _num_products(loss, *arguments) -> int:
    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments)
    return lowered.as_text().count("stablehlo.dot_general")


def _in_layer(number, rows):
    stack = jax.random.normal(jax.random.key(0), (3, 8, 32, 64))
    is_read = rows > (16 if jax.default_backend() == "cpu" else 1)
    own = stack[number] if is_read else jnp.full_like(stack[0], jnp.nan)
    x = jax.random.normal(jax.random.key(1), (rows, 256))
    return x, in_stack(own, stack, jnp.int32(number)).reshape(-1, 64).astype("float32"), stack[number]


# Read in place, copied out of the stack, and the layer's own slice.
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 16, 17])
def test_a_matrix_in_its_stack_is_the_layer_s(rows):
    """Few rows do not read the layer's own slice on a CPU, which then need not exist."""
    x, kernel, own = _in_layer(2, rows)
    assert kernel.shape == (256, 64)
    expected = np.float64(x) @ np.float64(own.reshape(-1, 64))
    np.testing.assert_allclose(product(x, kernel), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "width", "is_late"),
    [(4, 128, False), (5, 128, True), (16, 128, True), (17, 128, False), (8, 64, False)],
    ids=["in place", "few rows", "as many as possible", "many rows", "small matrix"],
)
def test_on_a_cpu_few_rows_copy_a_large_matrix_after_they_are_computed(rows, width, is_late):
    def through_all(x, stack):
        def step(x, i):
            own = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
            return product(x, in_stack(own, stack, i)), None

        return jax.lax.scan(step, x, jnp.arange(3))[0]

    arrays = jnp.ones((rows, width)), jnp.ones((3, width, width))
    arrays = jax.device_put(arrays, jax.devices("cpu")[0])
    text = jax.jit(through_all).lower(*arrays).compile().as_text()
    # The index of a late copy depends on the minimum of an entry of the rows and 0.
    assert bool(re.search(r" = u32\[[0-9,]*\]\S* minimum\(", text)) == is_late


def test_the_gradient_belongs_to_the_layers_own_matrix_and_not_to_the_stack():
    stack = jax.random.normal(jax.random.key(0), (3, 16, 8))
    x = jax.random.normal(jax.random.key(1), (2, 16))

    def loss(own, stack):
        return jnp.sum(product(x, in_stack(own, stack, jnp.int32(1))) ** 2)

    grad_own, grad_stack = jax.grad(loss, argnums=(0, 1))(stack[1], stack)
    expected = jax.grad(lambda own: jnp.sum(product_reference(x, own) ** 2))(stack[1])
    chex.assert_trees_all_close(grad_own, expected, rtol=1e-5)
    assert not np.any(grad_stack)


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (3, 7, 6)])
def test_the_transposed_product_sums_over_rows(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    y = np.random.default_rng(1).standard_normal((*shape[:-1], 4))
    out = jax.jit(transposed_product)(jnp.float32(x), jnp.float32(y))
    np.testing.assert_allclose(out, np.einsum("...pd,...pf->...df", x, y), rtol=1e-5, atol=1e-6)
    assert transposed_product(jnp.bfloat16(x), jnp.bfloat16(y), dtype=jnp.float32).dtype == jnp.float32


# Read in place, in blocks of 16, 16, 63, 39 (5 rows are left over) and 32 rows, or by a product: 124 rows,
# which cannot be divided, and a small matrix.
SHAPES_IN_PLACE = [(3, 128, 160), (3, 2, 64, 128), (3, 1008, 17), (3, 512, 48), (3, 256, 4096)]


@pytest.mark.parametrize("shape", [*SHAPES_IN_PLACE, (3, 124, 160), (3, 16, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("numbers", [[0], [2], [2, 0, 0], [0, 0, 1, 1, 1, 2, 2, 2]])
def test_the_product_in_place_of_a_row_is_that_with_its_matrix(shape, dtype, numbers):
    stack = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((*shape[1:-2], len(numbers), shape[-2])), dtype)
    rows = [np.float64(x[..., p : p + 1, :]) @ np.float64(stack[number]) for p, number in enumerate(numbers)]
    expected = np.concatenate(rows, axis=-2)
    # Sums of up to 1,008 products of standard normals, in float32; then one rounding to 8 bits.
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    out = jax.jit(product_in_place)(x, stack, jnp.int32(numbers))
    assert out.dtype == dtype
    np.testing.assert_allclose(np.float64(out), expected, rtol=tolerance, atol=32e-5)
    wide = jax.jit(functools.partial(product_in_place, dtype="float32"))(x, stack, jnp.int32(numbers))
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=32e-5)


@pytest.mark.parametrize(
    ("columns", "order"), [(256, "8,17"), (4096, "32,8")], ids=["small matrices", "large matrices"]
)
def test_cores_divide_the_rows_of_small_matrices_and_share_large_ones(columns, order):
    """The partial sums of the first loop, whose first axis XLA divides among the cores."""
    x, stack = jax.device_put((jnp.ones((8, 256)), jnp.ones((3, 256, columns))), jax.devices("cpu")[0])
    text = jax.jit(product_in_place).lower(x, stack, jnp.arange(8) % 3).compile().as_text()
    assert re.findall(r"%(?:multiply|add)_add_fusion\S* = f32\[(8,17|17,8|32,8|8,32),", text) == [order]


def test_rows_that_are_not_read_in_place_copy_one_matrix_at_a_time():
    x, stack = jnp.ones((8, 124)), jnp.ones((5, 124, 160))  # 124 rows cannot be split
    text = jax.jit(product_in_place).lower(x, stack, jnp.arange(8) % 5).compile().as_text()
    assert "f32[5,124,160]" in text
    assert not re.findall(r"f32\[8,(?:1,)?124,160\]", text)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_on_a_cpu_the_product_in_place_copies_no_matrix(num_rows):
    def through_all(x, stack):
        def step(x, i):
            return jnp.tanh(product_in_place(x, stack, jnp.full(num_rows, i))), None

        return jax.lax.scan(step, x, jnp.arange(5))[0]

    x, stack = jax.device_put((jnp.ones((num_rows, 192)), jnp.ones((5, 192, 192))), jax.devices("cpu")[0])
    text = jax.jit(through_all).lower(x, stack).compile().as_text()
    assert re.findall(r"f32\[5,192,192\]", text)
    # Rows inside a fusion need no memory; an instruction outside that returns the matrix does.
    outside = [part for part in text.split("\n\n") if not part.lstrip("%").startswith("fused_computation")]
    assert not re.findall(r" = f32\[(?:1,)?192,192\]", "\n".join(outside))
