"""Inputs of a layer, which the scan over layers slices, or leaves in the stack of all layers.

Letters: L layers, B batch, R router width, X router classes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.fusion import entry_in_loop
from pallas_kernels.product import StackedMatrix, in_stack
from zaya_jax.config import HYBRID_SLIDING, ModelConfig
from zaya_jax.model.adapters import ADAPTERS, changed_matrices_of_layer, replaced
from zaya_jax.model.attention.block import variant_of
from zaya_jax.model.cache import Cache, LayerSlots, layer_slots
from zaya_jax.model.frozen_base import dequantized
from zaya_jax.pytree import pytree


@pytree
class LayerInput:
    """Inputs that differ between layers; stacked along L, they are what the scan iterates over."""

    number: Int[Array, "*L"]
    weights: dict
    """Weights of the layer."""
    adapters: dict
    """Scaled adapters of the layer; empty if there are none."""
    eda_scale_R: Float[Array, "*L R"]
    """Scale of the previous router state; zeros in the first layer, which has none."""
    router_bias_X: Float[Array, "*L X"]
    state: Any
    """State of the attention variant before the chunk; None if a cache has it."""
    is_sliding: Int[Array, "*L"]
    window: Int[Array, "*L"]
    """Number of tokens that a query attends to; the largest integer for all."""
    slots: LayerSlots | None


def layer_inputs(
    config: ModelConfig, params: Mapping, router_bias_LX: jax.Array, batch_size: int, cache: Cache | None
) -> LayerInput:
    """Stacks the inputs that differ between layers."""
    num_layers, variant = config.num_hidden_layers, variant_of(config)
    router = dict(params["layers"]["router"])
    # [ZAYA1-8B] eq. 2 averages over depth from the second layer on. With zeros for the first layer, all
    # layers share one compiled program. The zeros are not a weight, because the optimizer would update them.
    zeros_1R = jnp.zeros((1, config.router_hidden_size), jnp.float32)
    later_MR = router.pop("eda_scale", jnp.zeros((num_layers - 1, config.router_hidden_size), jnp.float32))
    sliding_L = np.array([kind == HYBRID_SLIDING for kind in config.layer_types], np.int32)
    # A full layer is a sliding one with an unlimited window.
    window_L = np.where(sliding_L, config.sliding_window or 0, np.iinfo(np.int32).max)
    attention, adapters = params["layers"]["attention"], params.get(ADAPTERS, {})
    if not adapters:  # otherwise each layer prepares its weights after merging the adapters
        attention = variant.prepare(attention)
    return LayerInput(
        number=jnp.arange(num_layers),
        weights=dict(params["layers"]) | {"router": router, "attention": attention},
        adapters=adapters,
        eda_scale_R=jnp.concatenate([zeros_1R, later_MR]),
        router_bias_X=router_bias_LX,
        state=None if cache is not None else variant.empty_state(config, batch_size),
        is_sliding=jnp.asarray(sliding_L),
        window=jnp.asarray(window_L, jnp.int32),
        slots=None if cache is None else layer_slots(config, cache.max_length, cache.ranks),
    )


def in_stacks(layer: LayerInput, layers: LayerInput, *, has_gradient: bool = True) -> LayerInput:
    """Inputs of a layer, with matrices as references into the stacks of all layers.

    Args:
      layer: inputs of the layer, from the loop over layers.
      layers: inputs of all layers.
      has_gradient: whether the program differentiates.
    """

    # Vectors are sliced: copies of them are cheap.
    def place(own: jax.Array, stack: jax.Array) -> jax.Array | StackedMatrix:
        if own.ndim < 2:
            return own
        return in_stack(own if has_gradient else entry_in_loop(stack, layer.number), stack, layer.number)

    return dataclasses.replace(layer, weights=jax.tree.map(place, layer.weights, layers.weights))


def with_experts(layer: LayerInput, experts: Mapping[str, jax.Array]) -> LayerInput:
    """Inputs of a layer with experts that replace those in the stack."""
    return dataclasses.replace(layer, weights=layer.weights | {"experts": dict(experts)})


def adapted(config: ModelConfig, layer: LayerInput, layers: LayerInput, dtype: DTypeLike) -> LayerInput:
    """`in_stacks` for a layer with adapters: adapted or quantized matrices are separate arrays of `dtype`."""
    # Merged before `prepare`, which would otherwise need the merged weights of all layers at once.
    own = dequantized(layer.weights, dtype)
    changed = changed_matrices_of_layer(config, own, layer.adapters)
    attention = replaced(own, changed)["attention"]
    in_place = in_stacks(layer, layers).weights
    if own["experts"]["down_proj"] is not layer.weights["experts"]["down_proj"]:
        in_place = {**in_place, "experts": own["experts"]}
    weights = replaced(in_place, changed)
    weights["attention"] = variant_of(config).prepare(attention)
    return dataclasses.replace(layer, weights=weights)
