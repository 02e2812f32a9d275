"""Programs compiled for MI300X: results, and errors of programs that cannot be compiled."""

import pathlib
import re

import pytest

from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.rocm.compiler import Job, compile_program, lay_out_program


def job(function, *, nodes=1, **arguments):
    cluster = Cluster(device=MI300X, nodes=nodes, gpus_per_node=8)
    return Job(program=f"programs:{function}", arguments=arguments, cluster=cluster)


@pytest.mark.parametrize("nodes", [1, 128])
def test_a_program_is_compiled_for_a_cluster(nodes):
    rows = 64 * 8 * nodes
    compilation = compile_program(job("product_of_rows", nodes=nodes, rows=rows))
    gpus = 8 * nodes
    assert compilation.memory.arguments == 2 * 256 * 512 + 2 * 256 * rows // gpus
    assert compilation.memory.outputs >= 2 * 256 * 512
    assert compilation.memory.total >= compilation.memory.arguments + compilation.memory.outputs
    laid_out = lay_out_program(job("product_of_rows", nodes=nodes, rows=rows))
    assert laid_out == pytest.approx(compilation.memory.total, abs=1024)  # with scalars of reductions
    assert f"num_partitions={gpus}" in compilation.hlo
    assert re.search(r" all-reduce(-start)?\(", compilation.hlo)
    assert compilation.kernels
    assert all(not kernel.problems(MI300X) for kernel in compilation.kernels)
    assert all(1 <= kernel.waves_per_simd(MI300X) <= 8 for kernel in compilation.kernels)


def test_a_pallas_kernel_shows_its_resources():
    compilation = compile_program(job("triton_product", block=64))
    (kernel,) = (kernel for kernel in compilation.kernels if kernel.name == "triton_product")
    assert kernel.grid == 4
    assert kernel.threads == 4 * 64
    assert 0 < kernel.lds_bytes <= MI300X.need_core().lds_bytes
    assert kernel.matrix_instructions > 0
    assert 0 < kernel.vgprs <= 512


@pytest.mark.parametrize(
    ("function", "reason"), [("abort", "ended with SIGABRT"), ("refuse", "ValueError: no such program")]
)
def test_a_program_that_cannot_be_compiled_is_one_error_message(function, reason):
    with pytest.raises(ValueError, match=reason) as error:
        compile_program(job(function))
    log = pathlib.Path(str(error.value).rpartition(" ")[2])
    assert log.is_file()


def test_a_compilation_that_takes_too_long_ends():
    with pytest.raises(ValueError, match=r"was not compiled in 0 s"):
        compile_program(job("product_of_rows", rows=512), time_limit=0.1)
