"""What the compiler is told besides the program."""

import jax


def compiler_options() -> dict[str, int] | None:
    """Options of `jax.jit` for the platform that runs; None for the compiler's own choice.

    On CPUs: whole 512-bit vectors where there are such, for elementwise work between the products.
    The training step of `zaya bench torch` took 0.90 of its time with them (2 cores of an AMD EPYC).
    """
    return {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else None
