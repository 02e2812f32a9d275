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


def best_seconds(
    functions: dict[str, Callable[[], Any]], *, rounds: int, settling: float = 0
) -> dict[str, float]:
    """The best time of each of several functions, called in turn so that they share the machine's moods.

    Args:
      functions: by name. Each is called once before, to compile and warm up.
      rounds: how often each is timed.
      settling: seconds before each call, for the threads of the one before to go to sleep.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            time.sleep(settling)
            times[name].append(seconds(function))
    return {name: min(values) for name, values in times.items()}


def matmul_ceiling(*, size: int = 2048, rounds: int = 5) -> float:
    """FLOP/s of a float32 product of two square matrices: the most that a model could reach here."""
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / best_seconds({"product": lambda: product(matrix)}, rounds=rounds)["product"]
