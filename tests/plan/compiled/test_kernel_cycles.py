"""The bound of a kernel's time by its busiest unit, computed by hand."""

import dataclasses

import pytest

from zaya_jax.plan.compiled.kernel_cycles import kernel_cycles
from zaya_jax.plan.gpus import MI300X

PER_GPU = 304 * 4
"""Vector units of an MI300X."""


def cycles(local=0, array_bytes=0, **instructions):
    return kernel_cycles(instructions, local_cycles=local, array_bytes=array_bytes, device=MI300X)


def test_a_product_takes_the_time_of_its_flops_at_the_peak():
    """The data sheet's FLOP/s, which is another source than the cycles of instructions."""
    count = 1_000_000
    result = cycles(v_mfma_f32_32x32x8_bf16=count)
    flops = 2 * 32 * 32 * 8 * count
    assert result.matrix / MI300X.need_core().clock == pytest.approx(flops / MI300X.matrix_flops, rel=1e-3)
    assert (result.busiest, result.matrix_share, result.vector) == ("MFMA", 1.0, 0.0)
    # Data sheet: 163.4 TFLOP/s in float32.
    narrow = cycles(v_mfma_f32_16x16x4_f32=count)
    assert narrow.matrix / 2.1e9 == pytest.approx(2 * 16 * 16 * 4 * count / 163.4e12, rel=1e-3)


def test_each_unit_counts_what_it_executes():
    result = cycles(
        304 * 50,
        0,
        v_mfma_f32_16x16x16_bf16_1k=PER_GPU,
        v_add_f32=PER_GPU,
        v_exp_f32=PER_GPU,
        s_add_u32=10**9,
    )
    assert dataclasses.astuple(result) == (16, 4 + 16, 50, 0)
    assert (result.busiest, result.bound, result.matrix_share) == ("LDS", 50, 16 / 50)


def test_memory_is_bound_by_its_bandwidth():
    result = cycles(0, int(MI300X.memory_bandwidth), v_mov_b32=PER_GPU)
    assert (result.busiest, result.bound) == ("HBM", pytest.approx(2.1e9))
    assert result.matrix_share == 0.0


def test_an_unknown_matrix_instruction_is_an_error():
    with pytest.raises(KeyError, match="f64"):
        cycles(v_mfma_f64_16x16x4_f64=1)
