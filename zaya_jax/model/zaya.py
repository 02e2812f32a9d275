"""The network: embedding, a scan over layers of attention and experts, the tied head.

`Zaya` is a thin Linen shell that declares the weights; everything it computes is in the pure
functions below it and beside it.

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

from pallas_kernels.embedding import look_up
from pallas_kernels.product import InStack, own_matrix
from pallas_kernels.rms_norm import add_to_stream, residual_rms_norm, rms_norm
from zaya_jax.config import ExecutionConfig, ModelConfig
from zaya_jax.model import weights as weight_declarations
from zaya_jax.model.attention import AttentionOperands, attend_within, project_out, queries_keys_values
from zaya_jax.model.cache import Cache, Pool, attend_through_cache, num_new_tokens
from zaya_jax.model.experts import ExpertWeights, apply_experts, expert_weights
from zaya_jax.model.layer_input import LayerInput, adapted, in_stacks, layer_inputs, with_experts
from zaya_jax.model.remat import scan_layers
from zaya_jax.model.residual import residual_scaling
from zaya_jax.model.rope import Rotation, rotation_of_layer, rotations
from zaya_jax.model.router import RouterStats, Routing, route, router_stats
from zaya_jax.model.shared_attention import attend_across
from zaya_jax.model.shared_sequences import SharedSequences, share_sequences
from zaya_jax.parallel.context import from_chunks, to_chunks
from zaya_jax.parallel.node import experts_of_node
from zaya_jax.pytree import pytree

SKIP_BIAS = -1.0
"""Where the skip class's balancing bias starts, and in the released weights still is ([HF] `ZayaRouter`)."""


@pytree
class Output:
    """What the network makes of a batch."""

    logits_BTV: Float[Array, "B T V"]
    router: RouterStats
    cache: Cache | None


@pytree
class HiddenStates:
    """What the layers make of a batch."""

    x_BTD: Float[Array, "B T D"]
    router: RouterStats
    cache: Cache | None
    operands: AttentionOperands | None
    """Of all layers, where they are kept."""


class Zaya(nn.Module):
    """ZAYA1 as a frozen Linen module.

    `init` gives `{"params": ..., "router_bias": ...}`; the router biases take no gradient.

    Attributes:
      config: what the network is.
      execution: how it is computed.
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
        """Logits of the next token at every position.

        Args:
          tokens_BT: token numbers, 0..V-1.
          positions_BT: for the rotary embedding; None counts from the start of each row.
          segments_BT: documents of packed rows, numbered from 1; 0 is padding, at either end of a
            row. None is one document a row.
          cache: what came before, from `init_cache` or an earlier call. Rows are then one document
            each, padded on the left if at all; segments of a later chunk go on with that padding. A cache
            whose `padding` is "right" takes chunks with padding behind their tokens instead.
          logits_to_keep: how many of the last positions get logits; None for all.

        Returns:
          Logits in float32, router statistics, and the cache behind the chunk if one came in.
        """
        declared = weight_declarations.declare(self.config)
        params = {
            name: self.param(name, lambda key, tree=tree, name=name: _initialise(tree, key, name))
            for name, tree in declared.items()
        }
        bias = self.variable("router_bias", "layers", initial_router_bias, self.config)
        inputs = tokens_BT, positions_BT, segments_BT, cache
        return forward(
            self.config, self.execution, params, bias.value, *inputs, logits_to_keep=logits_to_keep
        )


def _initialise(tree: Any, key: jax.Array, name: str) -> dict:
    return weight_declarations.initialise(tree, key, name)


def initial_router_bias(config: ModelConfig) -> Float[Array, "L X"]:
    """Zero for every expert, `SKIP_BIAS` for the skip class."""
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
    """`Zaya.__call__` as a function of its weights; the inputs are those of `hidden_states`."""
    hidden = hidden_states(config, execution, params, router_bias_LX, *inputs)
    x_BTD = hidden.x_BTD if logits_to_keep is None else hidden.x_BTD[:, -logits_to_keep:]
    return Output(head(config, params, x_BTD), hidden.router, hidden.cache)


@dataclasses.dataclass(frozen=True)
class ExpertSharing:
    """How a device that stores some experts of each layer comes by all (`zaya_jax.parallel.node`).

    Attributes:
      fetch: its own experts of a layer, of this node's rows of them, which stand in their place then; from
        the other nodes, a layer ahead. None where it has them.
    """

    fetch: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]] | None = None


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
    """All of the network but its head, for a loss that never has all logits.

    The arguments are those of `Zaya.__call__`; x_BTD is what the tied head turns into logits, in the type of
    products. In training the weights may have scaled adapters beside them (`zaya_jax.model.adapters`), and
    `is_shared` tokens are this device's chunks of sequences (`zaya_jax.model.shared_sequence`). With a
    `sharing` of experts it has but its own of them.
    """
    shared = None
    if is_shared:
        assert positions_BT is not None, "a chunk does not tell where it stands"
        assert segments_BT is not None, "documents tell which tokens there are"
        # Rows of a chunk each: all but attention and what feeds it works token by token, and sees no change.
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
    """The stream behind the last layer, float32, before the final norm; if asked, all attention operands.

    Where sequences are `shared`, each row is a chunk of one.
    """
    if cache is not None and cache.padding == "left" and segments_BT is not None:
        cache = _with_padding(cache, segments_BT)
    tables = rotations(config, _positions(tokens_BT, positions_BT, cache))
    # Once for all layers: sines and cosines of a long row cost more than the rotation.
    context = Context(config, execution, tables, segments_BT, cache, keep_operands, shared, sharing)
    x_BTD = embed(params["embedding"], tokens_BT)
    return HiddenStates(*layers(context, params, router_bias_LX, x_BTD))


def embed(weights: Mapping, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The stream's first value, float32: the embedding through one affine, bias first ([HF] `ZayaModel`)."""
    return (look_up(weights["table"], tokens_BT) + weights["bias"]) * weights["scale"]


def head(config: ModelConfig, params: Mapping, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """The tied head; logits in float32."""
    # Logits stay in float32: a softmax over 262,272 of them, rounded to 8 bits, would tie many tokens.
    table_VD = params["embedding"]["table"].astype(x_BTD.dtype)
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, table_VD, preferred_element_type=jnp.float32)
    return logits_BTV + params["head"]["bias"] if config.lm_head_bias else logits_BTV


@dataclasses.dataclass(frozen=True)
class Context:
    """What all layers share: how they are made, and where their tokens stand."""

    config: ModelConfig
    execution: ExecutionConfig
    rotations: tuple[Rotation, ...]
    segments_BT: jax.Array | None
    cache: Cache | None
    keep_operands: bool = False
    shared: SharedSequences | None = None
    """Where the rest of each row's sequence is; None where a row is all of it."""
    sharing: ExpertSharing | None = None
    """Where the other experts of each layer are; None where the device has all."""


@dataclasses.dataclass(frozen=True)
class LayerOutput:
    """What a layer makes of a chunk of tokens.

    Attributes:
      x_BTD: the stream.
      routing: the router's answer.
      operands: of the attention.
      state: of the attention, behind the chunk.
      pool: of the cache.
    """

    x_BTD: jax.Array
    routing: Routing
    operands: AttentionOperands
    state: Any
    pool: Pool | None


def layers(
    context: Context, params: Mapping, router_bias_LX: jax.Array, x_BTD: jax.Array
) -> tuple[jax.Array, RouterStats, Cache | None, AttentionOperands | None]:
    """All layers as one scan over their stacked weights."""
    config, execution, cache = context.config, context.execution, context.cache
    batch, time, _ = x_BTD.shape
    inputs = layer_inputs(config, params, router_bias_LX, batch, cache)
    # Float32 through all layers: an average over 40 of them would lose its small terms in bfloat16.
    state_BTR = jnp.zeros((batch, time, config.router_hidden_size), jnp.float32)

    fetch = None if context.sharing is None else context.sharing.fetch
    rows_L = inputs.weights["experts"]

    def step(carry, layer):
        (x_BTD, state_BTR, pool, experts), (layer, next_rows) = carry, layer
        # Asked for before anything is computed, and needed by the next layer: it has all of this one's time.
        fetched = None if fetch is None else fetch(next_rows)
        # The stacks come in as they are, not sliced: an operation that reads them in place copies nothing.
        layer = adapted(config, layer, inputs) if layer.adapters else in_stacks(layer, inputs)
        layer = layer if fetch is None else with_experts(layer, experts)
        out = decoder_layer(context, layer, x_BTD, state_BTR, pool)
        # A result of the scan exists for all layers at once: not asked for, it must not be one.
        operands = out.operands if context.keep_operands else None
        # In training nobody asks, and a backward pass would have one more result to go through.
        stats = router_stats(out.routing, context.segments_BT, keep_probabilities=cache is not None)
        return (out.x_BTD, out.routing.state_BTR, out.pool, fetched), (stats, out.state, operands)

    first, next_rows_L = None, None
    if fetch is not None:
        first = fetch(jax.tree.map(lambda x: x[0], rows_L))
        # Behind the last layer the first one's come again, which nobody reads: one more of all that come.
        next_rows_L = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), rows_L)
    carry = x_BTD, state_BTR, None if cache is None else cache.pool, first
    # A backward pass is all that either helps, and through a cache there is none.
    remat, unroll = (execution.remat, not execution.scan_layers) if cache is None else ("none", False)
    scanned = scan_layers(step, carry, (inputs, next_rows_L), remat=remat, unroll=unroll)
    (x_BTD, _, pool, _), (router, state, operands) = scanned
    if cache is not None and pool is not None:
        num_new_B = num_new_tokens(cache, context.segments_BT)
        length = cache.length + (time if num_new_B is None else num_new_B)
        cache = dataclasses.replace(cache, pool=pool, state=state, length=length, empty=False)
    return x_BTD, router, cache, operands


def decoder_layer(
    context: Context, layer: LayerInput, x_BTD: jax.Array, state_BTR: jax.Array, pool: Pool | None
) -> LayerOutput:
    """One layer: attention, then experts, each added to the stream through its residual scaling."""
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
        out_BTD, routing = _experts(context, layer, normed_BTD, state_BTR)
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
        out_BTNH = attend_across(*shared, q_BTNH, k_BTKH, v_BTKH, layer.is_sliding, context.shared)
    elif pool is None or context.cache is None or layer.slots is None:
        out_BTNH = attend_within(*shared, q_BTNH, k_BTKH, v_BTKH, layer.window, context.segments_BT)
    else:
        where = pool, layer.slots, context.cache
        out_BTNH, pool = attend_through_cache(*shared, q_BTNH, k_BTKH, v_BTKH, *where, context.segments_BT)
    operands = AttentionOperands(q_BTNH, k_BTKH, v_BTKH, layer.window)
    return project_out(out_BTNH, weights), operands, state, pool


def _experts(
    context: Context, layer: LayerInput, x_BTD: jax.Array, state_BTR: jax.Array
) -> tuple[jax.Array, Routing]:
    config, weights = context.config, layer.weights
    routing = route(
        x_BTD,
        state_BTR,
        weights["router"],
        layer.eda_scale_R,
        layer.router_bias_X,
        eps=config.rms_norm_eps,
    )
    if context.segments_BT is not None:  # padding skips, and costs nothing
        experts_BT = jnp.where(context.segments_BT == 0, config.num_experts, routing.experts_BT)
        routing = dataclasses.replace(routing, experts_BT=experts_BT)
    out_PD = apply_experts(
        x_BTD.reshape(-1, x_BTD.shape[-1]),
        routing.experts_BT.reshape(-1),
        routing.weights_BT.reshape(-1),
        _weights_of_experts(context, weights["experts"], x_BTD.dtype),
        implementation=context.execution.implementation_of("experts"),
    )
    out_BTD = out_PD.reshape(x_BTD.shape)
    if config.skip_class == "identity":  # ZAYA1-base ([Primus]); the 8B's skipped token gets nothing
        skipped_BTD = x_BTD * routing.weights_BT[:, :, None].astype(x_BTD.dtype)
        out_BTD = jnp.where((routing.experts_BT == config.num_experts)[:, :, None], skipped_BTD, out_BTD)
    return out_BTD, routing


def _weights_of_experts(context: Context, weights: Mapping, dtype: Any) -> ExpertWeights:
    if context.sharing is not None:
        own = jax.tree.map(own_matrix, weights, is_leaf=lambda x: isinstance(x, InStack))
        weights = {name: experts_of_node(x, context.config.num_experts) for name, x in own.items()}
    return expert_weights(weights, dtype)


def _with_padding(cache: Cache, segments_BT: jax.Array) -> Cache:
    """Notes where each row's first token is, if it was not in an earlier chunk."""
    padding_B = jnp.cumprod(segments_BT == 0, axis=1).sum(axis=1)  # what is padding up to here
    # Beside a long prompt the padding of a short one may fill whole chunks.
    first_B = jnp.where(cache.first_B == cache.length, cache.length + padding_B, cache.first_B)
    return dataclasses.replace(cache, first_B=first_B.astype(jnp.int32))


def _positions(tokens_BT: jax.Array, positions_BT: jax.Array | None, cache: Cache | None) -> jax.Array:
    if positions_BT is not None:
        return positions_BT
    index_1T = jnp.arange(tokens_BT.shape[1])[None]
    if cache is None:
        return index_1T
    # Padding has no position of its own; a negative one would turn its keys by an angle that none has.
    return jnp.maximum(cache.length[..., None] + index_1T - cache.first_B[:, None], 0)
