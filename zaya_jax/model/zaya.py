"""The network: embedding, a scan over layers of CCA and experts, the tied head.

`Zaya` is a thin Linen shell that declares the weights; everything it computes is in the pure
functions below it and beside it.

Letters: B batch, T time, D model width, V vocabulary, L layers, R router width, X router classes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from zaya_jax.config import HYBRID, HYBRID_SLIDING, ExecutionConfig, ModelConfig
from zaya_jax.model import weights as weight_declarations
from zaya_jax.model.attention import attend_within
from zaya_jax.model.blockwise_attention import attend_blockwise
from zaya_jax.model.cache import (
    Cache,
    Pool,
    attend_through_cache,
    sizes_of_layers,
)
from zaya_jax.model.cca import CcaState, cca_projection
from zaya_jax.model.experts import apply_experts, expert_counts
from zaya_jax.model.implementations import resolve_implementations
from zaya_jax.model.kernels import attend_flash, merge_and_norm, project_and_rotate
from zaya_jax.model.layer_input import LayerInput, layer_inputs, left_in_stacks, stacked_experts
from zaya_jax.model.norms import rms_norm
from zaya_jax.model.products import product
from zaya_jax.model.remat import STREAM, scan_layers
from zaya_jax.model.residual import merge_residual
from zaya_jax.model.rope import Rotation, apply_rope, rope_table
from zaya_jax.model.router import Routing, route
from zaya_jax.pytree import pytree

BLOCKWISE_FROM = 1024
"""Tokens of a sequence from which on blockwise attention is taken: it was 1.75 times as fast at 1,024,
forward and backward on 2 cores of an AMD EPYC, and slower at 512; its memory matters only beyond."""

SKIP_BIAS = -1.0
"""Where the skip class's balancing bias starts, and in the released weights still is (facts 3.3)."""


@pytree
class RouterStats:
    """What the routers of all layers did with a batch. Padding does not count."""

    counts_LX: Int[Array, "*L X"]
    """Tokens of each class; the skip class is the last."""
    entropy_L: Float[Array, "*L"]
    """Mean entropy of a token's probabilities, in nats."""
    probability_L: Float[Array, "*L"]
    """Mean probability of a token's class: what its expert's output is weighted with."""
    experts_LBT: Int[Array, "*L B T"]
    """The chosen class of each token; padding is shown as skipped."""


@pytree
class Output:
    """What the network makes of a batch."""

    logits_BTV: Float[Array, "B T V"]
    router: RouterStats
    cache: Cache | None


class Zaya(nn.Module):
    """ZAYA1 as a frozen Linen module.

    `init` gives `{"params": ..., "router_bias": ...}`; the router biases take no gradient.

    Attributes:
      config: the network's.
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
            each, padded on the left if at all.
          logits_to_keep: how many of the last positions get logits; None for all.

        Returns:
          Logits in float32, router statistics, and the cache behind the chunk if one came in.

        Raises:
          ValueError: if segments come with a cache that is not empty.
        """
        declared = weight_declarations.declare(self.config)
        params = {
            name: self.param(name, lambda key, tree=tree, name=name: _initialise(tree, key, name))
            for name, tree in declared.items()
        }
        bias = self.variable("router_bias", "layers", initial_router_bias, self.config)
        return forward(
            self.config,
            self.execution,
            params,
            bias.value,
            tokens_BT,
            positions_BT,
            segments_BT,
            cache,
            logits_to_keep=logits_to_keep,
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
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"] | None = None,
    segments_BT: Int[Array, "B T"] | None = None,
    cache: Cache | None = None,
    *,
    logits_to_keep: int | None = None,
) -> Output:
    """`Zaya.__call__` as a function of its weights."""
    if cache is not None:
        if segments_BT is not None and not cache.empty:
            raise ValueError("segments came with a cache that is not empty; only a first chunk may be padded")
        cache = _with_padding(cache, segments_BT)
    positions_BT = _positions(tokens_BT, positions_BT, cache)
    x_BTD = embed(params["embedding"], tokens_BT)
    x_BTD, router, cache = layers(
        config, execution, params, router_bias_LX, x_BTD, positions_BT, segments_BT, cache
    )
    if logits_to_keep is not None:
        x_BTD = x_BTD[:, -logits_to_keep:]
    return Output(head(config, execution, params, x_BTD), router, cache)


def hidden_states(
    config: ModelConfig,
    execution: ExecutionConfig,
    params: Mapping,
    router_bias_LX: Float[Array, "L X"],
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"],
) -> tuple[Float[Array, "B T D"], RouterStats]:
    """What the tied head turns into logits, for a loss that never has all of them."""
    x_BTD = embed(params["embedding"], tokens_BT)
    x_BTD, router, _ = layers(
        config, execution, params, router_bias_LX, x_BTD, positions_BT, segments_BT, None
    )
    return final_norm(config, execution, params, x_BTD), router


def embed(weights: Mapping, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The stream's first value, float32: the embedding through one affine, bias first (facts 1.4)."""
    return (_look_up(weights["table"], tokens_BT) + weights["bias"]) * weights["scale"]


@jax.custom_vjp
def _look_up(table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of a table. Its gradient adds up in float32, whatever the table's type.

    In bfloat16 the gradient of a frequent token would stop growing after some hundred additions.
    """
    return table_VD[tokens_BT].astype(jnp.float32)


def _look_up_forward(table_VD, tokens_BT):
    return _look_up(table_VD, tokens_BT), (jnp.zeros((table_VD.shape[0], 0), table_VD.dtype), tokens_BT)


def _look_up_backward(saved, grad_BTD):
    empty_V0, tokens_BT = saved
    zeros_VD = jnp.zeros((empty_V0.shape[0], grad_BTD.shape[-1]), jnp.float32)
    return zeros_VD.at[tokens_BT].add(grad_BTD).astype(empty_V0.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def final_norm(
    config: ModelConfig, execution: ExecutionConfig, params: Mapping, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """The stream as the head takes it, in the type of products."""
    return rms_norm(x_BTD, params["final_norm"]["scale"], eps=config.rms_norm_eps).astype(execution.dtype)


def head(
    config: ModelConfig, execution: ExecutionConfig, params: Mapping, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """Final norm and tied head; logits in float32."""
    x_BTD = final_norm(config, execution, params, x_BTD)
    table_VD = params["embedding"]["table"].astype(execution.dtype)
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, table_VD, preferred_element_type=jnp.float32)
    return logits_BTV + params["head"]["bias"] if config.lm_head_bias else logits_BTV


def layers(
    config: ModelConfig,
    execution: ExecutionConfig,
    params: Mapping,
    router_bias_LX: Float[Array, "L X"],
    x_BTD: Float[Array, "B T D"],
    positions_BT: Int[Array, "b T"],
    segments_BT: Int[Array, "B T"] | None,
    cache: Cache | None,
) -> tuple[Float[Array, "B T D"], RouterStats, Cache | None]:
    """All layers as one scan over their stacked weights."""
    execution = resolve_implementations(execution, config)
    batch, time, _ = x_BTD.shape
    state_BTR = jnp.zeros((batch, time, config.router_hidden_size), jnp.float32)
    context = _Context(
        config,
        execution,
        _rotations(config, positions_BT),
        segments_BT,
        cache,
        stacked_experts(execution, params, decodes=cache is not None),
    )
    pool = None if cache is None else cache.pool

    def step(carry, layer):
        x_BTD, state_BTR, pool = carry
        if decodes_in_jax:
            layer = dataclasses.replace(layer, weights=left_in_stacks(inputs.weights, layer))
        x_BTD, routing, cca, pool = decoder_layer(context, layer, x_BTD, state_BTR, pool)
        return (x_BTD, routing.state_BTR, pool), (_router_stats(routing, segments_BT), cca)

    inputs = layer_inputs(config, params, router_bias_LX, batch, cache)
    decodes_in_jax = cache is not None and execution.cca_implementation != "pallas"  # a kernel takes arrays
    # A backward pass is all that either helps, and through a cache there is none.
    remat, unroll = (execution.remat, not execution.scan_layers) if cache is None else ("none", False)
    carry = x_BTD, state_BTR, pool
    (x_BTD, _, pool), (router, cca) = scan_layers(step, carry, inputs, remat=remat, unroll=unroll)
    if cache is not None and pool is not None:
        cache = dataclasses.replace(cache, pool=pool, cca=cca, length=cache.length + time, empty=False)
    return x_BTD, router, cache


@dataclasses.dataclass(frozen=True)
class _Context:
    """What all layers share."""

    config: ModelConfig
    execution: ExecutionConfig
    """With every implementation named."""
    rotations: tuple[Rotation, ...]
    segments_BT: jax.Array | None
    cache: Cache | None
    experts: Mapping | None
    """Of all layers: a scan would copy all experts of a layer to reach them. None: from the slices."""


def decoder_layer(
    context: _Context, layer: LayerInput, x_BTD: jax.Array, state_BTR: jax.Array, pool: Pool | None
) -> tuple[jax.Array, Routing, CcaState, Pool | None]:
    """One layer: attention, then experts, each added to the stream through its residual scaling.

    Returns:
      The stream, the router's answer, CCA's state behind the chunk, and the pool of keys and values.
    """
    config, execution, weights = context.config, context.execution, layer.weights
    with jax.named_scope("attention"):
        normed_BTD = rms_norm(x_BTD, weights["attention_norm"]["scale"], eps=config.rms_norm_eps)
        out_BTD, cca, pool = _attention(context, layer, normed_BTD.astype(execution.dtype), pool)
        x_BTD, normed_BTD = _merge_and_norm(config, execution, out_BTD, x_BTD, weights)
    with jax.named_scope("experts"):
        out_BTD, routing = _experts(context, layer, normed_BTD, state_BTR)
        x_BTD = merge_residual(out_BTD, x_BTD, weights["moe_residual"])
    return x_BTD, routing, cca, pool


def _merge_and_norm(
    config: ModelConfig, execution: ExecutionConfig, out_BTD: jax.Array, x_BTD: jax.Array, weights: Mapping
) -> tuple[jax.Array, jax.Array]:
    """The stream behind attention, and what the experts read of it."""
    scaling, scale_D = weights["attention_residual"], weights["moe_norm"]["scale"]
    if execution.residual_implementation == "pallas":
        x_BTD, normed_BTD = merge_and_norm(out_BTD, x_BTD, scaling, scale_D, eps=config.rms_norm_eps)
        return checkpoint_name(x_BTD, STREAM), normed_BTD
    x_BTD = checkpoint_name(merge_residual(out_BTD, x_BTD, scaling), STREAM)
    return x_BTD, rms_norm(x_BTD, scale_D, eps=config.rms_norm_eps).astype(execution.dtype)


def _attention(
    context: _Context, layer: LayerInput, x_BTD: jax.Array, pool: Pool | None
) -> tuple[jax.Array, CcaState, Pool | None]:
    config, execution, weights = context.config, context.execution, layer.weights["attention"]
    q_BTNH, k_BTKH, v_BTKH, cca = _queries_keys_values(context, layer, x_BTD)
    if pool is None or context.cache is None or layer.slots is None:
        window = layer.window if HYBRID_SLIDING in config.layer_types else None
        attend_chunk = ATTENTION[_form_of_attention(execution, x_BTD.shape[1])]
        out_BTNH = attend_chunk(q_BTNH, k_BTKH, v_BTKH, window=window, segments_BT=context.segments_BT)
    else:
        sizes = tuple(sorted(set(sizes_of_layers(config, context.cache.max_length))))
        out_BTNH, pool = attend_through_cache(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            pool,
            layer.slots,
            context.cache,
            sizes=sizes,
            segments_BT=context.segments_BT,
            implementation=_named(execution.decode_implementation),
        )
    kernel_CD = weights["o_proj"].reshape(-1, x_BTD.shape[2]).astype(execution.dtype)
    out_PD = product(out_BTNH.reshape(-1, kernel_CD.shape[0]), kernel_CD)
    return out_PD.reshape(x_BTD.shape), cca, pool


def _queries_keys_values(
    context: _Context, layer: LayerInput, x_BTD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, CcaState]:
    execution, weights = context.execution, layer.weights["attention"]
    rotation = _rotation_of(context.rotations, layer)
    if execution.cca_implementation == "pallas":
        return project_and_rotate(x_BTD, weights, layer.cca, rotation, context.segments_BT)
    q_BTNH, k_BTKH, v_BTKH, cca = cca_projection(x_BTD, weights, layer.cca, context.segments_BT)
    q_BTNH, k_BTKH = (apply_rope(x, rotation).astype(execution.dtype) for x in (q_BTNH, k_BTKH))
    return q_BTNH, k_BTKH, v_BTKH, cca


ATTENTION = {"full": attend_within, "blockwise": attend_blockwise, "pallas": attend_flash}
"""By the names that `ExecutionConfig.attention_implementation` has, but for "xla"."""


def _form_of_attention(execution: ExecutionConfig, time: int) -> str:
    name = _named(execution.attention_implementation)
    if name == "xla":
        return "blockwise" if time >= BLOCKWISE_FROM else "full"
    return name


def _named(implementation: str | None) -> str:
    assert implementation is not None, "resolve_implementations names all"
    return implementation


def _experts(
    context: _Context, layer: LayerInput, x_BTD: jax.Array, state_BTR: jax.Array
) -> tuple[jax.Array, Routing]:
    config = context.config
    routing = route(
        x_BTD,
        state_BTR,
        layer.weights["router"],
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
        layer.weights["experts"],
        stacked=context.experts,
        layer=None if context.experts is None else layer.number,
        implementation=context.execution.experts_implementation,
    )
    out_BTD = out_PD.reshape(x_BTD.shape)
    if config.skip_class == "identity":
        skipped_BTD = x_BTD * routing.weights_BT[:, :, None].astype(x_BTD.dtype)
        out_BTD = jnp.where((routing.experts_BT == config.num_experts)[:, :, None], skipped_BTD, out_BTD)
    return out_BTD, routing


def _router_stats(routing: Routing, segments_BT: jax.Array | None) -> RouterStats:
    """Of one layer: without the letter L."""
    classes = routing.probs_BTX.shape[-1]
    log_probs_BTX = jnp.log(jnp.maximum(routing.probs_BTX, jnp.finfo(jnp.float32).tiny))
    entropy_BT = -jnp.sum(routing.probs_BTX * log_probs_BTX, axis=-1)
    counts_X = expert_counts(routing.experts_BT.reshape(-1), classes)
    if segments_BT is None:
        return RouterStats(counts_X, entropy_BT.mean(), routing.weights_BT.mean(), routing.experts_BT)
    is_token_BT = segments_BT != 0
    padding = jnp.sum(~is_token_BT, dtype=jnp.int32)
    num_tokens = jnp.maximum(jnp.sum(is_token_BT), 1)
    entropy = jnp.sum(entropy_BT * is_token_BT) / num_tokens
    probability = jnp.sum(routing.weights_BT * is_token_BT) / num_tokens
    return RouterStats(counts_X.at[-1].add(-padding), entropy, probability, routing.experts_BT)


def _rotations(config: ModelConfig, positions_BT: jax.Array) -> tuple[Rotation, ...]:
    """A table for each kind of layer that there is, "hybrid" first."""
    thetas = {HYBRID: config.rope_theta, HYBRID_SLIDING: config.sliding_rope_theta}
    return tuple(
        rope_table(positions_BT, theta=theta, rotary_dim=config.rotary_dim)
        for kind, theta in thetas.items()
        if kind in config.layer_types
    )


def _rotation_of(rotations: tuple[Rotation, ...], layer: LayerInput) -> Rotation:
    if len(rotations) == 1:
        return rotations[0]
    return jax.tree.map(lambda full, sliding: jnp.where(layer.is_sliding, sliding, full), *rotations)


def _with_padding(cache: Cache, segments_BT: jax.Array | None) -> Cache:
    """Notes where each row's first token is."""
    if segments_BT is None:
        return cache
    return dataclasses.replace(cache, first_B=jnp.argmax(segments_BT != 0, axis=1).astype(jnp.int32))


def _positions(tokens_BT: jax.Array, positions_BT: jax.Array | None, cache: Cache | None) -> jax.Array:
    if positions_BT is not None:
        return positions_BT
    index_1T = jnp.arange(tokens_BT.shape[1])[None]
    if cache is None:
        return index_1T
    return jnp.maximum(cache.length + index_1T - cache.first_B[:, None], 0)
