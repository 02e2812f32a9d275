"""Every Pallas kernel, forward and backward, compiled for MI300X at ZAYA1-8B's shapes."""

from pallas_kernels.catalogue import SIZES, cases
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.kernel_report import compile_kernels


def test_no_kernel_spills_and_those_with_products_use_matrix_instructions():
    reports = compile_kernels(MI300X)
    assert {r.name for r in reports} == {n for case in cases(SIZES["zaya1_8b"]) for n in case.kernels}
    for report in reports:
        assert not report.problems(MI300X), report
        assert report.kernel.vgpr_spills == report.kernel.sgpr_spills == report.kernel.scratch_bytes == 0
        assert 0 <= report.kernel.lds_bytes <= 65_536
        assert report.kernel.waves_per_simd(MI300X) >= 1
        if report.has_products:
            assert report.kernel.matrix_instructions > 0
            assert report.kernel.lds_bytes > 0
