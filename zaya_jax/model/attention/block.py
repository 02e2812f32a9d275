"""The attention block: queries, keys and values of a variant, softmax attention, and the output projection.

`VARIANTS` contains the variants of attention by the values of `ModelConfig.attention`.

Letters: B batch, T time, D model width, N query heads, K key/value heads, H head width, C = N*H.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.product import product
from zaya_jax.config import HYBRID_SLIDING, ExecutionConfig, ModelConfig
from zaya_jax.errors import UserError
from zaya_jax.model.attention.cca import (
    cca_logit_bound,
    cca_projection,
    declare_cca,
    empty_cca_state,
    join_projections,
)
from zaya_jax.model.attention.sequence_chunks import SharedSequences
from zaya_jax.model.rope import Rotation
from zaya_jax.model.weight_declaration import Declarer, WeightTree
from zaya_jax.pytree import pytree

QueriesKeysValues = Callable[..., tuple[jax.Array, jax.Array, jax.Array, Any]]


@pytree
class AttentionOperands:
    """Operands of softmax attention: rotated queries, rotated keys, and values."""

    q_BTNH: Float[Array, "*L B T N H"]
    k_BTKH: Float[Array, "*L B T K H"]
    v_BTKH: Float[Array, "*L B T K H"]
    window: Int[Array, "*L"]
    """Number of tokens that a query attends to; the largest integer for all."""


@dataclasses.dataclass(frozen=True)
class AttentionVariant:
    """A variant of attention: how queries, keys and values are computed.

    Attributes:
      declare: function that declares the weights of all layers, without the output projection.
      prepare: function that converts these weights, once for all layers, for `queries_keys_values`.
      queries_keys_values: function of (x_BTD, weights, state, rotation, segments_BT, *, implementation) that
        returns q [B, T, N, H], k and v [B, T, K, H] in the dtype of x, and the state after the chunk. If
        devices share sequences, it also gets `shared`, which provides the tokens before a chunk instead of
        the state. With right padding and a state, it also gets `num_new_B`.
      empty_state: function of (config, batch_size) that returns the state before the first token: a tree of
        arrays with a leading axis L, or () if there is no state.
      logit_bound: function of (config, weights) that returns an upper bound of all attention logits; None if
        they are unbounded.
    """

    declare: Callable[[Declarer], WeightTree]
    prepare: Callable[[Mapping], Mapping]
    queries_keys_values: QueriesKeysValues
    empty_state: Callable[[ModelConfig, int], Any]
    logit_bound: Callable[[ModelConfig, Mapping], jax.Array] | None = None


VARIANTS = {
    "cca": AttentionVariant(
        declare_cca, join_projections, cca_projection, empty_cca_state, logit_bound=cca_logit_bound
    )
}
"""Variants by the values of `ModelConfig.attention`."""


def variant_of(config: ModelConfig) -> AttentionVariant:
    """The attention variant of a model.

    Raises:
      UserError: if there is no variant of that name.
    """
    if config.attention not in VARIANTS:
        known = ", ".join(f'"{name}"' for name in VARIANTS)
        raise UserError(f'model.attention is "{config.attention}"; it must be one of {known}')
    return VARIANTS[config.attention]


def logit_bound(config: ModelConfig, params: Mapping) -> Float[Array, ""]:
    """Upper bound of all attention logits; infinite if the variant has none."""
    bound = variant_of(config).logit_bound
    return jnp.array(jnp.inf) if bound is None else bound(config, params["layers"]["attention"])


def queries_keys_values(
    config: ModelConfig,
    execution: ExecutionConfig,
    x_BTD: Float[Array, "B T D"],
    weights: Mapping,
    state: Any,
    rotation: Rotation,
    segments_BT: Int[Array, "B T"] | None,
    shared: SharedSequences | None = None,
    num_new_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"], Any]:
    """Computes rotated queries, rotated keys and values of a chunk, and the state after the chunk."""
    # Variants without a kernel ignore the implementation.
    options: dict[str, Any] = {"implementation": execution.implementation_of("cca")}
    if shared is not None:  # so that variants without a state need not accept it
        options["shared"] = shared
    if num_new_B is not None and jax.tree.leaves(state):  # likewise
        options["num_new_B"] = num_new_B
    variant = variant_of(config)
    return variant.queries_keys_values(x_BTD, weights, state, rotation, segments_BT, **options)


def attend_within(
    config: ModelConfig,
    execution: ExecutionConfig,
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    window: Int[Array, ""],
    segments_BT: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Causal softmax self-attention within the window and the document."""
    operands = q_BTNH, k_BTKH, v_BTKH
    # Their kernel reads and writes less than keeping them in the stacks of a loop over layers does, which
    # copies them into the stack and out of it.
    if execution.implementation_of("cca") != "pallas":
        operands = name_operands(*operands)
    out_BTNH, _ = flash_attention(
        *operands,
        # A window that is an array costs a comparison in every block, so it is only passed if needed.
        window=window if HYBRID_SLIDING in config.layer_types else None,
        query_segments_BT=segments_BT,
        key_segments_BS=segments_BT,
        implementation=execution.implementation_of("attention"),
    )
    return out_BTNH


def name_operands(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Names queries, keys and values for the rematerialization policies."""
    return tuple(checkpoint_name(x, KEPT) for x in operands)


def project_out(out_BTNH: Float[Array, "B T N H"], weights: Mapping) -> Float[Array, "B T D"]:
    """Projects the outputs of all heads to the model width."""
    batch, time, heads, width = out_BTNH.shape
    # Heads and channels are joined to one axis; with two, XLA would compute a batch of narrow products.
    kernel_CD = weights["o_proj"].reshape(heads * width, -1).astype(out_BTNH.dtype)
    return product(out_BTNH.reshape(-1, heads * width), kernel_CD).reshape(batch, time, -1)
