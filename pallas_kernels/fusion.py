"""Keeps XLA's CPU compiler from fusing what must be computed only once, and from converting whole arrays of
which a loop reads or writes parts; no effect on other platforms.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.typing import DTypeLike

FUSED_READERS = 15
"""Largest number of readers into each of which XLA fuses, and so repeats, a producer; with one more the
producer gets its own loop."""
READERS_OF_COPY = FUSED_READERS // 2 + 1
"""Largest number of readers into which XLA fuses a float32 copy of a bfloat16 array."""


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


def entry_in_loop(stack: jax.Array, number: jax.Array) -> jax.Array:
    """Returns `stack[number]` in an iteration of a loop.

    XLA of jax 0.10 converts a bfloat16 array to float32 before it slices it on a CPU. As the conversion does
    not depend on the iteration, it would convert the whole stack before the loop: products of 8 rows with 64
    matrices of 512 x 1,024 took 0.70 ms each and a float32 copy of the stack, and 0.09 ms without (2 cores of
    an AMD EPYC).

    Args:
      stack: array whose entries the iterations read, each one or a few.
      number: index of the entry.
    """

    def on_cpu(stack: jax.Array, number: jax.Array) -> jax.Array:
        # With the barrier the conversion depends on the iteration. XLA removes it after that decision.
        return entry(*lax.optimization_barrier((stack, number)))

    def entry(stack: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(stack, number, keepdims=False)

    if stack.dtype != jnp.bfloat16:
        return entry(stack, number)
    return lax.platform_dependent(stack, number, cpu=on_cpu, default=entry)


def for_readers(operands: tuple[jax.Array, ...], count: int) -> Iterator[tuple[jax.Array, ...]]:
    """Yields the operands for each of `count` reads of parts of a bfloat16 array by one loop on a CPU.

    XLA of jax 0.10 reads parts of a bfloat16 array from a float32 copy of the whole array. The copy has to be
    fused: in memory it made a decoding step of `zaya bench torch` take 81 ms instead of 3. After a barrier,
    the next reads get a separate copy, which is fused too.

    Args:
      operands: the array, and indices if it is read by indices.
      count: number of reads.
    """
    for reader in range(count):
        if reader and reader % READERS_OF_COPY == 0:
            operands = lax.optimization_barrier(operands)
        yield operands


def as_bits(x: jax.Array) -> jax.Array:
    """Returns bfloat16 numbers as uint16, and others as they are.

    For arrays of which the iterations of a loop write parts: XLA of jax 0.10 would convert all of a bfloat16
    array to float32 and back for each part.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the numbers of a dtype that `as_bits` made `bits` of."""
    return lax.bitcast_convert_type(bits, dtype) if bits.dtype != dtype else bits
