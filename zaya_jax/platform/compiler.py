"""What the compiler is told besides the program."""

import jax
from jax.sharding import Mesh

HIDES_GATHERS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    # One between nodes and one in the node: else the second begins when the first is done with, and waits.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
"""For layers that gather experts: without them each gather is waited for where it begins. By the model of
`zaya plan --compile` a step of configs/zaya1_8b.py on 128 x 8 MI300X takes 479 ms with them, 719 without."""


def compiler_options(
    mesh: Mesh | None = None, *, once: bool = False, gathers: bool = False
) -> dict[str, int] | None:
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
        return dict(HIDES_GATHERS) if gathers else None
    return {"xla_backend_optimization_level": 1} if once else {"xla_cpu_prefer_vector_width": 512}
