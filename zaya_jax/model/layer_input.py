"""What each layer reads of its own: the scan over layers slices it, or leaves it in the stack of all.

Letters: L layers, B batch, R router width, X router classes.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from zaya_jax.config import HYBRID_SLIDING, ExecutionConfig, ModelConfig
from zaya_jax.model.cache import Cache, LayerSlots, empty_cca_state, layer_slots
from zaya_jax.model.cca import CcaState, join_projections
from zaya_jax.model.products import InStack
from zaya_jax.pytree import pytree


@pytree
class LayerInput:
    """What differs from layer to layer; stacked along L it is what the scan runs over."""

    number: Int[Array, "*L"]
    weights: dict
    """Of the layer."""
    eda_scale_R: Float[Array, "*L R"]
    """Zeros in the first layer, which has no state to average in."""
    router_bias_X: Float[Array, "*L X"]
    cca: CcaState
    is_sliding: Int[Array, "*L"]
    window: Int[Array, "*L"]
    """Tokens a query sees; the largest integer where that is all."""
    slots: LayerSlots | None


def layer_inputs(
    config: ModelConfig, params: Mapping, router_bias_LX: jax.Array, batch_size: int, cache: Cache | None
) -> LayerInput:
    """Stacks what differs from layer to layer."""
    num_layers = config.num_hidden_layers
    router = dict(params["layers"]["router"])
    zeros_1R = jnp.zeros((1, config.router_hidden_size), jnp.float32)
    later_MR = router.pop("eda_scale", jnp.zeros((num_layers - 1, config.router_hidden_size), jnp.float32))
    sliding_L = np.array([kind == HYBRID_SLIDING for kind in config.layer_types], np.int32)
    window_L = np.where(sliding_L, config.sliding_window or 0, np.iinfo(np.int32).max)
    cca = cache.cca if cache is not None else empty_cca_state(config, batch_size)
    attention = join_projections(params["layers"]["attention"])
    weights = dict(params["layers"]) | {"router": router, "attention": attention}
    return LayerInput(
        number=jnp.arange(num_layers),
        weights=weights,
        eda_scale_R=jnp.concatenate([zeros_1R, later_MR]),
        router_bias_X=router_bias_LX,
        cca=cca,
        is_sliding=jnp.asarray(sliding_L),
        window=jnp.asarray(window_L, jnp.int32),
        slots=None if cache is None else layer_slots(config, cache.max_length),
    )


def left_in_stacks(stacks: Mapping, layer: LayerInput) -> dict:
    """A layer's weights, with the matrices of attention and router `InStack`: for decoding, without gradient.

    Args:
      stacks: `LayerInput.weights` of all layers.
      layer: the layer's own.
    """

    def leave(path: tuple, stack: jax.Array, own: jax.Array) -> jax.Array | InStack:
        is_in_product = own.ndim >= 2 and path[0].key != "conv_depthwise"
        return InStack(stack, layer.number) if is_in_product else own

    names = ("attention", "router")
    left = {name: jax.tree.map_with_path(leave, stacks[name], layer.weights[name]) for name in names}
    return layer.weights | left


def stacked_experts(execution: ExecutionConfig, params: Mapping, *, decodes: bool = False) -> dict | None:
    """The experts of all layers in the type of products, for layers that read their own in place.

    Without gradient: each layer's goes to its slice, and no sum of whole stacks is made. A kernel takes
    the slice, but where it decodes: the compiled program, from which `zaya plan` counts the bytes that
    a step moves, does not tell that a kernel reads only a part of what it is given.
    """
    if execution.experts_implementation == "pallas" and not decodes:
        return None
    experts = params["layers"]["experts"]
    return {name: jax.lax.stop_gradient(x).astype(execution.dtype) for name, x in experts.items()}
