"""Cross-entropy loss of a tied head, and its gradients, without storing all logits.

Letters: P rows (tokens), D width, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import choose
from pallas_kernels.cross_entropy import triton
from pallas_kernels.cross_entropy.mixed import cross_entropy_mixed
from pallas_kernels.cross_entropy.triton import Blocks
from pallas_kernels.cross_entropy.xla import cross_entropy_xla
from pallas_kernels.errors import ArgumentError
from pallas_kernels.precision import matmul

BLOCKS = Blocks()
"""Block sizes, chosen by the registers and local memory that the compiler reports for MI300X; untimed."""


def cross_entropy(
    hidden_PD: jax.Array,
    table_VD: jax.Array,
    targets_P: jax.Array,
    weights_P: jax.Array,
    *,
    bias_V: jax.Array | None = None,
    z_loss: float = 0.0,
    chunk: int = 4096,
    implementation: str | None = None,
    blocks: Blocks = BLOCKS,
) -> tuple[jax.Array, jax.Array]:
    """Sum over rows of `weight * (logsumexp(logits) - logit[target] + z_loss * logsumexp²)`, in nats.

    `logits = hidden @ table.T + bias`, in float32. "xla" stores the logits of one chunk of rows. "pallas"
    holds blocks of logits in registers; its backward pass recomputes them and stores the gradients of one
    chunk of the vocabulary. "pallas+xla" stores exponentials of the logits of one chunk of rows, in the dtype
    of the hidden states: in bfloat16 it moves 46 GB where "xla" moves 81 (16,384 rows, 262,272 entries), and
    a gradient is rounded twice; the loss is not rounded. The squared logsumexp is the z-loss of [PaLM]
    section 5.

    Args:
      hidden_PD: final hidden states, float32 or bfloat16.
      table_VD: tied embedding, in the dtype of the hidden states.
      targets_P: target token of each row, int32; outside of 0..V-1 the logit is 0, without gradient.
      weights_P: weight of each row, float32; 0 excludes a row. Weights have no gradient.
      bias_V: bias of the logits, float32; None for none.
      z_loss: factor of the squared logsumexp, which keeps logits from drifting.
      chunk: rows whose logits "xla" stores at a time, and "pallas+xla" their exponentials.
      implementation: "pallas", "xla", "pallas+xla", which is a kernel for the logits and XLA for gradients,
        or None for the default of `choice.TABLE`.
      blocks: block sizes of the kernels.

    Returns:
      The sum, and the logsumexp of each row, [P], both float32. The logsumexp has no gradient; it serves to
      report the z-loss separately.

    Raises:
      ArgumentError: if shapes, dtypes or settings do not match.
    """
    _check(hidden_PD, table_VD, targets_P, weights_P, bias_V)
    weights_P = lax.stop_gradient(weights_P)
    chosen = choose("cross_entropy", implementation)
    if chosen != "xla":
        triton.check(hidden_PD.dtype.itemsize, blocks)
    arguments = hidden_PD, table_VD, bias_V, targets_P, weights_P, z_loss
    if chosen == "pallas":
        results: Any = _pallas(*arguments, blocks)
    elif chosen == "pallas+xla":
        results = cross_entropy_mixed(*arguments, chunk, blocks)
    else:
        results = cross_entropy_xla(*arguments, chunk)
    loss, logsumexp_P = results
    # The custom backward passes ignore the gradient of this result; here the rule is visible to JAX.
    return loss, lax.stop_gradient(logsumexp_P)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _pallas(hidden_PD, table_VD, bias_V, targets_P, weights_P, z_loss, blocks):
    return _forward(hidden_PD, table_VD, bias_V, targets_P, weights_P, z_loss, blocks)[0]


def _forward(hidden_PD, table_VD, bias_V, targets_P, weights_P, z_loss, blocks):
    arguments = hidden_PD, table_VD, bias_V, targets_P, weights_P
    logsumexp_P, target_logit_P = triton.forward(hidden_PD, table_VD, bias_V, targets_P, blocks)
    losses_P = logsumexp_P - target_logit_P
    if z_loss:  # 0 times the square of a logit of 1e20, which is infinite, would be NaN
        losses_P = losses_P + z_loss * logsumexp_P**2
    return (jnp.sum(weights_P * losses_P), logsumexp_P), (arguments, logsumexp_P)


def _backward(z_loss, blocks, saved, gradients):
    grad, _ = gradients
    (hidden_PD, table_VD, bias_V, targets_P, weights_P), logsumexp_P = saved
    # d loss/d logit = (1 + 2 z logsumexp) * softmax - is_target, times the row's weight.
    target_P = grad * weights_P
    all_P = target_P * (1 + 2 * z_loss * logsumexp_P)

    def visit(grad_hidden_PD, start, size):
        grad_PJ = triton.grad_logits(
            hidden_PD, table_VD, bias_V, targets_P, logsumexp_P, all_P, target_P, start, size, blocks
        )
        # Plain products: a row of the gradient of hidden states, D float32 numbers, does not fit registers.
        table_JD = lax.dynamic_slice_in_dim(table_VD, start, size)
        # The sum over chunks is float32: rounded after each chunk, it would have as many rounding errors as
        # chunks.
        grad_hidden_PD += matmul(grad_PJ, table_JD, dtype=jnp.float32)
        grad_table_JD = matmul(grad_PJ.T, hidden_PD, dtype=jnp.float32)
        grad_bias_J = () if bias_V is None else (grad_PJ.sum(axis=0, dtype=jnp.float32),)
        return grad_hidden_PD, (grad_table_JD.astype(table_VD.dtype), *grad_bias_J)

    zeros_PD = jnp.zeros(hidden_PD.shape, jnp.float32)
    grad_hidden_PD, grads = triton.in_chunks(table_VD.shape[0], blocks.chunk, visit, zeros_PD)
    grad_bias_V = grads[1] if bias_V is not None else None
    return grad_hidden_PD.astype(hidden_PD.dtype), grads[0], grad_bias_V, None, None


_pallas.defvjp(_forward, _backward)


def _check(
    hidden_PD: jax.Array,
    table_VD: jax.Array,
    targets_P: jax.Array,
    weights_P: jax.Array,
    bias_V: jax.Array | None,
) -> None:
    arrays = {"hidden": hidden_PD, "table": table_VD, "targets": targets_P, "weights": weights_P}
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    if hidden_PD.ndim != 2 or table_VD.ndim != 2 or hidden_PD.shape[1] != table_VD.shape[1]:
        raise ArgumentError(f"{shapes}: hidden and table must be [P, D] and [V, D]")
    if targets_P.shape != hidden_PD.shape[:1] or weights_P.shape != hidden_PD.shape[:1]:
        raise ArgumentError(f"{shapes}: targets and weights must be [P], {hidden_PD.shape[:1]}")
    if bias_V is not None and (bias_V.shape != table_VD.shape[:1] or bias_V.dtype != jnp.float32):
        raise ArgumentError(
            f"bias is {bias_V.dtype} {bias_V.shape}; it must be float32 [V], {table_VD.shape[:1]}"
        )
    if hidden_PD.dtype != table_VD.dtype or hidden_PD.dtype not in (jnp.float32, jnp.bfloat16):
        raise ArgumentError(
            f"hidden is {hidden_PD.dtype}, table {table_VD.dtype}; both must be float32, or both bfloat16"
        )
    if weights_P.dtype != jnp.float32 or targets_P.dtype != jnp.int32:
        raise ArgumentError(
            f"targets are {targets_P.dtype}, weights {weights_P.dtype}; they must be int32 and float32"
        )
