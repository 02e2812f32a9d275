"""The attention block: a variant's queries, keys and values, what they attend to, the output projection.

A variant of attention is a name in `VARIANTS`, which `ModelConfig.attention` takes.

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
from zaya_jax.model.cca import (
    cca_logit_bound,
    cca_projection,
    declare_cca,
    empty_cca_state,
    join_projections,
)
from zaya_jax.model.rope import Rotation
from zaya_jax.model.shared_sequences import SharedSequences
from zaya_jax.model.weight import Declarer, WeightTree
from zaya_jax.pytree import pytree

QueriesKeysValues = Callable[..., tuple[jax.Array, jax.Array, jax.Array, Any]]


@pytree
class AttentionOperands:
    """What softmax attention works on: queries and keys as the variant and the rotation leave them."""

    q_BTNH: Float[Array, "*L B T N H"]
    k_BTKH: Float[Array, "*L B T K H"]
    v_BTKH: Float[Array, "*L B T K H"]
    window: Int[Array, "*L"]
    """Tokens that a query sees; the largest integer where that is all."""


@dataclasses.dataclass(frozen=True)
class AttentionVariant:
    """How queries, keys and values come about; what follows is the same for all.

    Attributes:
      declare: its weights of all layers, but for the output projection.
      prepare: makes of these, once for all layers, what `queries_keys_values` reads.
      queries_keys_values: of (x_BTD, weights, state, rotation, segments_BT, *, implementation): q
        [B, T, N, H], k and v [B, T, K, H] in the dtype of x, and the state behind the chunk. Where devices
        share sequences there is also `shared`, which has the tokens before a chunk in place of the state;
        where chunks are padded on the right, `num_new_B`, if there is a state.
      empty_state: of (config, batch_size): what the tokens before the first left behind, with a leading
        axis L; a tree of arrays, () where there is nothing.
      logit_bound: of (config, weights): what no logit of any layer exceeds; None where nothing bounds them.
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
"""By the names that `ModelConfig.attention` takes."""


def variant_of(config: ModelConfig) -> AttentionVariant:
    """The network's kind of attention.

    Raises:
      ValueError: if there is none of that name.
    """
    if config.attention not in VARIANTS:
        known = ", ".join(f'"{name}"' for name in VARIANTS)
        raise ValueError(f'model.attention is "{config.attention}"; it must be {known}')
    return VARIANTS[config.attention]


def logit_bound(config: ModelConfig, params: Mapping) -> Float[Array, ""]:
    """What no attention logit exceeds; infinite where the variant bounds none."""
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
    """Those of a chunk of tokens, rotated, and the variant's state behind the chunk."""
    # A variant with a kernel of its own has it by this field; one without takes no notice.
    options: dict[str, Any] = {"implementation": execution.implementation_of("cca")}
    if shared is not None:  # one that looks at no earlier token need not know of it
        options["shared"] = shared
    if num_new_B is not None and jax.tree.leaves(state):  # nor need it know of padding behind a chunk
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
    """Causal softmax attention of sequences to themselves, within the window and the document."""
    out_BTNH, _ = flash_attention(
        *name_operands(q_BTNH, k_BTKH, v_BTKH),
        # A window of data costs a comparison with it in every block: not where no layer has one.
        window=window if HYBRID_SLIDING in config.layer_types else None,
        query_segments_BT=segments_BT,
        key_segments_BS=segments_BT,
        implementation=execution.implementation_of("attention"),
    )
    return out_BTNH


def name_operands(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys and values of this device's tokens, as policies of rematerialisation keep them."""
    return tuple(checkpoint_name(x, KEPT) for x in operands)


def project_out(out_BTNH: Float[Array, "B T N H"], weights: Mapping) -> Float[Array, "B T D"]:
    """All heads' outputs through one matrix, back to the model's width."""
    batch, time, heads, width = out_BTNH.shape
    # Heads and their channels are one axis to the product: two would make a batch of narrow ones of it.
    kernel_CD = weights["o_proj"].reshape(heads * width, -1).astype(out_BTNH.dtype)
    return product(out_BTNH.reshape(-1, heads * width), kernel_CD).reshape(batch, time, -1)
