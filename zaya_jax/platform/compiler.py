"""What the compiler is told besides the program."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

HIDES_GATHERS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Its older name, and its newer one, which jax 0.12 has.
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    # One between nodes and one in the node: else the second begins when the first is done with, and waits.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
"""For layers that gather experts: without them each gather is waited for where it begins. By the model of
`zaya plan --compile` a step of configs/zaya1_8b.py on 128 x 8 MI300X takes 479 ms with them, 719 without."""


def compiler_options(
    mesh: Mesh | None = None, *, once: bool = False, gathers: bool = False
) -> dict[str, Any] | None:
    """Options of `jax.jit` for the platform of a mesh; None for the compiler's own choice.

    Without a mesh it is the platform that runs here.

    On CPUs: whole 512-bit vectors where there are such, for elementwise work between the products.
    The gradient of the model of `zaya bench torch` took 1.84 s with them and 2.03 s without, on 2
    cores of an AMD EPYC. What runs once is compiled at LLVM's first level: that of the initial
    weights of configs/tiny.py took 1.7 s there and not 6.3, and the weights are the same bits.

    Args:
      mesh: of the devices that run the program.
      once: for a program that takes longer to compile than to run.
      gathers: for one whose layers gather weights.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform != "cpu":
        return known(HIDES_GATHERS) if gathers else None
    return {"xla_backend_optimization_level": 1} if once else {"xla_cpu_prefer_vector_width": 512}


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that this XLA has: names come and go, and one that is unknown ends a program."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    # On whatever runs here: a compiler for another platform is of the same version, and has the same options.
    nothing = jax.jit(lambda: 0).lower()
    try:
        nothing.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
