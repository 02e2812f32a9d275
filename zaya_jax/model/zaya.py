"""The model: embedding, a scan over layers of attention and experts, and the tied head.

`Zaya` is a thin Linen module that declares the weights; all computation is in pure functions.

Letters: B batch, T time, D model width, V vocabulary, L layers, R router width, X router classes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.embedding import look_up, product_with_rows
from pallas_kernels.product import StackedMatrix, own_matrix
from pallas_kernels.rms_norm import add_to_stream, residual_rms_norm, rms_norm
from zaya_jax.config import ExecutionConfig, ModelConfig
from zaya_jax.model import weights as weight_declarations
from zaya_jax.model.attention.block import AttentionOperands, attend_within, project_out, queries_keys_values
from zaya_jax.model.attention.context_parallel import context_parallel_attention
from zaya_jax.model.attention.sequence_chunks import SharedSequences, share_sequences
from zaya_jax.model.cache import (
    Cache,
    Pool,
    attend_through_cache,
    num_new_tokens,
    state_of_layer,
    with_dtype,
    with_state_of_layer,
)
from zaya_jax.model.experts import ExpertWeights, apply_experts, expert_weights
from zaya_jax.model.layer_input import LayerInput, adapted, in_stacks, layer_inputs, with_experts
from zaya_jax.model.remat import KEEP_PRODUCTS, scan_layers, scan_prefetched
from zaya_jax.model.residual import residual_scaling
from zaya_jax.model.rope import Rotation, rotation_of_layer, rotations
from zaya_jax.model.router import RouterStats, Routing, route, router_stats
from zaya_jax.parallel.context import from_chunks, to_chunks
from zaya_jax.parallel.node import experts_of_node
from zaya_jax.pytree import pytree

SKIP_BIAS = -1.0
"""Initial router bias of the skip class, unchanged in the released weights ([HF] `ZayaRouter`)."""


@pytree
class Output:
    """Output of the model for a batch."""

    logits_BTV: Float[Array, "B T V"]
    router: RouterStats
    cache: Cache | None


@pytree
class HiddenStates:
    """Output of the layers for a batch."""

    x_BTD: Float[Array, "B T D"]
    router: RouterStats
    cache: Cache | None
    operands: AttentionOperands | None
    """Attention operands of all layers; None if they were not requested."""


class Zaya(nn.Module):
    """ZAYA1 as a frozen Linen module.

    `init` returns `{"params": ..., "router_bias": ...}`; router biases have no gradient.

    Attributes:
      config: architecture.
      execution: how the model is computed.
    """

    config: ModelConfig
    execution: ExecutionConfig = ExecutionConfig()

    @nn.compact
    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"] | None = None,
        segments_BT: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        *,
        logits_to_keep: int | None = None,
    ) -> Output:
        """Computes the logits of the next token at every position.

        Args:
          tokens_BT: token ids, 0..V-1.
          positions_BT: positions for the rotary embedding; None counts from the start of each row.
          segments_BT: document ids of packed rows, from 1; 0 is padding, at either end of a row. None means
            one document per row.
          cache: cache of earlier tokens, from `init_cache` or an earlier call. Each row is then one document,
            with optional padding on the left, which may extend into later chunks. If `cache.padding` is
            "right", padding follows the tokens of each chunk instead.
          logits_to_keep: number of last positions to compute logits for; None for all.

        Returns:
          Logits in float32, router statistics, and the cache after the chunk if a cache was given.
        """
        declared = weight_declarations.declare(self.config)
        params = {
            name: self.param(name, lambda key, tree=tree, name=name: _initialize(tree, key, name))
            for name, tree in declared.items()
        }
        bias = self.variable("router_bias", "layers", initial_router_bias, self.config)
        inputs = tokens_BT, positions_BT, segments_BT, cache
        return forward(
            self.config, self.execution, params, bias.value, *inputs, logits_to_keep=logits_to_keep
        )


def _initialize(tree: Any, key: jax.Array, name: str) -> dict:
    return weight_declarations.initialize(tree, key, name)


def initial_router_bias(config: ModelConfig) -> Float[Array, "L X"]:
    """Initial router biases: zero for experts, `SKIP_BIAS` for the skip class."""
    shape = (config.num_hidden_layers, config.num_router_classes)
    return jnp.zeros(shape, jnp.float32).at[:, -1].set(SKIP_BIAS)


def forward(
    config: ModelConfig,
    execution: ExecutionConfig,
    params: Mapping,
    router_bias_LX: Float[Array, "L X"],
    *inputs: Any,
    logits_to_keep: int | None = None,
) -> Output:
    """`Zaya.__call__` as a function of its weights; `inputs` are the arguments of `hidden_states`."""
    hidden = hidden_states(config, execution, params, router_bias_LX, *inputs)
    x_BTD = hidden.x_BTD if logits_to_keep is None else hidden.x_BTD[:, -logits_to_keep:]
    return Output(head(config, params, x_BTD), hidden.router, hidden.cache)


@dataclasses.dataclass(frozen=True)
class ExpertSharing:
    """How a device that stores some experts of each layer gathers all of them (`zaya_jax.parallel.node`).

    Attributes:
      fetch: function that gathers the device's experts of some layers from all nodes, given this node's rows
        of them; called one message ahead. None if the device stores its experts in full.
      layers_per_message: number of these layers, a divisor of the number of layers.
    """

    fetch: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]] | None = None
    layers_per_message: int = 1


def hidden_states(
    config: ModelConfig,
    execution: ExecutionConfig,
    params: Mapping,
    router_bias_LX: Float[Array, "L X"],
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"] | None = None,
    segments_BT: Int[Array, "B T"] | None = None,
    cache: Cache | None = None,
    *,
    is_shared: bool = False,
    sharing: ExpertSharing | None = None,
) -> HiddenStates:
    """Computes everything except the head, for a loss that never stores all logits.

    The arguments are those of `Zaya.__call__`. The result x_BTD is the input of the tied head, in the type of
    matrix products. In training, `params` may contain scaled adapters (`zaya_jax.model.adapters`).

    Args:
      config: architecture.
      execution: how the model is computed.
      params: weights.
      router_bias_LX: router biases.
      tokens_BT: token ids.
      positions_BT: positions for the rotary embedding.
      segments_BT: document ids; 0 is padding.
      cache: cache of earlier tokens.
      is_shared: whether the tokens are this device's chunks of sequences that several devices share
        (`zaya_jax.model.attention.sequence_chunks`).
      sharing: how to gather experts; None if the device stores all of them.
    """
    shared = None
    if is_shared:
        assert positions_BT is not None, "a chunk has no implicit positions"
        assert segments_BT is not None, "chunks need segments to mark padding"
        # One row per chunk. Only attention and the convolutions before it depend on other tokens.
        tokens_BT, positions_BT, segments_BT = map(to_chunks, (tokens_BT, positions_BT, segments_BT))
        shared = share_sequences(segments_BT)
    inputs = tokens_BT, positions_BT, segments_BT, cache
    stream = functools.partial(residual_stream, shared=shared, sharing=sharing)
    hidden = stream(config, execution, params, router_bias_LX, *inputs)
    x_BTD = rms_norm(hidden.x_BTD, params["final_norm"]["scale"], eps=config.rms_norm_eps)
    if is_shared:
        x_BTD = from_chunks(x_BTD)
    return dataclasses.replace(hidden, x_BTD=x_BTD.astype(execution.dtype))


def residual_stream(
    config: ModelConfig,
    execution: ExecutionConfig,
    params: Mapping,
    router_bias_LX: Float[Array, "L X"],
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"] | None = None,
    segments_BT: Int[Array, "B T"] | None = None,
    cache: Cache | None = None,
    *,
    keep_operands: bool = False,
    shared: SharedSequences | None = None,
    sharing: ExpertSharing | None = None,
) -> HiddenStates:
    """The residual stream after the last layer, float32, before the final norm.

    With `keep_operands` the result includes the attention operands of all layers. With `shared` sequences,
    each row is a chunk of one.
    """
    if cache is not None:
        cache = with_dtype(cache, execution.dtype)
    if cache is not None and cache.padding == "left" and segments_BT is not None:
        cache = _with_padding(cache, segments_BT)
    tables = rotations(config, _positions(tokens_BT, positions_BT, cache))
    # Computed once for all layers: sines and cosines of a long row cost more than the rotation.
    context = Context(config, execution, tables, segments_BT, cache, keep_operands, shared, sharing)
    x_BTD = embed(params["embedding"], tokens_BT)
    return HiddenStates(*layers(context, params, router_bias_LX, x_BTD))


def embed(weights: Mapping, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Embeds tokens, float32: table lookup, then bias, then scale ([HF] `ZayaModel`)."""
    return (look_up(weights["table"], tokens_BT) + weights["bias"]) * weights["scale"]


def head(config: ModelConfig, params: Mapping, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Computes the logits of the tied head in float32."""
    # float32: with 262,272 logits rounded to 8 bits, many tokens would have equal probabilities.
    logits_BTV = product_with_rows(x_BTD, params["embedding"]["table"])
    return logits_BTV + params["head"]["bias"] if config.lm_head_bias else logits_BTV


@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs that all layers share."""

    config: ModelConfig
    execution: ExecutionConfig
    rotations: tuple[Rotation, ...]
    segments_BT: jax.Array | None
    cache: Cache | None
    keep_operands: bool = False
    shared: SharedSequences | None = None
    """Sequences that the rows are chunks of; None if rows are whole sequences."""
    sharing: ExpertSharing | None = None
    """How to gather experts; None if the device stores all of them."""


@dataclasses.dataclass(frozen=True)
class LayerOutput:
    """Output of a layer for a chunk of tokens.

    Attributes:
      x_BTD: residual stream.
      routing: result of the router.
      operands: operands of the attention.
      state: state of the attention variant after the chunk.
      pool: keys and values of the cache; None without a cache.
    """

    x_BTD: jax.Array
    routing: Routing
    operands: AttentionOperands
    state: Any
    pool: Pool | None


def layers(
    context: Context, params: Mapping, router_bias_LX: jax.Array, x_BTD: jax.Array
) -> tuple[jax.Array, RouterStats, Cache | None, AttentionOperands | None]:
    """Applies all layers by a scan over their stacked weights."""
    config, execution, cache = context.config, context.execution, context.cache
    batch, time, _ = x_BTD.shape
    inputs = layer_inputs(config, params, router_bias_LX, batch, cache)
    # float32 through all layers: an average over 40 layers would lose small terms in bfloat16.
    state_BTR = jnp.zeros((batch, time, config.router_hidden_size), jnp.float32)

    sharing = context.sharing or ExpertSharing()

    def step(carry, layer):
        (x_BTD, state_BTR, pool, state_L), (layer, experts) = carry, layer
        if cache is not None:
            layer = dataclasses.replace(layer, state=state_of_layer(state_L, layer.number))
        # Operations get the stacks of all layers, not slices, so that they can read in place without copies.
        if layer.adapters:
            layer = adapted(config, layer, inputs, execution.dtype)
        else:
            layer = in_stacks(layer, inputs, has_gradient=cache is None)
        layer = layer if experts is None else with_experts(layer, experts)
        out = decoder_layer(context, layer, x_BTD, state_BTR, pool)
        # Results of a scan are stored for all layers, so operands are only a result on request.
        operands = out.operands if context.keep_operands else None
        # Probabilities are not used in training, where they would be one more result to differentiate.
        stats = router_stats(out.routing, context.segments_BT, keep_probabilities=cache is not None)
        if cache is not None:
            state_L = with_state_of_layer(state_L, out.state, layer.number)
        return (out.x_BTD, out.routing.state_BTR, out.pool, state_L), (stats, operands)

    # Both only help the backward pass, and there is none with a cache.
    remat, unroll = (execution.remat, not execution.scan_layers) if cache is None else ("none", False)
    pool, state = (None, None) if cache is None else (cache.pool, cache.state)
    carry = x_BTD, state_BTR, pool, state
    if sharing.fetch is None:
        scanned = scan_layers(step, carry, (inputs, None), remat=remat, unroll=unroll)
    else:
        rows_L, fetch, size = inputs.weights["experts"], sharing.fetch, sharing.layers_per_message
        scanned = scan_prefetched(step, carry, inputs, rows_L, fetch=fetch, size=size, remat=remat)
    (x_BTD, _, pool, state), (router, operands) = scanned
    if cache is not None and pool is not None:
        num_new_B = num_new_tokens(cache, context.segments_BT)
        length = cache.length + (time if num_new_B is None else num_new_B)
        cache = dataclasses.replace(cache, pool=pool, state=state, length=length, empty=False)
    return x_BTD, router, cache, operands


def decoder_layer(
    context: Context, layer: LayerInput, x_BTD: jax.Array, state_BTR: jax.Array, pool: Pool | None
) -> LayerOutput:
    """Applies one layer: attention, then experts, each added to the stream with residual scaling."""
    config, execution, weights = context.config, context.execution, layer.weights
    with jax.named_scope("attention"):
        normed_BTD = rms_norm(x_BTD, weights["attention_norm"]["scale"], eps=config.rms_norm_eps)
        out_BTD, operands, state, pool = _attention(context, layer, normed_BTD.astype(execution.dtype), pool)
        x_BTD, normed_BTD = residual_rms_norm(
            out_BTD,
            x_BTD,
            residual_scaling(weights["attention_residual"]),
            weights["moe_norm"]["scale"],
            eps=config.rms_norm_eps,
            implementation=execution.implementation_of("residual"),
        )
    with jax.named_scope("experts"):
        out_BTD, routing = routed_experts(context, layer, normed_BTD, state_BTR)
        x_BTD = add_to_stream(out_BTD, x_BTD, residual_scaling(weights["moe_residual"]))
    return LayerOutput(x_BTD, routing, operands, state, pool)


def _attention(
    context: Context, layer: LayerInput, x_BTD: jax.Array, pool: Pool | None
) -> tuple[jax.Array, AttentionOperands, Any, Pool | None]:
    shared, weights = (context.config, context.execution), layer.weights["attention"]
    rotation = rotation_of_layer(context.rotations, layer.is_sliding)
    num_new_B = num_new_tokens(context.cache, context.segments_BT)
    q_BTNH, k_BTKH, v_BTKH, state = queries_keys_values(
        *shared, x_BTD, weights, layer.state, rotation, context.segments_BT, context.shared, num_new_B
    )
    if context.shared is not None:
        out_BTNH = context_parallel_attention(
            *shared, q_BTNH, k_BTKH, v_BTKH, layer.is_sliding, context.shared
        )
    elif pool is None or context.cache is None or layer.slots is None:
        out_BTNH = attend_within(*shared, q_BTNH, k_BTKH, v_BTKH, layer.window, context.segments_BT)
    else:
        where = pool, layer.slots, context.cache
        out_BTNH, pool = attend_through_cache(*shared, q_BTNH, k_BTKH, v_BTKH, *where, context.segments_BT)
    operands = AttentionOperands(q_BTNH, k_BTKH, v_BTKH, layer.window)
    return project_out(out_BTNH, weights), operands, state, pool


def routed_experts(
    context: Context, layer: LayerInput, x_BTD: jax.Array, state_BTR: jax.Array
) -> tuple[jax.Array, Routing]:
    """The expert block of a layer: router, selected experts, and the skip class."""
    config, weights = context.config, layer.weights
    routing = route(
        x_BTD,
        state_BTR,
        weights["router"],
        layer.eda_scale_R,
        layer.router_bias_X,
        eps=config.rms_norm_eps,
    )
    if (
        context.segments_BT is not None
    ):  # padding selects the skip class, so that no product is computed for it
        experts_BT = jnp.where(context.segments_BT == 0, config.num_experts, routing.experts_BT)
        routing = dataclasses.replace(routing, experts_BT=experts_BT)
    out_PD = apply_experts(
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        routing.experts_BT.reshape(-1),
        routing.weights_BT.reshape(-1),
        _weights_of_experts(context, weights["experts"], x_BTD.dtype),
        is_kept=context.execution.remat in KEEP_PRODUCTS,
        implementation=context.execution.implementation_of("experts"),
    )
    out_BTD = out_PD.reshape(x_BTD.shape)
    if (
        config.skip_class == "identity"
    ):  # ZAYA1-base ([Primus]); in the 8B model the output of the skip class is zero
        skipped_BTD = x_BTD * routing.weights_BT[:, :, None].astype(x_BTD.dtype)
        out_BTD = jnp.where((routing.experts_BT == config.num_experts)[:, :, None], skipped_BTD, out_BTD)
    return out_BTD, routing


def _weights_of_experts(context: Context, weights: Mapping, dtype: Any) -> ExpertWeights:
    if context.sharing is not None:
        own = jax.tree.map(own_matrix, weights, is_leaf=lambda x: isinstance(x, StackedMatrix))
        weights = {name: experts_of_node(x, context.config.num_experts) for name, x in own.items()}
    return expert_weights(weights, dtype)


def _with_padding(cache: Cache, segments_BT: jax.Array) -> Cache:
    """Records the index of each row's first token, unless it was in an earlier chunk."""
    padding_B = jnp.cumprod(segments_BT == 0, axis=1).sum(
        axis=1
    )  # number of leading padding tokens in this chunk
    # In a batch with a long prompt, the padding of a short one may fill whole chunks.
    first_B = jnp.where(cache.first_B == cache.length, cache.length + padding_B, cache.first_B)
    return dataclasses.replace(cache, first_B=first_B.astype(jnp.int32))


def _positions(tokens_BT: jax.Array, positions_BT: jax.Array | None, cache: Cache | None) -> jax.Array:
    if positions_BT is not None:
        return positions_BT
    index_1T = jnp.arange(tokens_BT.shape[1])[None]
    if cache is None:
        return index_1T
    # Padding gets position 0 instead of a negative one.
    return jnp.maximum(cache.length[..., None] + index_1T - cache.first_B[:, None], 0)
