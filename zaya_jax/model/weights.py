"""Declarations of all weights: axes, initial values, and how they are optimized.

Initialization, sharding, the optimizer's groups and the converters all use these declarations. Those of an
attention variant are next to its computation.

Letters: L layers, V vocabulary, D model width, N query heads, K key/value heads, A = N + K heads,
H head width, C = A*H latent channels, U = K*H/2 half of the value channels, I and J taps of the
depthwise and the per-head convolution, R and S router width, X = E + 1 router classes, E experts,
F expert width, Q gate and up, M = L - 1 layers that have one before them.
"""

import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.model.attention.block import variant_of
from zaya_jax.model.weight_declaration import (
    EXPERTS,
    Declarer,
    Weight,
    WeightTree,
    flatten_weights,
    map_weights,
)

__all__ = ["EXPERTS", "Weight", "WeightTree", "declare", "flatten_weights", "initialize", "map_weights"]


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Size of each letter."""
    heads = config.num_attention_heads + config.num_key_value_heads
    return {
        "L": config.num_hidden_layers,
        "M": config.num_hidden_layers - 1,
        "V": config.vocab_size,
        "D": config.hidden_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "A": heads,
        "H": config.head_dim,
        "C": heads * config.head_dim,
        "U": config.num_key_value_heads * config.head_dim // 2,
        "I": config.cca_time0,
        "J": config.cca_time1,
        "R": config.router_hidden_size,
        "S": config.router_hidden_size,
        "X": config.num_router_classes,
        "E": config.num_experts,
        "F": config.moe_intermediate_size,
        "Q": 2,
    }


def declare(config: ModelConfig) -> WeightTree:
    """Declares all weights, nested like `variables["params"]` ([ZAYA1-8B] Table I)."""
    declare = Declarer(axis_sizes(config), config.initializer_range)
    layers: WeightTree = {
        "attention_norm": {"scale": declare.constant("LD", 1.0)},
        # The output projection is the same for every variant of attention.
        "attention": variant_of(config).declare(declare) | {"o_proj": declare.normal("LNHD", ("NH", "D"))},
        "attention_residual": _declare_residual(declare),
        "moe_norm": {"scale": declare.constant("LD", 1.0)},
        "router": _declare_router(config, declare),
        "experts": {
            # Gate and up are separate matrices for Muon, because they are separate linear maps.
            "gate_up_proj": declare.normal("LEDQF", ("D", "F")),
            "down_proj": declare.normal("LEFD", ("F", "D")),
        },
        "moe_residual": _declare_residual(declare),
    }
    tree: WeightTree = {
        "embedding": {
            "table": declare.normal("VD"),
            "scale": declare.constant("D", 1.0),
            "bias": declare.constant("D", 0.0),
        },
        "layers": layers,
        "final_norm": {"scale": declare.constant("D", 1.0)},
    }
    # The head has no matrix, because it is tied to the embedding.
    if config.lm_head_bias:
        tree["head"] = {"bias": declare.constant("V", 0.0)}
    return tree


def _declare_residual(declare: Declarer) -> WeightTree:
    # At first the plain sum of a residual network ([ZAYA1-8B] eq. 6).
    return {
        "output_scale": declare.constant("LD", 1.0),
        "output_bias": declare.constant("LD", 0.0),
        "residual_scale": declare.constant("LD", 1.0),
        "residual_bias": declare.constant("LD", 0.0),
    }


def _declare_router(config: ModelConfig, declare: Declarer) -> WeightTree:
    if config.router == "linear":  # the baseline in [ZAYA1-8B]
        return {"kernel": declare.normal("LDX", ("D", "X"))}
    # R is an eighth of D, so the router costs less than one matrix of an expert.
    tree: WeightTree = {
        "down_proj": {"kernel": declare.normal("LDR", ("D", "R")), "bias": declare.constant("LR", 0.0)},
        "norm": {"scale": declare.constant("LR", 1.0)},
        "fc1": {"kernel": declare.normal("LRS", ("R", "S")), "bias": declare.constant("LS", 0.0)},
        "fc2": {"kernel": declare.normal("LRS", ("R", "S")), "bias": declare.constant("LS", 0.0)},
        "out_proj": declare.normal("LRX", ("R", "X")),
    }
    if config.num_hidden_layers > 1:  # the first layer has no state to average in
        tree["eda_scale"] = declare.constant("MR", 1.0)
    return tree


def initialize(declared: Mapping, key: jax.Array, prefix: str = "") -> dict:
    """Initializes weights. The random numbers of a weight depend only on the key and its path."""
    values = {}
    for name, value in declared.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(value, Weight):
            # Folding in the path, not a counter, keeps initial values when other weights are added or
            # removed.
            values[name] = value.initial(jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF))
        else:
            values[name] = initialize(value, key, path)
    return values


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, without router biases."""
    return sum(weight.size for weight in flatten_weights(declare(config)).values())


def abstract_variables(config: ModelConfig) -> dict:
    """Shapes and types of the variables of `Zaya.init`, without allocating them."""
    bias = (config.num_hidden_layers, config.num_router_classes)
    return {
        "params": map_weights(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declare(config)),
        "router_bias": {"layers": jax.ShapeDtypeStruct(bias, jnp.float32)},
    }
