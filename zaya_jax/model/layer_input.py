"""What each layer reads of its own: the scan over layers slices it, or leaves it in the stack of all.

Letters: L layers, B batch, R router width, X router classes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.product import InStack, in_stack
from zaya_jax.config import HYBRID_SLIDING, ModelConfig
from zaya_jax.model.adapters import ADAPTERS, changed_matrices_of_layer, replaced
from zaya_jax.model.attention import variant_of
from zaya_jax.model.cache import Cache, LayerSlots, layer_slots
from zaya_jax.pytree import pytree


@pytree
class LayerInput:
    """What differs from layer to layer; stacked along L it is what the scan runs over."""

    number: Int[Array, "*L"]
    weights: dict
    """Of the layer."""
    adapters: dict
    """Of the layer, scaled; empty where there are none."""
    eda_scale_R: Float[Array, "*L R"]
    """Zeros in the first layer, which has no state to average in."""
    router_bias_X: Float[Array, "*L X"]
    state: Any
    """Of the attention variant, before the chunk."""
    is_sliding: Int[Array, "*L"]
    window: Int[Array, "*L"]
    """Tokens a query sees; the largest integer where that is all."""
    slots: LayerSlots | None


def layer_inputs(
    config: ModelConfig, params: Mapping, router_bias_LX: jax.Array, batch_size: int, cache: Cache | None
) -> LayerInput:
    """Stacks what differs from layer to layer."""
    num_layers, variant = config.num_hidden_layers, variant_of(config)
    router = dict(params["layers"]["router"])
    # [ZAYA1-8B] eq. 2 averages over depth from the second layer on. Zeros for the first, and one compiled
    # layer serves all; they are no weight, or an optimiser would move them.
    zeros_1R = jnp.zeros((1, config.router_hidden_size), jnp.float32)
    later_MR = router.pop("eda_scale", jnp.zeros((num_layers - 1, config.router_hidden_size), jnp.float32))
    sliding_L = np.array([kind == HYBRID_SLIDING for kind in config.layer_types], np.int32)
    # A full layer is a sliding one whose window nothing reaches.
    window_L = np.where(sliding_L, config.sliding_window or 0, np.iinfo(np.int32).max)
    attention, adapters = params["layers"]["attention"], params.get(ADAPTERS, {})
    if not adapters:  # else each layer does it, behind its changes
        attention = variant.prepare(attention)
    return LayerInput(
        number=jnp.arange(num_layers),
        weights=dict(params["layers"]) | {"router": router, "attention": attention},
        adapters=adapters,
        eda_scale_R=jnp.concatenate([zeros_1R, later_MR]),
        router_bias_X=router_bias_LX,
        state=cache.state if cache is not None else variant.empty_state(config, batch_size),
        is_sliding=jnp.asarray(sliding_L),
        window=jnp.asarray(window_L, jnp.int32),
        slots=None if cache is None else layer_slots(config, cache.max_length, cache.ranks),
    )


def in_stacks(layer: LayerInput, layers: LayerInput) -> LayerInput:
    """A layer's input, whose matrices also know their place among those of all layers."""

    # Vectors are read whole, and added or multiplied where they are used: a copy of one costs nothing.
    def place(own: jax.Array, stack: jax.Array) -> jax.Array | InStack:
        return in_stack(own, stack, layer.number) if own.ndim >= 2 else own

    return dataclasses.replace(layer, weights=jax.tree.map(place, layer.weights, layers.weights))


def with_experts(layer: LayerInput, experts: Mapping[str, jax.Array]) -> LayerInput:
    """A layer's input with other experts than those in the stack."""
    return dataclasses.replace(layer, weights=layer.weights | {"experts": dict(experts)})


def adapted(config: ModelConfig, layer: LayerInput, layers: LayerInput) -> LayerInput:
    """`in_stacks` of a layer with adapters: the matrices that they change are its own, in no stack."""
    # Before they are joined: what was joined for all layers would have to be all layers' sums.
    changed = changed_matrices_of_layer(config, layer.weights, layer.adapters)
    attention = replaced(layer.weights, changed)["attention"]
    weights = replaced(in_stacks(layer, layers).weights, changed)
    weights["attention"] = variant_of(config).prepare(attention)
    return dataclasses.replace(layer, weights=weights)
