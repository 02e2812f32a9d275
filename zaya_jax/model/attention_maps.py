"""Attention maps: who looks at whom, to be looked at in turn.

Letters: B batch, T queries, S keys (both the same tokens), N query heads, L layers, M layers that are shown.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention import attention_probabilities
from zaya_jax.model.zaya import Zaya, residual_stream


def attention_maps(
    model: Zaya,
    variables: Mapping,
    tokens_BT: Int[Array | np.ndarray, "B T"],
    positions_BT: Int[Array | np.ndarray, "B T"] | None = None,
    segments_BT: Int[Array | np.ndarray, "B T"] | None = None,
    *,
    layers: Sequence[int] | None = None,
) -> Float[Array, "M B N T S"]:
    """How much each token takes of each earlier one, by layer and head.

    They are of the queries and keys that the network itself computes, by the formula that its attention is
    specified by: times the values they are what it hands on. Each row sums to 1; padding looks at padding.
    A map has T x T numbers, and there are N for each row and layer.

    Args:
      model: the network.
      variables: its weights.
      tokens_BT: as `Zaya.__call__` has them, with the two that follow.
      positions_BT: for the rotary embedding.
      segments_BT: documents of packed rows.
      layers: numbers of those that are shown, from 0; None for all.

    Returns:
      Probabilities, float32, of the layers in the order in which they were asked for.

    Raises:
      ValueError: for a layer that is not there, or for none at all.
    """
    num_layers = model.config.num_hidden_layers
    chosen = tuple(range(num_layers)) if layers is None else tuple(layers)
    if not chosen:
        raise ValueError("layers is empty; it must name one layer at least, or be None for all")
    for number in chosen:
        if not 0 <= number < num_layers:
            raise ValueError(f"layers has {number}; the network's are numbered from 0 to {num_layers - 1}")
    return _maps(model, variables, tokens_BT, positions_BT, segments_BT, chosen)


@functools.partial(jax.jit, static_argnames=("model", "chosen"))
def _maps(
    model: Zaya,
    variables: Mapping,
    tokens_BT: jax.Array,
    positions_BT: jax.Array | None,
    segments_BT: jax.Array | None,
    chosen: tuple[int, ...],
) -> jax.Array:
    params, bias_LX = variables["params"], variables["router_bias"]["layers"]
    inputs = tokens_BT, positions_BT, segments_BT
    # The network's own pass: queries that were made here a second time would some day be others.
    hidden = residual_stream(model.config, model.execution, params, bias_LX, *inputs, keep_operands=True)
    operands = hidden.operands
    assert operands is not None, "they were asked for"
    # Behind the scan, which keeps what is linear in T: of layers that are not shown no map is made.
    maps = [
        attention_probabilities(
            operands.q_BTNH[number],
            operands.k_BTKH[number],
            window=operands.window[number],
            query_segments_BT=segments_BT,
            key_segments_BS=segments_BT,
        )
        for number in chosen
    ]
    return jnp.stack(maps)
