"""Matrix products that multiply float32 operands in float32, and add in float32, on every platform.

JAX's default precision lets GPUs round float32 operands first: to tf32 on NVIDIA, to xf32 on MI300X, both
with 10 bits of mantissa. Errors then reach 6e-4 where float32 promises 1e-7. All matrix products here and in
`zaya_jax` go through these functions; derivatives inherit the precision.

On CPUs a product of bfloat16 operands is computed in float32 and then rounded. XLA has fast routines for
such products only: a product of 2,048 x 512 x 1,024 ran at 416 GFLOP/s, at 199 with a bfloat16 result, and at
210 in float32 (2 cores of an AMD EPYC with AVX512-BF16).

On GPUs that holds for the product of one row, as in decoding. XLA turns it into multiplications and a sum,
and with jax 0.11 rounds each term to bfloat16: results of 2,048 x 4,096 standard normals were off by up to
0.18, relative to their value or to 1, and by 0.004 when rounded once, in the same time (one H200).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fusion import not_inlined


def precision_of(*operands: jax.Array) -> lax.Precision | None:
    """Returns the precision of a product: HIGHEST for float32 operands, None where it makes no difference.

    Args:
      *operands: factors of the product.
    """
    # Products of two bfloat16 or float16 numbers are exact in float32: nothing needs to be requested.
    return lax.Precision.HIGHEST if jnp.result_type(*operands) == jnp.float32 else None


def matmul(a: jax.Array, b: jax.Array, *, dtype: Any = None) -> jax.Array:
    """`jnp.matmul` with the precision of its operands.

    Args:
      a: left factors, [..., P, D].
      b: right factors, [..., D, F].
      dtype: type of the accumulation and of the result; None for that of the operands.
    """
    return _multiply(jnp.matmul, "...pd,...df->...pf", a, b, dtype)


def einsum(letters: str, a: jax.Array, b: jax.Array, *, dtype: Any = None) -> jax.Array:
    """`jnp.einsum` of two operands with their precision.

    Args:
      letters: subscripts, as for `jnp.einsum`.
      a: first operand, of the shape that the subscripts say.
      b: second operand, of the shape that the subscripts say.
      dtype: type of the accumulation and of the result; None for that of the operands.
    """
    return _multiply(functools.partial(jnp.einsum, letters), letters, a, b, dtype)


def _multiply(
    product: Callable[..., jax.Array], letters: str, a: jax.Array, b: jax.Array, dtype: Any
) -> jax.Array:
    multiply = functools.partial(product, precision=precision_of(a, b))
    result = jnp.result_type(a, b) if dtype is None else dtype
    if not a.dtype == b.dtype == result == jnp.bfloat16:
        return multiply(a, b, preferred_element_type=dtype)

    wide = functools.partial(multiply, preferred_element_type=jnp.float32)

    def rounded_once(a: jax.Array, b: jax.Array, *, summed: Callable[..., jax.Array] = wide) -> jax.Array:
        return summed(a, b).astype(result)

    # A separate function, because XLA would convert an operand that is transposed to float32. It does not
    # round, so that XLA rounds where it reads the result: prefill of 8 x 128 tokens took 0.97 of the time.
    separate = functools.partial(rounded_once, summed=not_inlined(wide))
    cpu = separate if a.ndim == b.ndim == 2 else rounded_once
    # Other products of GPUs add in float32 anyway, and write a bfloat16 result without another pass.
    plain = functools.partial(multiply, preferred_element_type=dtype)
    default = rounded_once if _has_vector(letters, a, b) else plain
    return lax.platform_dependent(a, b, cpu=cpu, default=default)


def _has_vector(letters: str, a: jax.Array, b: jax.Array) -> bool:
    """Whether one operand of each product of a batch is a vector: all its entries are summed over."""
    terms = letters.split("->")[0].split(",")
    sizes = [
        # From the last axis on, because an ellipsis, which both operands share, may be any number of axes.
        dict(zip(reversed(term.removeprefix("...")), reversed(x.shape), strict=False))
        for term, x in zip(terms, (a, b), strict=True)
    ]
    others = [
        math.prod(size for letter, size in own.items() if letter not in other)
        for own, other in (sizes, sizes[::-1])
    ]
    return 1 in others
