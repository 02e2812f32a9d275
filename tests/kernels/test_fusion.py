"""Operations that CPUs compute in another form: the same values, without copies of whole arrays."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fusion import as_bits, concatenate, entry_in_loop, from_bits, rows_in_loop, unfused
from pallas_kernels.precision import einsum, matmul
from pallas_kernels.product.in_place import product_in_place
from pallas_kernels.product.xla import transposed_product


def _normalised(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))


def _through(call):
    return lambda x, y: jnp.sum(jnp.sin(call(lambda x, y: _normalised(x) * y["scale"], x, y)))


def _compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_values_and_gradients_are_those_of_the_function():
    arguments = jnp.linspace(-1, 1, 12).reshape(3, 4), {"scale": jnp.arange(4.0)}
    ours, plain = (_through(call) for call in (unfused, lambda function, *rest: function(*rest)))
    for argument in (0, 1):
        chex.assert_trees_all_close(
            jax.jit(jax.value_and_grad(ours, argument))(*arguments),
            jax.jit(jax.value_and_grad(plain, argument))(*arguments),
            rtol=1e-6,
        )


def test_on_a_cpu_it_is_not_fused_with_its_reader():
    x = jax.device_put(jnp.ones((64, 32)), jax.devices("cpu")[0])
    assert " call(" in _compiled(lambda x: unfused(_normalised, x).T + 1, x)
    assert " call(" not in _compiled(lambda x: _normalised(x).T + 1, x)


def _reads_parts(stack, x):
    def step(x, i):
        return matmul(x, entry_in_loop(stack, i)), None

    return jax.lax.scan(step, x, jnp.arange(len(stack)))[0]


def _reads_parts_in_place(stack, x):
    def step(x, i):
        return product_in_place(x, stack, jnp.full(len(x), i)), None

    return jax.lax.scan(step, x, jnp.arange(len(stack)))[0]


def _writes_parts(stack, x):
    del x

    def step(i, bits):
        part = from_bits(jax.lax.dynamic_index_in_dim(bits, i, keepdims=False), stack.dtype)
        return jax.lax.dynamic_update_index_in_dim(bits, as_bits(part * i), i, axis=0)

    return from_bits(jax.lax.fori_loop(0, len(stack), step, as_bits(stack)), stack.dtype)


@pytest.mark.parametrize("loop", [_reads_parts, _reads_parts_in_place, _writes_parts])
def test_loops_over_bfloat16_stacks_make_no_float32_copies(loop):
    """XLA of jax 0.10 made some, which took longer than all products."""
    keys = jax.random.split(jax.random.key(0))
    stack, x = (
        jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, [(9, 128, 128), (8, 128)], strict=True)
    )
    on_cpu = jax.device_put((stack / 8, x), jax.devices("cpu")[0])
    assert "f32[9,128,128]" not in _outside_fusions(_compiled(loop, *on_cpu))
    # Each of nine results is rounded to 8 bits.
    expected = np.float64(loop(*jax.tree.map(jnp.float32, on_cpu)))
    error = np.linalg.norm(np.float64(jax.jit(loop)(*on_cpu)) - expected)
    assert error < 9 * 2**-9 * np.linalg.norm(expected)


def _outside_fusions(text):
    parts = text.split("\n\n")
    return "\n".join(part for part in parts if not part.lstrip("\n%").startswith("fused_computation"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("read", [entry_in_loop, lambda stack, i: rows_in_loop(stack, i[None])[0]])
def test_loops_read_parts_without_a_copy_of_the_whole(read, dtype):
    stack = jax.random.normal(jax.random.key(0), (64, 128, 128)).astype(dtype)

    def loop(stack, order):
        def step(total, i):
            return total + read(stack, i).astype(jnp.float32), None

        return jax.lax.scan(step, jnp.zeros(stack.shape[1:]), order)[0]

    on_cpu = jax.device_put((stack, jnp.arange(63, -1, -1)), jax.devices("cpu")[0])
    compiled = jax.jit(loop).lower(*on_cpu).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < stack.nbytes / 4
    np.testing.assert_allclose(compiled(*on_cpu), np.float64(stack).sum(axis=0), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [0, -1])
def test_arrays_are_concatenated_without_wider_copies(axis, dtype):
    shapes = [(128, 64), (128, 64)] if axis == 0 else [(128, 64), (128, 32), (128, 1)]
    arrays = [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]
    out, pull = jax.vjp(jax.jit(lambda *arrays: concatenate(arrays, axis)), *arrays)
    np.testing.assert_array_equal(out, jnp.concatenate(arrays, axis))
    for grad, expected in zip(pull(out), arrays, strict=True):
        np.testing.assert_array_equal(grad, expected)
    mixed = [arrays[0].astype(jnp.float32), *arrays[1:]]
    np.testing.assert_array_equal(concatenate(mixed, axis), jnp.concatenate(mixed, axis))
    on_cpu = jax.device_put(arrays, jax.devices("cpu")[0])
    compiled = jax.jit(lambda arrays: concatenate(arrays, axis)).lower(on_cpu).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < out.nbytes / 4


@pytest.mark.parametrize("product", [matmul, transposed_product, lambda x, y: matmul(x, y.T)])
def test_a_bfloat16_product_of_a_cpu_is_rounded_once(product):
    x, y = (jax.random.normal(jax.random.key(i), (256, 256), jnp.bfloat16) for i in range(2))
    x, y = jax.device_put((x, y), jax.devices("cpu")[0])
    out = jax.jit(product)(x, y)
    assert out.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        exact = product(*(jnp.asarray(np.float64(z)) for z in (x, y)))
    np.testing.assert_allclose(np.float64(out), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_on_other_platforms_it_is_the_plain_function(platform):
    def lowered(function):
        return jax.jit(function).trace(jnp.ones((8, 4))).lower(lowering_platforms=(platform,)).as_text()

    stack = jnp.ones((3, 4, 4096))
    for function in (
        lambda x: unfused(_normalised, x),
        lambda x: transposed_product(x, x),
        lambda x: product_in_place(x[:2], stack, jnp.int32([2, 0])),
        lambda x: matmul(jnp.bfloat16(x), jnp.bfloat16(x.T)),
        lambda x: entry_in_loop(jnp.bfloat16(stack), jnp.int32(x[0, 0])),
        lambda x: concatenate([jnp.bfloat16(x), jnp.bfloat16(x)], 0),
    ):
        assert "inlineable" not in lowered(function)
        assert "optimization_barrier" not in lowered(function)
        assert "bitcast_convert" not in lowered(function)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize(
    ("product", "shapes", "is_wide"),
    [
        (matmul, ((1, 8), (8, 16)), True),
        (matmul, ((8,), (8, 16)), True),
        (matmul, ((3, 1, 8), (3, 8, 16)), True),
        (matmul, ((16, 8), (8, 1)), True),
        (matmul, ((2, 8), (8, 16)), False),
        (matmul, ((3, 2, 8), (3, 8, 16)), False),
        (functools.partial(einsum, "bns,bsc->bnc"), ((3, 1, 8), (3, 8, 16)), True),
        (functools.partial(einsum, "bns,bsc->bnc"), ((3, 2, 8), (3, 8, 16)), False),
        (functools.partial(einsum, "...pf,...df->...pd"), ((3, 1, 8), (3, 16, 8)), True),
        (functools.partial(einsum, "...pf,...df->...pd"), ((3, 5, 2, 8), (3, 5, 16, 8)), False),
        (functools.partial(einsum, "bkgts,bskh->bkgth"), ((3, 2, 1, 1, 8), (3, 8, 2, 4)), True),
        (functools.partial(einsum, "bkgts,bskh->bkgth"), ((3, 2, 4, 1, 8), (3, 8, 2, 4)), False),
    ],
)
def test_on_a_gpu_a_bfloat16_product_with_a_vector_adds_in_float32(platform, product, shapes, is_wide):
    arguments = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    text = jax.jit(product).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    (dot,) = re.findall(r"stablehlo\.dot_general.* -> tensor<[0-9x]*x(\w+)>", text)
    assert dot == ("f32" if is_wide else "bf16")
    assert jax.eval_shape(product, *arguments).dtype == jnp.bfloat16
