"""Compressed convolutional attention (CCA): from projected latents to queries and keys, in one pass.

Source: [CCA] section II-B and Listing 1, with a linear temperature ([ZAYA1-8B] appendix C).

Letters: B batch, T time, N query heads, K key heads, G = N/K query heads of a key head, A = N + K heads,
H head width, C = A*H latent channels (queries first), I and J taps of the two convolutions, W = I + J - 2
earlier tokens that both need, Z paths through both, O half of the rotated channels of a head, b is B or 1.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cca import gradients, triton
from pallas_kernels.cca.reference import CcaWeights, rotate
from pallas_kernels.cca.triton import Blocks, Tile
from pallas_kernels.cca.xla import cca_xla, segments_with_history, taps_over_time
from pallas_kernels.choice import choose
from pallas_kernels.errors import ArgumentError
from pallas_kernels.product import own_matrix

BLOCKS = Blocks(
    forward=Tile(rows=64, contracted=32, num_stages=2),
    grad_mixed=Tile(rows=64, contracted=32, num_stages=2),
    grad_latent=Tile(rows=64, contracted=32, num_stages=2),
    grad_kernel=Tile(rows=64, contracted=32),
    run=1024,
)
"""Block sizes, chosen by the registers and local memory that the compiler reports for MI300X; untimed."""


def cca(
    latent_BTX: jax.Array,
    tail_BWC: jax.Array,
    weights: CcaWeights,
    rotation: tuple[jax.Array, jax.Array],
    *,
    segments_BT: jax.Array | None = None,
    implementation: str | None = None,
    blocks: Blocks = BLOCKS,
) -> tuple[jax.Array, jax.Array]:
    """Computes queries and keys from their latents.

    Applies a depthwise convolution over time and then one per head over its channels, and adds the mean of
    each query head and its key head. Queries and keys are then scaled to length sqrt(H), keys also by their
    temperature, and the first 2*O channels of each head are rotated (RoPE), channel i with channel i + O.
    Products have operands of the latent's dtype; everything else is float32. Before the start of a document
    the second convolution reads the bias of the first one.

    The kernels multiply by both convolutions at once (`joined.py`): they round the product of the two
    kernels, while the XLA form rounds the result of the first convolution. Only the arguments are kept for
    the backward pass. Latent, tail and weights have gradients, summed in a fixed order; the rotation has
    none.

    Args:
      latent_BTX: latents, float32 or bfloat16. The first C channels are those of queries and keys; later
        ones, such as values, are not read, so that the joint projection need not be sliced.
      tail_BWC: latents of the W previous tokens, of the same dtype; they belong to the first document.
      weights: weights of the convolutions, and the temperature of each key head.
      rotation: cosines and sines of RoPE, [b, T, O], float32.
      segments_BT: document number of each token, int32; documents do not mix. Segment 0 is padding, whose
        latents count as zeros. None for one document.
      implementation: "pallas", "xla", or None for the default of `choice.TABLE`.
      blocks: block sizes of the kernels.

    Returns:
      q [B, T, N, H] and k [B, T, K, H], in the latent's dtype.

    Raises:
      ArgumentError: if shapes, dtypes or settings do not match.
    """
    _check(latent_BTX, tail_BWC, weights, rotation, segments_BT)
    if choose("cca", implementation) == "pallas":
        taps = weights.depthwise_kernel_IC.shape[0], weights.grouped_kernel_AJHH.shape[1]
        triton.check(taps, weights.grouped_kernel_AJHH.shape[3], latent_BTX.dtype.itemsize, blocks)
        # The kernels read all of the layer's matrices: reading them in the stack would save nothing.
        weights = weights._replace(grouped_kernel_AJHH=own_matrix(weights.grouped_kernel_AJHH))
        return _pallas(latent_BTX, tail_BWC, weights, rotation, segments_BT, blocks)
    latent_BTC = latent_BTX[:, :, : tail_BWC.shape[2]]
    q_BTNH, k_BTKH = cca_xla(latent_BTC, tail_BWC, weights, rotation, segments_BT)
    return q_BTNH.astype(latent_BTC.dtype), k_BTKH.astype(latent_BTC.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _pallas(latent_BTX, tail_BWC, weights, rotation, segments_BT, blocks):
    return _run(latent_BTX, tail_BWC, weights, rotation, segments_BT, blocks)


def _run(latent_BTX, tail_BWC, weights, rotation, segments_BT, blocks) -> tuple[jax.Array, jax.Array]:
    batch, time, _ = latent_BTX.shape
    heads, _, width, _ = weights.grouped_kernel_AJHH.shape
    num_keys = weights.temperature_K.shape[0]
    shapes = [(batch, time, n, width) for n in (heads - num_keys, num_keys)]
    # Pallas accepts no empty grid.
    if latent_BTX.size == 0:
        q_BTNH, k_BTKH = (jnp.zeros(shape, latent_BTX.dtype) for shape in shapes)
        return q_BTNH, k_BTKH
    given = triton.operands(latent_BTX, tail_BWC, weights, rotation, segments_BT)
    results = triton.forward(given, blocks.forward)
    q_BTNH, k_BTKH = (x.reshape(shape) for x, shape in zip(results, shapes, strict=True))
    return q_BTNH, k_BTKH


def _forward(latent_BTX, tail_BWC, weights, rotation, segments_BT, blocks):
    arguments = latent_BTX, tail_BWC, weights, rotation, segments_BT
    return _run(*arguments, blocks), arguments


def _backward(blocks, arguments, grads):
    latent_BTX, tail_BWC, weights, *_ = arguments
    if latent_BTX.size == 0:
        return *jax.tree.map(jnp.zeros_like, (latent_BTX, tail_BWC, weights)), None, None
    given = triton.operands(*arguments)
    grad_q_BTX, grad_k_BTY = (x.reshape(*latent_BTX.shape[:2], -1) for x in grads)
    grad_latent_BTC, grad_tail_BWC, grad_weights = gradients.backward(
        given, weights, grad_q_BTX, grad_k_BTY, blocks
    )
    # Channels after the first C were not read: their gradient is zero.
    unread = latent_BTX.shape[2] - grad_latent_BTC.shape[2]
    grad_latent_BTX = jnp.pad(grad_latent_BTC, ((0, 0), (0, 0), (0, unread)))
    # With one tap in each convolution the tail is empty, and the kernels do without it.
    grad_tail_BWC = jnp.zeros_like(tail_BWC) if grad_tail_BWC is None else grad_tail_BWC
    return grad_latent_BTX, grad_tail_BWC, grad_weights, None, None


_pallas.defvjp(_forward, _backward)


def _check(
    latent_BTX: jax.Array,
    tail_BWC: jax.Array,
    weights: CcaWeights,
    rotation: tuple[jax.Array, jax.Array],
    segments_BT: jax.Array | None,
) -> None:
    if latent_BTX.ndim != 3 or latent_BTX.dtype not in (jnp.float32, jnp.bfloat16):
        raise ArgumentError(
            f"the latent is {latent_BTX.dtype} {latent_BTX.shape}; it must be [B, T, X], float32 or bfloat16"
        )
    batch, time, _ = latent_BTX.shape
    channels = _check_weights(latent_BTX.shape[2], weights)
    width = weights.grouped_kernel_AJHH.shape[3]
    before = weights.depthwise_kernel_IC.shape[0] + weights.grouped_kernel_AJHH.shape[1] - 2
    if tail_BWC.shape != (batch, before, channels) or tail_BWC.dtype != latent_BTX.dtype:
        raise ArgumentError(
            f"the tail is {tail_BWC.dtype} {tail_BWC.shape}; with this latent and these taps it must be "
            f"{latent_BTX.dtype} {(batch, before, channels)}"
        )
    cos, sin = rotation
    if cos.shape != sin.shape or cos.ndim != 3 or cos.shape[:2] not in ((batch, time), (1, time)):
        raise ArgumentError(
            f"cosines are {cos.shape}, sines {sin.shape}; both must be [B, T, O] or [1, T, O], with "
            f"B, T = {batch}, {time}"
        )
    if 2 * cos.shape[2] > width:
        raise ArgumentError(f"{cos.shape[2]} pairs of channels are rotated; a head has {width} channels")
    if segments_BT is not None and segments_BT.shape != (batch, time):
        raise ArgumentError(
            f"segments are {segments_BT.shape}; with this latent they must be {(batch, time)}"
        )


def _check_weights(columns: int, weights: CcaWeights) -> int:
    """Checks the weights, and returns their number of channels, C."""
    grouped = weights.grouped_kernel_AJHH.shape
    if len(grouped) != 4 or grouped[2] != grouped[3] or grouped[0] * grouped[3] > columns:
        raise ArgumentError(
            f"the grouped kernel is {grouped}; it must be [A, J, H, H], with A*H = C at most the latent's "
            f"{columns} channels"
        )
    channels = grouped[0] * grouped[3]
    shapes = {
        "depthwise_kernel_IC": (weights.depthwise_kernel_IC.shape[0], channels),
        "depthwise_bias_C": (channels,),
        "grouped_bias_C": (channels,),
    }
    for name, shape in shapes.items():
        if getattr(weights, name).shape != shape:
            raise ArgumentError(
                f"{name} is {getattr(weights, name).shape}; with this latent it must be {shape}"
            )
    (num_keys,) = weights.temperature_K.shape
    if not num_keys or grouped[0] <= num_keys or grouped[0] % num_keys:
        raise ArgumentError(
            f"there are {grouped[0]} heads and {num_keys} temperatures; each key head has one, and the same "
            "number of query heads"
        )
    return channels
