"""Root-mean-square and L2 normalisation. Both work in float32 whatever comes in."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], *, eps: float
) -> Float[Array, "*batch D"]:
    """`scale * x / sqrt(mean(x^2) + eps)`, in float32."""
    x = x.astype(jnp.float32)
    return scale * (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps))


def l2_norm(x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
    """Scales vectors to length sqrt(H), in float32 (CCA: QK normalisation).

    A vector shorter than float32's epsilon is scaled as one of that length. The bound is on the
    squared length, so that a zero vector, as padding makes them, has a finite gradient.
    """
    x = x.astype(jnp.float32)
    squared = jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).eps ** 2)
    return x * (x.shape[-1] ** 0.5 * jax.lax.rsqrt(squared))
