"""Floating-point operations of the model, counted from its shapes."""

import math
from collections.abc import Mapping

import numpy as np

from zaya_jax.config import HYBRID, HYBRID_SLIDING, Config, ModelConfig
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import declare, flatten_weights

TABLE = "embedding/table"


def forward_flops_per_token(
    config: ModelConfig, sequence_length: int, *, keys: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Useful floating-point operations of the forward pass per token, by part of the model.

    A multiplication and an addition count as two. It counts one expert per token, and the attention scores
    under the causal mask and within the window, on average over the sequence. Elementwise operations do not
    count.

    Args:
      config: architecture.
      sequence_length: number of tokens of a document that fills the sequence.
      keys: mean number of keys per query by layer type, from `mean_keys`, if several documents are packed
        into a sequence; None for one document of `sequence_length`.
    """
    keys = keys or {kind: _keys_of_whole_row(kind, config, sequence_length) for kind in config.layer_types}
    parts = {"attention": 0.0, "experts": 0.0, "router": 0.0, "head": 0.0}
    for path, flops in _products(config).items():
        parts["head" if path == TABLE else path.split("/")[1]] += flops
    # Scores and their product with the values, with a multiplication and an addition each.
    parts["attention"] += sum(
        4.0 * keys[kind] * config.num_attention_heads * config.head_dim for kind in config.layer_types
    )
    return parts


def mean_keys(config: ModelConfig, positions_BT: np.ndarray) -> dict[str, float]:
    """Mean number of keys that a token attends to, by layer type, in a batch of packed documents.

    A token attends to the tokens of its own document up to itself and within the window.

    Args:
      config: architecture.
      positions_BT: position of each token in its document, from 0, for any part of a batch.
    """
    num_keys_BT = np.asarray(positions_BT, np.int64) + 1
    windows = {HYBRID: None, HYBRID_SLIDING: config.sliding_window}
    return {
        kind: float((num_keys_BT if windows[kind] is None else np.minimum(num_keys_BT, windows[kind])).mean())
        for kind in dict.fromkeys(config.layer_types)
    }


def train_flops_per_token(
    config: Config, sequence_length: int, *, keys: Mapping[str, float] | None = None
) -> float:
    """Useful floating-point operations of a training step per token, without recomputation.

    It is three times the forward pass, because each product is repeated for the gradient of each operand,
    minus the gradients of frozen matrices. A matrix with an adapter has a gradient, from which the gradients
    of the factors are computed; the latter, and merging the adapter once per step, do not count.

    Args:
      config: config of the run.
      sequence_length: number of tokens of a document that fills the sequence.
      keys: mean number of keys per query by layer type; None for one document of `sequence_length`.
    """
    declared = flatten_weights(declare_run(config))
    with_gradient = {path for path, weight in declared.items() if weight.trains}
    with_gradient |= {weight.adapts.path for weight in declared.values() if weight.adapts is not None}
    # A frozen matrix only saves its own gradient: the gradient of its input is still computed.
    products = _products(config.model)
    saved = math.fsum(flops for path, flops in products.items() if path not in with_gradient)
    forward = forward_flops_per_token(config.model, sequence_length, keys=keys)
    return 3.0 * math.fsum(forward.values()) - saved


def float32_router_flops(config: ModelConfig) -> float:
    """Operations per token of the router's products whose operands are float32 in bfloat16 training too.

    They are those of the forward pass after the first one, which multiplies the normalized stream.
    """
    first = "layers/router/down_proj/kernel", "layers/router/kernel"
    in_router = {path: flops for path, flops in _products(config).items() if path.split("/")[1] == "router"}
    return math.fsum(flops for path, flops in in_router.items() if path not in first)


def _products(config: ModelConfig) -> dict[str, float]:
    """Operations per token of the products with weights, by path of the weight."""
    blocks = ("attention", "experts", "router")
    flops = {
        # All experts are stored, but a token uses one.
        path: 2.0 * weight.size / (config.num_experts if _is_expert(path) else 1)
        for path, weight in flatten_weights(declare(config)).items()
        # Convolutions and the router's layers are products too, although Muon does not update all of them.
        if path.split("/")[1] in blocks and (weight.matrix or path.endswith("kernel"))
    }
    # The tied table is no product in the embedding, and one in the head.
    return flops | {TABLE: 2.0 * config.vocab_size * config.hidden_size}


def active_parameters(config: ModelConfig) -> int:
    """Number of parameters that are used per token, without the embedding ([ZAYA1-8B] Table I)."""
    weights = flatten_weights(declare(config))
    return sum(
        weight.size // (config.num_experts if _is_expert(path) else 1)
        for path, weight in weights.items()
        if path != TABLE
    )


def _is_expert(path: str) -> bool:
    return path.startswith("layers/experts/")


def _keys_of_whole_row(kind: str, config: ModelConfig, length: int) -> float:
    """Mean number of keys per query over a sequence."""
    window = min(config.sliding_window or length, length) if kind == HYBRID_SLIDING else length
    # The first `window` queries attend to 1, 2, ... keys.
    return (window * (window + 1) / 2 + (length - window) * window) / length
