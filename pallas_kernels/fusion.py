"""Keeps XLA's CPU compiler from fusing what must be computed only once; no effect on other platforms."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def unfused(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `function(*arguments)`, which on CPUs is not fused with operations before and after it.

    XLA recomputes cheap values for each reader. If the reader is a transpose, or reads them twice, that is
    slower than storing them once: a transpose of the normalized stream took 2.0 ms with the normalization
    fused into it and 0.3 ms without (2,048 x 512, 2 cores of an AMD EPYC, in a step of `zaya bench torch`).

    Args:
      function: function of arrays.
      arguments: all arrays that it reads; values that it closes over are compiled into it.
    """
    return lax.platform_dependent(*arguments, cpu=not_inlined(function), default=function)


def not_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, which XLA's CPU compiler calls instead of inlining it."""

    def call(*arguments: Any) -> Any:
        # An undocumented attribute of XLA's CPU compiler: without it a call is inlined and then fused.
        with set_xla_metadata(inlineable="false"):
            return jax.jit(function)(*arguments)

    return call
