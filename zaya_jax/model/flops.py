"""Floating-point operations that the model needs, counted from its shapes."""

import math

from zaya_jax.config import HYBRID_SLIDING, Config, ModelConfig
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import declare, flatten_weights

TABLE = "embedding/table"


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Useful operations of one token's forward pass, by part of the model.

    A multiply and an add are two. One expert a token counts, and of the attention scores those
    under the causal mask and within the window, on average over the sequence. Elementwise work
    does not count.
    """
    parts = {"attention": 0.0, "experts": 0.0, "router": 0.0, "head": 0.0}
    for path, flops in _products(config).items():
        parts["head" if path == TABLE else path.split("/")[1]] += flops
    # Scores and their product with the values: a multiply and an add each.
    parts["attention"] += sum(
        4.0 * _mean_keys(kind, config, sequence_length) * config.num_attention_heads * config.head_dim
        for kind in config.layer_types
    )
    return parts


def train_flops_per_token(config: Config, sequence_length: int) -> float:
    """Forward and backward of what a run trains. Recomputation is not useful work.

    Three times the forward pass, which each product of two operands costs again for the gradient of either;
    less what the gradients of frozen matrices would cost. A matrix with an adapter has one, from which those
    of its factors are made; these do not count, nor does the sum of both, once a step.
    """
    declared = flatten_weights(declare_run(config))
    with_gradient = {path for path, weight in declared.items() if weight.trains}
    with_gradient |= {weight.adapts.path for weight in declared.values() if weight.adapts is not None}
    # Only the weight's side is saved: the stream's gradient passes a frozen matrix as it does any other.
    products = _products(config.model)
    saved = math.fsum(flops for path, flops in products.items() if path not in with_gradient)
    return 3.0 * math.fsum(forward_flops_per_token(config.model, sequence_length).values()) - saved


def _products(config: ModelConfig) -> dict[str, float]:
    """Operations of one token's products with weights, by the path of the weight."""
    rooms = ("attention", "experts", "router")
    flops = {
        # All experts are stored; a token meets one.
        path: 2.0 * weight.size / (config.num_experts if _is_expert(path) else 1)
        for path, weight in flatten_weights(declare(config)).items()
        # Convolutions and the router's layers multiply too, though Muon does not move them as matrices.
        if path.split("/")[1] in rooms and (weight.matrix or path.endswith("kernel"))
    }
    # The table is no product where tokens are looked up, and one where they are told: it is tied.
    return flops | {TABLE: 2.0 * config.vocab_size * config.hidden_size}


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token meets, without the embedding ([ZAYA1-8B] Table I)."""
    weights = flatten_weights(declare(config))
    return sum(
        weight.size // (config.num_experts if _is_expert(path) else 1)
        for path, weight in weights.items()
        if path != TABLE
    )


def _is_expert(path: str) -> bool:
    return path.startswith("layers/experts/")


def _mean_keys(kind: str, config: ModelConfig, length: int) -> float:
    """Keys that a query sees on average over a sequence."""
    window = min(config.sliding_window or length, length) if kind == HYBRID_SLIDING else length
    # The first queries see fewer than the window holds, one after the other one more.
    return (window * (window + 1) / 2 + (length - window) * window) / length
