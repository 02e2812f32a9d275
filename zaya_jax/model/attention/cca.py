"""Compressed convolutional attention: queries, keys and values from a narrow, mixed latent.

Source: [CCA] section II-B and Listing 1; the temperature is linear ([ZAYA1-8B] appendix C).
Letters: B batch, T time, L layers, D model width, N query heads, K key/value heads, A = N + K heads,
H head width, C = A*H latent channels, U = K*H/2 half of the value channels, I and J taps of the two
convolutions, W = I + J - 2 earlier tokens that they need.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.cca import CcaWeights, cca, segments_with_history, taps_over_time
from pallas_kernels.fusion import concatenate
from pallas_kernels.product import Matrix, own_matrix, product
from zaya_jax.config import ModelConfig
from zaya_jax.model.attention.sequence_chunks import SharedSequences
from zaya_jax.model.rope import Rotation
from zaya_jax.model.weight_declaration import Declarer, WeightTree
from zaya_jax.pytree import pytree


@pytree
class CcaState:
    """State of CCA after the tokens before a chunk; zeros before the first token."""

    tail_BWC: Float[Array, "*L B W C"]
    """Latent queries and keys of the last W tokens, before the convolutions."""
    delayed_BU: Float[Array, "*L B U"]
    """Half of the value channels of the last token, which the next token uses."""


def empty_cca_state(config: ModelConfig, batch_size: int) -> CcaState:
    """The state before the first token, for all layers: zeros with a leading axis L.

    It is float32 regardless of the type of the cache, because rounding errors would accumulate in the
    convolutions.
    """
    heads, width, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    latent = (config.num_attention_heads + heads) * width
    return CcaState(
        tail_BWC=jnp.zeros((layers, batch_size, config.conv_tail, latent), jnp.float32),
        delayed_BU=jnp.zeros((layers, batch_size, heads * width // 2), jnp.float32),
    )


def declare_cca(declare: Declarer) -> WeightTree:
    """Declares the weights of CCA of all layers, without the output projection."""
    return {
        "q_proj": declare.normal("LDNH", ("D", "NH")),
        "k_proj": declare.normal("LDKH", ("D", "KH")),
        "v_proj_current": declare.normal("LDU", ("D", "U")),
        "v_proj_delayed": declare.normal("LDU", ("D", "U")),
        "conv_depthwise": {"kernel": declare.normal("LIC"), "bias": declare.constant("LC", 0.0)},
        "conv_grouped": {"kernel": declare.normal("LAJHH"), "bias": declare.constant("LC", 0.0)},
        "temperature": declare.constant("LK", 1.0),
    }


def cca_logit_bound(config: ModelConfig, weights: Mapping) -> Float[Array, ""]:
    """Upper bound of all attention logits ([ZAYA1-8B] appendix C)."""
    # Queries and keys have norm sqrt(H), keys are multiplied by the temperature, and logits by 1 / sqrt(H).
    return jnp.max(jnp.abs(weights["temperature"])) * config.head_dim**0.5


def join_projections(weights: Mapping) -> dict:
    """Concatenates the projections of queries, keys and both halves of the values.

    They are narrow, and one product costs less than four. It is done for all layers at once, outside of loops
    over layers or tokens.

    Args:
      weights: declared weights of "attention", of one layer or with the axis L.

    Returns:
      The weights with "projections" [*L, D, C + 2*U] instead of the four matrices.
    """
    rest = dict(weights)
    names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    depth = weights["v_proj_current"].ndim - 1  # number of axes before the columns
    parts = [rest.pop(name) for name in names]
    flat = [part.reshape(*part.shape[:depth], -1) for part in parts]
    return rest | {"projections": concatenate(flat, -1)}


def cca_projection(
    x_BTD: Float[Array, "B T D"],
    weights: Mapping,
    state: CcaState,
    rotation: Rotation,
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    implementation: str | None = None,
    shared: SharedSequences | None = None,
    num_new_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"], CcaState]:
    """Computes rotated queries and keys, and values, for a chunk of tokens.

    Args:
      x_BTD: normalized hidden states.
      weights: weights of the block's "attention" after `join_projections`, without the layer axis.
      state: state after the tokens before the chunk.
      rotation: cosines and sines of the rotary embedding.
      segments_BT: document ids. Documents are independent, and segment 0 is padding, which counts as zeros.
        None means one document. The first document of the chunk continues `state`.
      implementation: implementation of `pallas_kernels.cca.cca`, which has the equations after the
        projection.
      shared: sequences that the rows are chunks of. Other devices then provide the latents of the W preceding
        tokens and half of the values of one, instead of `state` ([CCA] section V).
      num_new_B: number of tokens of each row with right padding; None without. The state is the one after
        them.

    Returns:
      q, k and v in the dtype of x, and the state after the chunk.
    """
    if segments_BT is not None:
        # Left padding must not change the state, which is zeros before the first token.
        x_BTD = _without_padding(x_BTD, segments_BT, by_product=implementation == "pallas")
    projected_BTX, current_BTU, delayed_BTU = _project(x_BTD, weights["projections"], state)
    latent_BTC = projected_BTX[:, :, : state.tail_BWC.shape[2]]
    if shared is not None:
        tail_BWC = shared.before(latent_BTC, state.tail_BWC.shape[1])
        state = CcaState(tail_BWC, shared.before(delayed_BTU, 1)[:, 0])
    v_BTU2, delayed_BU = _value_shift(current_BTU, delayed_BTU, state.delayed_BU, segments_BT, num_new_B)
    tail_BWC = state.tail_BWC.astype(latent_BTC.dtype)
    q_BTNH, k_BTKH = cca(
        projected_BTX,  # not split, because the kernel reads the columns in place
        tail_BWC,
        _convolutions(weights),
        rotation,
        segments_BT=segments_BT,
        implementation=implementation,
    )
    # If the chunk is shorter than the tail, part of the tail is from before the chunk.
    history_BSC = jnp.concatenate([tail_BWC, latent_BTC], axis=1)
    tail_BWC = _last(history_BSC, state.tail_BWC.shape[1], num_new_B).astype(state.tail_BWC.dtype)
    return q_BTNH, k_BTKH, v_BTU2.reshape(k_BTKH.shape), CcaState(tail_BWC, delayed_BU)


def _without_padding(x_BTD: jax.Array, segments_BT: jax.Array, *, by_product: bool) -> jax.Array:
    """Zeros where a token is padding.

    Args:
      x_BTD: normalized hidden states.
      segments_BT: document ids; 0 is padding.
      by_product: whether to multiply by 0 or 1, which XLA fuses with the norm on a GPU. The condition of a
        select it expands to the size of x, and every layer reads it and as many zeros.
    """
    if by_product:
        return x_BTD * (segments_BT != 0).astype(x_BTD.dtype)[:, :, None]
    return jnp.where((segments_BT == 0)[:, :, None], 0, x_BTD)


def _last(history_BSX: jax.Array, size: int, num_new_B: jax.Array | None) -> jax.Array:
    """The last `size` tokens of `size` earlier ones and a chunk without its right padding."""
    if num_new_B is None:
        return history_BSX[:, history_BSX.shape[1] - size :]
    # A row without new tokens keeps its state bitwise.
    return jax.vmap(lambda row_SX, first: lax.dynamic_slice_in_dim(row_SX, first, size))(
        history_BSX, num_new_B
    )


def _convolutions(weights: Mapping) -> CcaWeights:
    depthwise, grouped = weights["conv_depthwise"], weights["conv_grouped"]
    kernel_IC = own_matrix(depthwise["kernel"])  # depthwise: it is not an operand of a matrix product
    return CcaWeights(
        kernel_IC, depthwise["bias"], grouped["kernel"], grouped["bias"], weights["temperature"]
    )


def _project(
    x_BTD: jax.Array, projections: Matrix, state: CcaState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The four projections of [CCA] joined, latent queries and keys first, and both halves of the values."""
    x_PD = x_BTD.reshape(-1, x_BTD.shape[2])
    # Without a bias, padding is zero in the latent as well.
    out_PX = product(x_PD, projections.astype(x_BTD.dtype))
    out_BTX = out_PX.reshape(*x_BTD.shape[:2], -1)
    columns, half = out_BTX.shape[2], state.delayed_BU.shape[-1]
    _, current_BTU, delayed_BTU = jnp.split(out_BTX, [columns - 2 * half, columns - half], axis=-1)
    return out_BTX, current_BTU, delayed_BTU


def _value_shift(
    current_BTU: jax.Array,
    delayed_BTU: jax.Array,
    before_BU: jax.Array,
    segments_BT: jax.Array | None,
    num_new_B: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Values [B, T, 2*U]: half of the channels from this token, half from the previous one."""
    # [CCA] value shift: half of a token's value is computed from the previous token, without extra products.
    history_BSU = jnp.concatenate([before_BU[:, None].astype(delayed_BTU.dtype), delayed_BTU], axis=1)
    segments_BS = segments_with_history(segments_BT, 1)
    shifted_BTU, _ = taps_over_time(history_BSU, 2, segments_BS, fill=jnp.zeros((), delayed_BTU.dtype))
    delayed_BU = _last(history_BSU, 1, num_new_B)[:, 0].astype(before_BU.dtype)
    return jnp.concatenate([current_BTU, shifted_BTU], axis=-1), delayed_BU
