"""Timing, and the ceilings that times are held against."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.platform.host_memory import available_memory


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


ROUND_SECONDS = 0.1
"""That a round of repetitions fills."""
MOST_REPETITIONS = 1000


def repeated_seconds(call: Callable[[int], Any], *, rounds: int = 3) -> float:
    """Seconds of one repetition, the best of some rounds of many: what starts a call is paid once a round.

    Args:
      call: repeats something so many times, and returns what is waited for. The first time compiles.
      rounds: how often many repetitions are timed.
    """
    jax.block_until_ready(call(1))
    once = seconds(lambda: call(1))
    times = min(MOST_REPETITIONS, max(1, int(ROUND_SECONDS / once)))
    return min(seconds(lambda: call(times)) for _ in range(rounds)) / times


def free_device_memory() -> int:
    """Bytes that this process' first device has left; CPU devices of a process share those of its host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return available_memory() // jax.local_device_count()
