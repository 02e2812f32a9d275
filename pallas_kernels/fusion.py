"""Keeps XLA's CPU compiler from fusing what must be computed only once, and from converting whole arrays of
which a loop reads or writes parts; no effect on other platforms.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
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
_BITS = {
    jnp.dtype(jnp.bfloat16): jnp.uint16,
    jnp.dtype(jnp.float8_e4m3fn): jnp.uint8,
}
"""Unsigned integers of the size of the types that XLA's CPU compiler converts to wider ones."""


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


def zero_after(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns 0 of a dtype, which XLA only knows after it has computed `x`, an array with entries."""
    # XLA doesn't know that no unsigned number is below 0. As bits, because XLA would first convert a bfloat16
    # number, in a separate operation.
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jnp.minimum(bits[(0,) * x.ndim], 0).astype(dtype)


def entry_in_loop(stack: jax.Array, number: jax.Array) -> jax.Array:
    """Returns `stack[number]` in an iteration of a loop, as `rows_in_loop` does."""

    def entry(stack: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(stack, number, keepdims=False)

    return _read_in_loop(entry, stack, number)


def rows_in_loop(table: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns `table[numbers]`, a few rows, in an iteration of a loop that does not change the table.

    XLA of jax 0.10 converts a bfloat16 array to float32, and a float8 one to float16, before it reads parts
    of it on a CPU. Before the loop it would so convert the whole array: products of 8 rows with 64 bfloat16
    matrices of 512 x 1,024 took 0.70 ms each and a float32 copy of the stack, and 0.09 ms without (2 cores of
    an AMD EPYC). Bits are not converted.
    """
    return _read_in_loop(lambda table, numbers: table[numbers], table, numbers)


def _read_in_loop(
    read: Callable[[jax.Array, jax.Array], jax.Array], array: jax.Array, indices: jax.Array
) -> jax.Array:
    def on_cpu(array: jax.Array, indices: jax.Array) -> jax.Array:
        # Without the barrier the loop would read a copy of all bits. XLA removes it after that decision.
        array, indices = lax.optimization_barrier((array, indices))
        return from_bits(read(as_bits(array), indices), array.dtype)

    if array.dtype not in _BITS:
        return read(array, indices)
    return lax.platform_dependent(array, indices, cpu=on_cpu, default=read)


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
    """Returns bfloat16 and float8 numbers as unsigned integers, and others as they are.

    For arrays of which the iterations of a loop read or write parts: XLA of jax 0.10 would convert the whole
    array to a wider type, and back if it is written, for each part.
    """
    bits = _BITS.get(x.dtype)
    return x if bits is None else lax.bitcast_convert_type(x, bits)


def from_bits(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the numbers of a dtype that `as_bits` made `bits` of."""
    return lax.bitcast_convert_type(bits, dtype) if bits.dtype != dtype else bits


def concatenate(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    """Concatenates arrays; on a CPU as bits, because XLA of jax 0.10 would make wider copies of all."""
    dtype, sizes = jnp.result_type(*arrays), tuple(each.shape[axis] for each in arrays)
    if dtype not in _BITS:
        return jnp.concatenate(arrays, axis)
    return _concatenate(axis, sizes, *(each.astype(dtype) for each in arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _concatenate(axis: int, sizes: tuple[int, ...], *arrays: jax.Array) -> jax.Array:
    del sizes

    def plain(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate(arrays, axis)

    def on_cpu(*arrays: jax.Array) -> jax.Array:
        return from_bits(plain(*map(as_bits, arrays)), arrays[0].dtype)

    return lax.platform_dependent(*arrays, cpu=on_cpu, default=plain)


def _forward(axis, sizes, *arrays):
    return _concatenate(axis, sizes, *arrays), None


def _backward(axis, sizes, _, grad):
    # Bits have no gradient, so it is written here.
    return tuple(jnp.split(grad, list(itertools.accumulate(sizes[:-1])), axis))


_concatenate.defvjp(_forward, _backward)
