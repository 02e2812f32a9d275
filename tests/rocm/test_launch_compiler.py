"""Launches of single kernels, lowered in this process and compiled for MI300X in another one."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.backend import execute_launches, launch, load, store
from pallas_kernels.blocks import KernelSettings
from zaya_jax.errors import UserError
from zaya_jax.plan.rocm.launches import compiler as launch_compiler
from zaya_jax.plan.rocm.launches.compiler import LaunchCompiler
from zaya_jax.plan.rocm.launches.lowering import lower_launch


def program_of(size=256, grid=1, factor=2.0, num_stages=2):
    """The lowered program of a kernel that multiplies all numbers."""
    programs = []

    def kernel(x, out):
        at = slice(None)
        store(out.at[at], load(x.at[at]) * factor)

    def keep(call, operands, results, name):
        assert name == "multiply"
        programs.append(lower_launch(call, operands))
        return [jnp.zeros(each.shape, each.dtype) for each in results]

    with execute_launches(keep):
        x, settings = jnp.zeros(size), KernelSettings(num_stages=num_stages)
        launch(kernel, (x,), [jax.ShapeDtypeStruct.like(x)], settings, grid=(grid,), name="multiply")
    return programs[0]


@pytest.fixture
def compiler(tmp_path):
    compiler = LaunchCompiler(folder=tmp_path / "compiled")
    yield compiler
    compiler.close()


def test_a_program_depends_on_the_kernel_and_the_arrays_alone():
    assert program_of() == program_of()
    assert len({program_of(), program_of(size=512), program_of(grid=2), program_of(factor=3.0)}) == 4


def test_a_launch_is_compiled_once(compiler, tmp_path):
    compiled = compiler.compile("multiply", program_of(grid=3))
    assert compiled.grid == (3, 1, 1)
    assert compiled.threads == 4 * 64
    assert compiled.lds_bytes == 0
    assert compiled.kernel == "multiply"
    assert compiled.code.startswith(b"\x7fELF")
    assert compiler.compile("multiply", program_of(grid=3)) is compiled
    other = LaunchCompiler(folder=tmp_path / "compiled")
    assert other.compile("multiply", program_of(grid=3)) == compiled
    assert (compiler.num_compiled, other.num_compiled) == (1, 0)


def test_a_damaged_entry_is_compiled_again(compiler, tmp_path):
    compiled = compiler.compile("multiply", program_of())
    (file,) = (tmp_path / "compiled").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    other = LaunchCompiler(folder=tmp_path / "compiled")
    assert other.compile("multiply", program_of()) == compiled
    assert other.num_compiled == 1
    assert file.read_bytes() == whole
    other.close()


def test_code_that_xla_remembers_is_compiled_in_another_process(compiler):
    """Stages change loops alone, and this kernel has none. XLA writes a file of each code only once."""
    first, second = (compiler.compile("multiply", program_of(num_stages=number)) for number in (1, 2))
    assert first == second
    assert (compiler.num_compiled, compiler.num_workers) == (2, 2)


def test_a_program_that_cannot_be_compiled_is_named_and_others_can(compiler):
    with pytest.raises(UserError, match=r"broken was not compiled: \w+: "):
        compiler.compile("broken", b"no program at all")
    assert compiler.compile("multiply", program_of()).kernel == "multiply"
    assert compiler.num_workers == 1


def test_a_process_that_aborts_or_stalls_is_replaced(compiler, tmp_path, monkeypatch):
    (tmp_path / "aborts.py").write_text("import os\nos.abort()\n")
    (tmp_path / "stalls.py").write_text("import time\ntime.sleep(100)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(launch_compiler, "WORKER", "aborts")
        with pytest.raises(UserError, match="multiply was not compiled: the compiler ended with SIGABRT"):
            compiler.compile("multiply", program_of())
        patch.setattr(launch_compiler, "WORKER", "stalls")
        hasty = LaunchCompiler(folder=tmp_path / "compiled", time_limit=0.5)
        with pytest.raises(UserError, match=r"multiply was not compiled: no reply in 0 s") as error:
            hasty.compile("multiply", program_of())
    assert pathlib.Path(str(error.value).rpartition(" ")[2]).is_file()
    assert compiler.compile("multiply", program_of()).kernel == "multiply"
