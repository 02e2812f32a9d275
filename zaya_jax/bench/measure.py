"""Timing of functions, and the hardware limits that times are compared with."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zaya_jax.platform.host_memory import available_memory


def seconds(function: Callable[[], Any]) -> float:
    """Returns the wall time of one call, including the wait for its results."""
    start = time.perf_counter()
    # JAX returns from a call before the device has finished it.
    jax.block_until_ready(function())
    return time.perf_counter() - start


def best_seconds(functions: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, float]:
    """Times several functions alternately, so that changes of the machine's load affect all, and returns the
    best times.

    Args:
      functions: functions by name; each is called once beforehand to compile and warm up.
      rounds: number of timings of each function.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    times = [[seconds(function) for function in functions.values()] for _ in range(rounds)]
    return dict(zip(functions, map(min, zip(*times, strict=True)), strict=True))


CEILING_SIZE = 2048
CEILING_FLOPS = 2 * CEILING_SIZE**3
"""Floating-point operations of a call of `ceiling_matmul`."""


def ceiling_matmul(dtype: DTypeLike = jnp.float32) -> Callable[[], Any]:
    """Returns a call of a product of two square matrices: no model reaches more FLOP/s on this machine.

    Args:
      dtype: dtype of the matrices; sums are float32.
    """
    # Random numbers, because zeros draw less power and allow a higher clock.
    matrix = jax.random.normal(jax.random.key(0), (CEILING_SIZE, CEILING_SIZE), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    return lambda: product(matrix)


ROUND_SECONDS = 0.1
"""Target duration of a round of repetitions."""
MAX_REPETITIONS = 1000


def repeated_seconds(calls: Sequence[Callable[[int], Any]], *, rounds: int = 3) -> list[float]:
    """Times several calls alternately and returns the seconds of one repetition of each, from the best round.

    Repetitions share the fixed cost of starting a call.

    Args:
      calls: functions that repeat some work the given number of times and return its result. The first call
        compiles.
      rounds: number of rounds.
    """
    times = []
    for call in calls:
        jax.block_until_ready(call(1))
        times.append(num_repetitions(seconds(functools.partial(call, 1))))
    # Rounds alternate between the calls, so that a slow period of the machine affects all of them.
    turns = [
        [seconds(functools.partial(call, number)) / number for call, number in zip(calls, times, strict=True)]
        for _ in range(rounds)
    ]
    return list(map(min, zip(*turns, strict=True)))


def num_repetitions(once: float) -> int:
    """Returns how often to repeat work of some seconds, so that a round takes about `ROUND_SECONDS`."""
    return min(MAX_REPETITIONS, max(1, int(ROUND_SECONDS / once)))


STEP = 4
"""Ratio of successive sizes of messages and arrays."""


def growing_sizes(smallest: int, largest: int) -> list[int]:
    """Returns sizes from the smallest on, each `STEP` times the previous one; it always includes the
    smallest.
    """
    sizes = [smallest]
    while sizes[-1] * STEP <= largest:
        sizes.append(sizes[-1] * STEP)
    return sizes


def free_device_memory(num_sharing: int | None = None) -> int:
    """Returns the free bytes of this process's first device.

    Args:
      num_sharing: number of CPU devices that share the free memory of the host equally; None means those of
        this process.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    # Accelerators report their memory; CPU devices do not.
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return available_memory() // (num_sharing or jax.local_device_count())
