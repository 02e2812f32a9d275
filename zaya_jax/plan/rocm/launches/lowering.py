"""Programs that launch one Pallas kernel, lowered for AMD GPUs without a GPU and without JAX's ROCm plugin.

JAX lowers for any platform; only the compilation of the lowered program needs the plugin. A serialized
program is therefore the interface between a process that traces kernels and the one that compiles them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from zaya_jax.errors import UserError
from zaya_jax.platform.shell import install_command

PLATFORM = "rocm"
TRITON_CALL = "__gpu$xla.gpu.triton"
"""XLA's name for a Triton kernel in a lowered program."""
ARCHITECTURE = "gfx942"


def lower_launch(call: Callable[..., Any], operands: Sequence[Any]) -> bytes:
    """Lowers a program of one launch and serializes it. The same launch gives the same bytes.

    Args:
      call: Pallas call of the operands.
      operands: arrays, tracers or `jax.ShapeDtypeStruct`; only shapes and dtypes are used.

    Raises:
      UserError: if the package that serializes is missing.
    """
    shapes = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    # A custom call is stable only as long as the compiler is the same; both processes have the same jaxlib.
    checks = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
    with described_gpu(), _no_source_lines():
        # A new function object for each launch: jit would otherwise keep all of them in one cache entry.
        function = jax.jit(lambda *arrays: call(*arrays), keep_unused=True)
        exported = export.export(function, platforms=(PLATFORM,), disabled_checks=checks)(*shapes)
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise UserError(
            f"executing kernels needs the package flatbuffers: {install_command('emulator')}"
        ) from error


def described_gpu() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which Pallas lowers kernels for the GPU, which this machine does not have."""
    # Pallas chooses its backend and its options by the device of the current mesh. Since jax 0.11 it knows
    # AMD GPUs by their architecture only, while described devices have the name of the product.
    gpu = AbstractDevice(device_kind=ARCHITECTURE, num_cores=None, platform="gpu")
    # With the default, explicit axes, reductions in kernels fail to lower in jax 0.12.
    mesh = AbstractMesh((1,), ("launch",), axis_types=(AxisType.Auto,), abstract_device=gpu)
    return jax.sharding.use_abstract_mesh(mesh)


@contextlib.contextmanager
def _no_source_lines() -> Iterator[None]:
    """A context in which lowered programs have no stack traces, which differ by caller and by checkout."""
    # A setting of jax without a context manager. Lines of the caller would make the key of a compiled launch
    # depend on the test that launches it, and each edit of a file would compile its kernels again.
    limit = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
