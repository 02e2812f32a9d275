"""Attention maps: attention probabilities of each head and layer, for analysis.

Letters: B batch, T queries, S keys (both the same tokens), N query heads, L layers, M selected layers.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention import attention_probabilities
from zaya_jax.errors import UserError
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
    """Computes attention probabilities by layer and head.

    They are computed from the queries and keys of the model's own forward pass, by the reference formula of
    attention. Each row sums to 1; padding attends to padding. There are N maps of T x T values per row and
    layer.

    Args:
      model: the model.
      variables: variables of the model.
      tokens_BT: token ids.
      positions_BT: positions for the rotary embedding; None counts from the start of each row.
      segments_BT: document ids of packed rows; None means one document per row.
      layers: indices of the selected layers, from 0; None for all.

    Returns:
      Probabilities, float32, of the selected layers in the given order.

    Raises:
      UserError: if a layer does not exist, or none is selected.
    """
    num_layers = model.config.num_hidden_layers
    chosen = tuple(range(num_layers)) if layers is None else tuple(layers)
    if not chosen:
        raise UserError("layers is empty; it must list at least one layer, or be None for all")
    for number in chosen:
        if not 0 <= number < num_layers:
            raise UserError(f"layers has {number}; the model has layers 0 to {num_layers - 1}")
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
    # The model's own forward pass, so that maps cannot diverge from what the model computes.
    hidden = residual_stream(model.config, model.execution, params, bias_LX, *inputs, keep_operands=True)
    operands = hidden.operands
    assert operands is not None, "keep_operands is true"
    # Computed after the scan, which only keeps operands (linear in T), and only for the selected layers.
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
