"""Timing, and the ceilings that times are held against."""

import functools
import time
from collections.abc import Callable, Sequence
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


def repeated_seconds(calls: Sequence[Callable[[int], Any]], *, rounds: int = 3) -> list[float]:
    """Seconds of one repetition of each of several calls, which take turns; the best of some rounds of many.

    What starts a call is paid once a round.

    Args:
      calls: each repeats something so many times, and returns what is waited for. The first time compiles.
      rounds: how often many repetitions are timed.
    """
    times = []
    for call in calls:
        jax.block_until_ready(call(1))
        once = seconds(functools.partial(call, 1))
        times.append(min(MOST_REPETITIONS, max(1, int(ROUND_SECONDS / once))))
    turns = [
        [seconds(functools.partial(call, number)) / number for call, number in zip(calls, times, strict=True)]
        for _ in range(rounds)
    ]
    return list(map(min, zip(*turns, strict=True)))


def free_device_memory() -> int:
    """Bytes that this process' first device has left; CPU devices of a process share those of its host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return available_memory() // jax.local_device_count()
