"""Where XLA's compiler for CPUs must be told what to compute once; elsewhere it is let be."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def unfused(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, which on CPUs is not fused with what comes before and behind.

    XLA computes cheap entries where they are read, and anew for each reader. Where the reader is a
    transpose, or reads them twice, that is slower than to write them once: a transpose of the normalised
    stream took 2.0 ms with the normalisation inside of it and 0.3 ms without (2,048 x 512, 2 cores of an
    AMD EPYC, in a step of `zaya bench torch`).

    Args:
      function: of arrays.
      arguments: all that it reads; what it closes over is compiled into it.
    """
    return lax.platform_dependent(*arguments, cpu=not_inlined(function), default=function)


def not_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which XLA's compiler for CPUs calls where it stands."""

    def call(*arguments: Any) -> Any:
        # An attribute of XLA for CPUs that is nowhere documented: without it a call is inlined and fused.
        with set_xla_metadata(inlineable="false"):
            return jax.jit(function)(*arguments)

    return call
