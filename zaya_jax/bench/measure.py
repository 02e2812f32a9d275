"""Timing, and the ceilings that times are held against."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call, results waited for."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def best_seconds(functions: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, float]:
    """The best time of each of several functions, called in turn so that they share the machine's moods.

    Args:
      functions: by name. Each is called once before, to compile and warm up.
      rounds: how often each is timed.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    times = [[seconds(function) for function in functions.values()] for _ in range(rounds)]
    return dict(zip(functions, map(min, zip(*times, strict=True)), strict=True))


CEILING_SIZE = 2048
CEILING_FLOPS = 2 * CEILING_SIZE**3
"""Of a call of `ceiling_matmul`."""


def ceiling_matmul() -> Callable[[], Any]:
    """A float32 product of two square matrices: no model reaches more FLOP/s here."""
    matrix = jax.random.normal(jax.random.key(0), (CEILING_SIZE, CEILING_SIZE), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    return lambda: product(matrix)
