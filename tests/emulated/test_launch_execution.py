"""Launches that the emulator executes: jax's caches, errors with the kernel's name, outputs never written."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from rich.console import Console

from pallas_kernels.backend import launch, load, store
from pallas_kernels.blocks import KernelSettings
from pallas_kernels.catalogue import SIZES, cases
from pallas_kernels.emulator import EmulationError
from zaya_jax.errors import UserError
from zaya_jax.plan.command import main
from zaya_jax.plan.compiled import kernel_execution
from zaya_jax.plan.compiled.kernel_execution import execute_operation, largest_error, print_executions
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.rocm.launches.compiler import LaunchCompiler
from zaya_jax.plan.rocm.launches.execution import EmulatedLaunches

SIZE = 64


@pytest.fixture(scope="module")
def compiler():
    pytest.importorskip("tinygrad")
    pytest.importorskip("flatbuffers")
    try:
        compiler = LaunchCompiler()
    except UserError as error:
        pytest.skip(str(error))
    yield compiler
    compiler.close()


def add_one(x, *, first=0, num_written=SIZE):
    """x + 1 of a block that starts at `first`; only its first numbers are written."""

    def kernel(x, out):
        start = pl.program_id(0) * 0
        mask = jnp.arange(SIZE) < num_written
        store(out.at[pl.ds(start, SIZE)], load(x.at[pl.ds(start + first, SIZE)]) + 1, mask)

    result = jax.ShapeDtypeStruct((SIZE,), x.dtype)
    return launch(kernel, (x,), [result], KernelSettings(), grid=(1,), name="add_one")[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_launch_is_executed(compiler, dtype):
    executor, x = EmulatedLaunches(compiler, count_memory=True), jnp.arange(SIZE).astype(dtype)
    with executor.launches():
        result = add_one(x)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, x + 1)
    (executed,) = executor.executed
    assert executed.name == "add_one"
    assert executed.array_bytes == 2 * x.nbytes
    assert executed.execution.counts.device_bytes >= 2 * x.nbytes
    assert executed.execution.outputs == []


def test_jax_traces_functions_again_for_the_executor(compiler):
    """A function that was traced before must not run as it was traced, and afterwards it must."""
    executor, function, x = EmulatedLaunches(compiler), jax.jit(add_one), jnp.ones(SIZE)
    for inside in (False, True, False, True):
        executor.clear()
        if inside:
            with executor.launches():
                result = function(x).block_until_ready()
        else:
            result = function(x)
        assert len(executor.executed) == inside
        np.testing.assert_array_equal(result, x + 1)


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_an_error_names_the_kernel(compiler, transform):
    executor = EmulatedLaunches(compiler)
    with (
        pytest.raises(EmulationError, match=r"kernel add_one: .*global_load|kernel add_one: .*load") as error,
        executor.launches(),
    ):
        jax.block_until_ready(transform(lambda x: add_one(x, first=5000))(jnp.ones(SIZE)))
    assert error.value.check == "bounds"
    assert executor.executed == []
    assert executor.failure is error.value


def test_outputs_must_be_written(compiler):
    function, x = jax.jit(lambda x: add_one(x, num_written=40)), jnp.ones(SIZE)
    executor = EmulatedLaunches(compiler)
    with pytest.raises(EmulationError, match="kernel add_one: 96 bytes of the outputs"), executor.launches():
        jax.block_until_ready(function(x))
    lenient = EmulatedLaunches(compiler, may_leave_unwritten=["add_one"])
    with lenient.launches():
        result = function(x).block_until_ready()
    np.testing.assert_array_equal(result[:40], 2)
    assert np.isnan(result[40:]).all()


def test_an_operation_is_executed_and_compared(compiler):
    (case,) = (case for case in cases(SIZES["toy"], "float32") if case.name == "grouped_matmul")
    executor = EmulatedLaunches(compiler, count_memory=True)
    result = execute_operation(case, executor, "float32")
    assert {kernel.name for kernel in result.kernels} == set(case.kernels)
    assert 0 < result.error < 1e-6
    assert result.problem is None
    for kernel in result.kernels:
        assert kernel.launches == 1
        assert kernel.counts.by_class()["matrix"] > 0
        assert kernel.counts.device_lines >= kernel.minimum_lines > 0
        assert kernel.counts.local_cycles >= kernel.counts.local_conflicts >= 0
        assert 0 < kernel.counts.active_share <= 1


def test_the_command_prints_all_and_reports_what_is_wrong(compiler, monkeypatch):
    """With a tolerance that no result meets."""
    chosen = [case for case in cases(SIZES["toy"], "bfloat16") if case.name == "residual_rms_norm"]
    monkeypatch.setattr(kernel_execution, "cases", lambda sizes, dtype: chosen)
    monkeypatch.setattr(kernel_execution, "TOLERANCE_FACTORS", {"bfloat16": 1e-9})
    console = Console(record=True, width=120)
    with pytest.raises(
        UserError, match=r"bfloat16 residual_rms_norm: the results differ by .* more than 3\.0e"
    ):
        print_executions(console, MI300X, size="toy", dtypes=["bfloat16"])
    text = console.export_text()
    for word in ("residual_rms_norm_backward", "memory transactions", "conflicts", "bound"):
        assert word in text


def test_errors_are_relative_to_the_reference():
    assert largest_error([jnp.ones(4), jnp.zeros(2)], [jnp.ones(4), jnp.zeros(2)]) == 0
    assert largest_error([jnp.float32([3, 4.5])], [jnp.float32([3, 4])]) == pytest.approx(0.1)
    assert np.isnan(largest_error([jnp.ones(1), jnp.float32([np.nan])], [jnp.ones(1), jnp.ones(1)]))


def test_a_run_is_not_executed():
    with pytest.raises(UserError, match="--execute is for kernels, not for a run"):
        main(["--config=configs/zaya1_8b.py", "--execute"])


def test_without_the_packages_the_command_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tinygrad" else find_spec(name)
    )
    with pytest.raises(UserError, match=r"--execute needs tinygrad, not installed here: .*pip install "):
        main(["kernels", "--execute"])
