"""Options of XLA for compiled programs."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

OVERLAP_GATHERS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # With fewer, the gathers of a layer's matrices in the node would postpone the transfer between nodes.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    # XLA does not know how long a transfer takes, and would start it just before its result is needed.
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # The loop over layers fills its stacks of activations: XLA need not write zeros into them before it.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
}
"""Options that overlap transfers of experts with computation; by default XLA waits for each gather at once.
docs/validation.md has the effect of each. XLA's pipelining of all-gathers is not among them: it moves one
iteration out of the loop over layers, which then no longer fills its stacks, and they need their zeros."""

WIDE_VECTORS = {"xla_cpu_prefer_vector_width": 512}
"""512-bit vectors for elementwise work on CPUs; other platforms ignore the option. The gradient of the model
of `zaya bench torch` took 1.84 s with them and 2.03 s without (2 cores of an AMD EPYC); its decoding step of
8 rows took 0.93 of the time in bfloat16 and 0.95 in float32 (2 cores of an Intel Xeon)."""


def compiler_options(
    mesh: Mesh | None = None, *, once: bool = False, gathers: bool = False
) -> dict[str, Any] | None:
    """Returns compiler options for `jax.jit`; None for the defaults.

    On CPUs a program that runs once is compiled at LLVM's level 1, and others with `WIDE_VECTORS`: the
    program of the initial weights of configs/tiny.py took 1.7 s instead of 6.3 s to compile, and the weights
    are bitwise the same.

    Args:
      mesh: devices that run the program; None for the default platform.
      once: whether the program runs only once, so that compiling takes longer than running.
      gathers: whether the layers of the program gather weights.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform != "cpu":
        return known(OVERLAP_GATHERS) if gathers else None
    return {"xla_backend_optimization_level": 1} if once else WIDE_VECTORS


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that this version of XLA has; an unknown option would be an error."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    # Compile for the default platform: compilers for other platforms have the same version and options.
    program = jax.jit(lambda: 0).lower()
    try:
        program.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
