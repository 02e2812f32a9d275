"""Gradients of `look_up`, added by a scatter on CPUs and in a fixed order on GPUs, and products with all
rows, against float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import host_cpu
from pallas_kernels.embedding import look_up, product_with_rows, xla
from pallas_kernels.embedding.xla import sums_in_order

WIDTH, NUM_TOKENS = 5, 11


def _expected(tokens, grad):
    sums = np.zeros((NUM_TOKENS, WIDTH))
    np.add.at(sums, tokens.ravel(), np.float64(grad).reshape(-1, WIDTH))
    return sums


def _random(shape):
    numbers = np.random.default_rng(0)
    # One token in two is the first one; the last one never occurs.
    tokens = np.where(numbers.random(shape) < 0.5, 0, numbers.integers(NUM_TOKENS - 1, size=shape))
    return tokens, numbers.standard_normal((*shape, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 100), (1, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_token_gets_the_sum_of_its_rows(shape, dtype):
    tokens, grad = _random(shape)
    table = jnp.ones((NUM_TOKENS, WIDTH), dtype)
    (scattered,) = jax.vjp(lambda table: look_up(table, jnp.asarray(tokens)), table)[1](jnp.asarray(grad))
    ordered = jax.jit(sums_in_order)(table[:, :0], jnp.int32(tokens).ravel(), grad.reshape(-1, WIDTH))
    for sums in (scattered, ordered):
        assert sums.dtype == dtype
        # Rounded once, after sums of up to 400 terms.
        tolerance = 1e-5 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(np.float64(sums), _expected(tokens, grad), rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("tokens", [[7], [3, 3, 3], [10, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
def test_first_and_last_tokens_and_single_rows(tokens):
    grad = np.random.default_rng(1).standard_normal((len(tokens), WIDTH)).astype(np.float32)
    sums = jax.jit(sums_in_order)(jnp.zeros((NUM_TOKENS, 0)), jnp.int32(tokens), grad)
    np.testing.assert_allclose(sums, _expected(np.array(tokens), grad), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_on_a_gpu_no_row_is_added_to_another_in_memory(platform):
    """An addition in memory is an atomic one there, and atomics have no order."""

    def gradient(table, tokens, grad):
        return jax.vjp(lambda table: look_up(table, tokens), table)[1](grad)

    arguments = jnp.ones((NUM_TOKENS, WIDTH)), jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3, WIDTH))
    text = jax.jit(gradient).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.scatter" in text
    assert "unique_indices = false" not in text


@pytest.mark.parametrize(
    "shape",
    [(1, 0, 64), (1, 1, 64), (1, 1, 512), (1, 1, 1024), (2, 1, 64), (1, 3, 64), (4, 4, 64), (17, 1, 64)],
)
@pytest.mark.parametrize(("dtype", "has_unit"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_products_with_all_rows_and_their_gradients(shape, dtype, has_unit, monkeypatch):
    """On CPUs the order of the operands and the padding depend on the dtype and on the CPU."""
    monkeypatch.setattr(xla, "has_bfloat16_matrix_unit", lambda: has_unit)
    keys, width = jax.random.split(jax.random.key(0), 3), shape[-1]
    x, table = (jax.random.normal(k, s, dtype) for k, s in zip(keys, (shape, (50, width)), strict=False))
    out, pull = jax.vjp(product_with_rows, x, table)
    wide_x, wide_table = np.float64(x), np.float64(table)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, wide_x @ wide_table.T, atol=2e-5 * np.sqrt(width / 64))
    grad = jax.random.normal(keys[2], out.shape)
    grad_x, grad_table = pull(grad)
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == "float32" else {"rtol": 2**-8, "atol": 1e-4}
    np.testing.assert_allclose(np.float64(grad_x), np.float64(grad) @ wide_table, **tolerance)
    expected = np.einsum("btv,btd->vd", np.float64(grad), wide_x)
    np.testing.assert_allclose(np.float64(grad_table), expected, **tolerance)


@pytest.mark.parametrize(
    ("dtype", "has_unit", "num_rows", "expected"),
    [
        ("bfloat16", True, 8, "50x8"),
        ("bfloat16", True, 1, "50x4"),
        ("bfloat16", False, 8, "1x8x50"),
        ("bfloat16", False, 1, "1x2x50"),
        ("float32", False, 8, "50x8"),
        ("float32", True, 1, "1x1x50"),
    ],
)
def test_the_faster_order_of_operands_is_that_of_dtype_and_cpu(
    dtype, has_unit, num_rows, expected, monkeypatch
):
    monkeypatch.setattr(xla, "has_bfloat16_matrix_unit", lambda: has_unit)
    arguments = jnp.zeros((num_rows, 1, 64), dtype), jnp.zeros((50, 64), dtype)
    text = jax.jit(lambda x, table: product_with_rows(x, table)).lower(*arguments).as_text()
    (product,) = (line for line in text.splitlines() if "dot_general" in line)
    assert f"-> tensor<{expected}xf32>" in product


@pytest.mark.parametrize("width", [512, 2048])
def test_a_single_bfloat16_token_reads_the_table_in_place(width, monkeypatch):
    monkeypatch.setattr(xla, "has_bfloat16_matrix_unit", lambda: False)
    table = jnp.zeros((1000, width), jnp.bfloat16)
    compiled = (
        jax.jit(lambda *arguments: product_with_rows(*arguments)).lower(table[None, :1], table).compile()
    )
    # A sixteenth of the products, in float32; a copy of the table would be 8 times as large.
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes / 4


@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize(("dtype", "has_unit"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_loop_over_tokens_copies_no_table(num_rows, dtype, has_unit, monkeypatch):
    """XLA moves whatever depends on the table alone before the loop, such as a float32 or transposed copy."""
    monkeypatch.setattr(xla, "has_bfloat16_matrix_unit", lambda: has_unit)

    def step(_, carry):
        tokens, table = carry
        x = look_up(table, tokens).astype(dtype)
        return product_with_rows(x, table).argmax(axis=-1), table

    table, tokens = jnp.zeros((4096, 512), dtype), jnp.zeros((num_rows, 1), jnp.int32)
    loop = jax.jit(lambda *carry: jax.lax.fori_loop(0, 9, step, carry)[0])
    compiled = loop.lower(tokens, table).compile()
    logits = num_rows * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes / 2 + 2 * logits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags : avx512_bf16 amx_bf16 amx_tile\n", True),
        ("flags : avx512_bf16 amx_bf16x\n", False),
        (None, False),
    ],
)
def test_a_matrix_unit_is_one_that_linux_lists(text, expected, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(host_cpu, "CPU_INFO", file)
    assert host_cpu.has_bfloat16_matrix_unit.__wrapped__() is expected
