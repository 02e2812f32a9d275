"""Every Pallas kernel, forward and backward, compiled for MI300X at ZAYA1-8B's shapes.

tests/rocm/main_loops.json has the main loops by version of jaxlib, which contains Triton. `python
tests/rocm/test_kernel_resources.py --regenerate` rewrites those of the installed version; review the diff.
"""

import dataclasses
import functools
import json
import pathlib
import sys

import jaxlib
import pytest

from pallas_kernels.catalogue import SIZES, cases
from zaya_jax.plan.compiled.kernel_report import DTYPES, compile_kernels
from zaya_jax.plan.gpus import MI300X

BFLOAT16, FLOAT32 = DTYPES
GOLDEN = pathlib.Path(__file__).parent / "main_loops.json"
JAXLIB = ".".join(jaxlib.__version__.split(".")[:2])


@functools.cache
def reports(dtype):
    return compile_kernels(MI300X, dtype=dtype)


def main_loops():
    """Returns by kernel: work of a wave in its main loop, and waves per SIMD."""
    return {
        report.kernel.name: {
            **(dataclasses.asdict(report.kernel.loop) if report.kernel.loop else {}),
            "waves": report.kernel.waves_per_simd(MI300X),
        }
        for report in reports(BFLOAT16)
    }


@pytest.mark.parametrize("dtype", [BFLOAT16, pytest.param(FLOAT32, marks=pytest.mark.campaign)])
def test_no_kernel_spills_and_those_with_products_use_matrix_instructions(dtype):
    assert {r.name for r in reports(dtype)} == {n for case in cases(SIZES["zaya1_8b"]) for n in case.kernels}
    for report in reports(dtype):
        assert report.kernel.xf32_instructions == 0
        assert not report.problems(MI300X), report
        assert report.kernel.vgpr_spills == report.kernel.sgpr_spills == report.kernel.scratch_bytes == 0
        assert 0 <= report.kernel.lds_bytes <= 65_536
        assert report.kernel.waves_per_simd(MI300X) >= 1
        if report.has_products:
            assert report.kernel.matrix_instructions > 0
            assert report.kernel.lds_bytes > 0


def test_main_loops_are_unchanged():
    """A changed kernel or compiler may be better or worse: the diff shows which."""
    golden = json.loads(GOLDEN.read_text())
    assert JAXLIB in golden, f"no main loops are recorded for jaxlib {JAXLIB}: add them with --regenerate"
    assert main_loops() == golden[JAXLIB]


if __name__ == "__main__":
    if sys.argv[1:] != ["--regenerate"]:
        sys.exit(__doc__)
    golden = json.loads(GOLDEN.read_text()) | {JAXLIB: main_loops()}
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
