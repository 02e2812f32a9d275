"""Grouped products with quantized matrices, and the 8-bit embedding, against float64 from the bit
patterns."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantized_folders import by_hand

from pallas_kernels.embedding import QuantizedTable, look_up, product_with_rows
from pallas_kernels.embedding.quantized import PART_BYTES, _num_parts
from pallas_kernels.errors import ArgumentError
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.product import QuantizedMatrix, dequantize, in_stack
from zaya_jax.convert.quantized.codecs import QuantizedValues

FORMATS = ["fp8", "int8", "mxfp4"]
LAYERS, EXPERTS, WIDTH, OUTPUT = 2, 3, 64, 10
SIZES = {
    "all groups": (40, [20, 15, 5]),
    "an empty group": (40, [33, 0, 7]),
    "all rows in one group": (40, [0, 40, 0]),
    "rows after the last group": (40, [3, 4, 5]),
    "no row in any group": (40, [0, 0, 0]),
    "one row": (1, [0, 0, 1]),
    "no rows": (0, [0, 0, 0]),
    "more rows than a block": (600, [520, 0, 80]),
}


@functools.cache
def matrices(name: str) -> tuple[QuantizedMatrix, np.ndarray]:
    """Random bits [L, E, D, F] in our order of axes, and their weights in float64."""
    rng = np.random.default_rng(0)
    shape = (LAYERS, EXPERTS, OUTPUT)
    if name == "mxfp4":
        values = rng.integers(0, 256, (*shape, WIDTH // 2)).astype(np.uint8)
        scales = rng.integers(120, 126, (*shape, WIDTH // 32)).astype(np.uint8)
    else:
        values = rng.integers(0, 256, (*shape, WIDTH)).astype(np.uint8)
        values = np.where(values & 0x7F == 0x7F, 0, values).astype(np.uint8)
        scales = rng.uniform(0.5, 2, (*shape, 1)).astype(np.float32) / 100
    stored = values.view(np.int8) if name == "int8" else values
    dense = np.stack([[by_hand(name, QuantizedValues(v, s)).T for v, s in zip(*pair, strict=True)]
                      for pair in zip(stored, scales, strict=True)])  # fmt: skip
    device = stored.view(ml_dtypes.float8_e4m3fn) if name == "fp8" else stored
    ours = (jnp.asarray(np.ascontiguousarray(x.swapaxes(-1, -2))) for x in (device, scales))
    return QuantizedMatrix(*ours), dense


def layer(name: str, number: int, *, stacked: bool) -> QuantizedMatrix:
    stack, _ = matrices(name)
    own = QuantizedMatrix(*(x[number] for x in stack))
    if not stacked:
        return own
    return QuantizedMatrix(*(in_stack(x, y, jnp.int32(number)) for x, y in zip(own, stack, strict=True)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_by_hand(name, dtype):
    stack, dense = matrices(name)
    actual = jax.jit(lambda x: dequantize(x, jnp.dtype(dtype)))(stack)
    # Products are rounded to float32 and then to the compute dtype.
    expected = dense.astype(np.float32).astype(jnp.dtype(dtype))
    unsigned = np.uint32 if dtype == "float32" else np.uint16
    # -0.0 of E2M1 is 0 as an integer.
    np.testing.assert_array_equal((np.asarray(actual) + 0).view(unsigned), (expected + 0).view(unsigned))
    assert stack.shape == dense.shape


@functools.partial(jax.jit, static_argnames="swiglu")
def run(rows, weights, sizes, scale=None, *, swiglu=False):
    if swiglu:
        return grouped_swiglu(rows, weights, sizes, scale_P=scale)
    return grouped_matmul(rows, weights, sizes)


def in_float64(rows_PD, weights_EDF, sizes_E) -> np.ndarray:
    out = np.zeros((len(rows_PD), weights_EDF.shape[2]))
    ends = np.cumsum(sizes_E)
    for matrix, start, end in zip(weights_EDF, ends - sizes_E, ends, strict=True):
        out[start:end] = rows_PD[start:end] @ matrix
    return out


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", SIZES)
def test_products_are_those_of_dense_weights(case, name, stacked):
    num_rows, sizes = SIZES[case]
    rows = np.random.default_rng(1).standard_normal((num_rows, WIDTH)).astype(np.float32)
    _, dense = matrices(name)
    actual = run(rows, layer(name, 1, stacked=stacked), np.array(sizes, np.int32))
    expected = in_float64(rows.astype(np.float64), dense[1], np.array(sizes))
    # Sums of 64 float32 products.
    np.testing.assert_allclose(actual, expected, atol=64 * 2.0**-24 * np.abs(dense).max() * 5)


@pytest.mark.parametrize("values_dtype", ["float8_e4m3fn", "int8", "uint8"])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_loop_over_layers_has_one_dense_matrix_at_a_time(num_rows, values_dtype):
    layers, experts, width = 8, 8, 128
    inputs, groups = (width // 2, width // 32) if values_dtype == "uint8" else (width, 1)
    scales_dtype = "uint8" if values_dtype == "uint8" else "float32"
    values = jnp.ones((layers, experts, inputs, width), values_dtype)
    scales = jnp.ones((layers, experts, groups, width), scales_dtype)

    def loop(rows, values, scales, sizes):
        def step(rows, number):
            pair = (in_stack(x[number], x, number) for x in (values, scales))
            return grouped_matmul(rows, QuantizedMatrix(*pair), sizes), None

        return jax.lax.scan(step, rows, jnp.arange(layers))[0]

    rows, sizes = jnp.ones((num_rows, width), jnp.bfloat16), jnp.zeros(experts, jnp.int32)
    on_cpu = jax.device_put((rows, values, scales, sizes), jax.devices("cpu")[0])
    compiled = jax.jit(loop).lower(*on_cpu).compile()
    dense = width * width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * dense < values.nbytes


def test_gate_and_up_are_halves():
    rng = np.random.default_rng(2)
    rows, scale = rng.standard_normal((9, WIDTH)).astype(np.float32), rng.uniform(size=9).astype(np.float32)
    sizes = np.array([4, 0, 5], np.int32)
    _, dense = matrices("int8")
    gate, up = np.split(in_float64(rows.astype(np.float64), dense[0], sizes), 2, axis=1)
    expected = scale[:, None] * gate / (1 + np.exp(-gate)) * up
    actual = run(rows, layer("int8", 0, stacked=True), sizes, scale, swiglu=True)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


def test_kernels_are_refused():
    with pytest.raises(ArgumentError, match='implementation is "pallas", which needs dense weights'):
        grouped_matmul(
            jnp.zeros((2, WIDTH)),
            layer("fp8", 0, stacked=False),
            jnp.zeros(3, jnp.int32),
            implementation="pallas",
        )


def test_shapes_are_checked():
    with pytest.raises(ArgumentError, match=r"they must be \[P, D\], \[E, D, F\] and \[E\]"):
        grouped_matmul(jnp.zeros((2, WIDTH + 1)), layer("fp8", 0, stacked=False), jnp.zeros(3, jnp.int32))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("vocabulary", [1, 7, 600])
def test_the_head_reads_the_table_in_parts(vocabulary, dtype, monkeypatch):
    # The largest part is a few rows, so that 600 rows are several.
    monkeypatch.setattr("pallas_kernels.embedding.quantized.PART_BYTES", 100 * WIDTH * 4)
    rng = np.random.default_rng(3)
    values = rng.integers(-127, 128, (vocabulary, WIDTH)).astype(jnp.dtype(dtype))
    scales = rng.uniform(0.5, 2, (vocabulary, 1)).astype(np.float32) / 100
    table = QuantizedTable(jnp.asarray(values), jnp.asarray(scales))
    x = jnp.asarray(rng.standard_normal((2, 3, WIDTH)), jnp.float32)
    dense = values.astype(np.float64) * scales
    expected = np.einsum("btd,vd->btv", np.asarray(x, np.float64), dense)
    np.testing.assert_allclose(product_with_rows(x, table), expected, atol=64 * 2.0**-24 * 6)
    tokens = rng.integers(0, vocabulary, (2, 5))
    rows = look_up(table, jnp.asarray(tokens))
    np.testing.assert_array_equal(rows, dense.astype(np.float32)[tokens])


def test_parts_of_the_vocabulary_fit():
    parts = _num_parts(262_272, 2048 * 2)
    assert 262_272 % parts == 0
    assert 262_272 // parts * 2048 * 2 <= PART_BYTES
