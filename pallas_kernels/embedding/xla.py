"""`look_up` in XLA. For letters see the package."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def look_up_xla(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns rows of a table in float32, with a gradient accumulated in float32."""
    return table_VD[tokens_BT].astype(jnp.float32)


def _forward(table_VD, tokens_BT):
    # The backward pass needs the table's length and dtype only: an array without columns holds both.
    return look_up_xla(table_VD, tokens_BT), (jnp.zeros((table_VD.shape[0], 0), table_VD.dtype), tokens_BT)


def _backward(saved, grad_BTD):
    empty_V0, tokens_BT = saved
    zeros_VD = jnp.zeros((empty_V0.shape[0], grad_BTD.shape[-1]), jnp.float32)
    # In bfloat16 the gradient of a frequent token would stop growing after some hundred additions.
    return zeros_VD.at[tokens_BT].add(grad_BTD).astype(empty_V0.dtype), None


look_up_xla.defvjp(_forward, _backward)
