"""Wait states in the machine code of all kernels, compiled for MI300X at the catalog's toy sizes."""

import jax
import pytest
from hazards import find_hazards

from pallas_kernels.catalogue import SIZES, cases
from pallas_kernels.emulator import read_code_object
from zaya_jax.errors import UserError
from zaya_jax.plan.rocm.wheels import find_plugin

pytest.importorskip("tinygrad")
pytest.importorskip("flatbuffers")


def kernels_of(dtype, monkeypatch):
    """The machine code of each launch, forward and backward."""
    from zaya_jax.plan.rocm.launches.compiler import LaunchCompiler
    from zaya_jax.plan.rocm.launches.execution import EmulatedLaunches

    compiler, compiled = LaunchCompiler(), []
    compile_launch = compiler.compile

    def record(name, program):
        compiled.append(compile_launch(name, program))
        return compiled[-1]

    monkeypatch.setattr(compiler, "compile", record)
    try:
        with EmulatedLaunches(compiler).launches():
            for case in cases(SIZES["toy"], dtype):
                # Tracing compiles the launches; nothing is executed.
                arguments = jax.eval_shape(case.make, jax.random.key(0))
                jax.jit(case.with_kernels()).lower(*arguments)
    finally:
        compiler.close()
    return [read_code_object(each.code)[each.kernel] for each in compiled]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.campaign)])
def test_compiled_kernels_wait_long_enough(dtype, monkeypatch):
    try:
        find_plugin()
    except UserError as error:
        pytest.skip(str(error))
    kernels = kernels_of(dtype, monkeypatch)
    assert len({kernel.name for kernel in kernels}) >= 15
    hazards = {f"{kernel.name}: {hazard}": hazard for kernel in kernels for hazard in find_hazards(kernel)}
    for text, hazard in hazards.items():
        print(text, hazard.known_defect)
    assert not [text for text, hazard in hazards.items() if hazard.known_defect is None]
