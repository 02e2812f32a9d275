"""Every weight of the network, declared once: its axes, its initial value, how it is optimised.

Initialisation, sharding, the optimiser's grouping and the converters all read these declarations.

Letters: L layers, V vocabulary, D model width, N query heads, K key/value heads, A = N + K heads,
H head width, C = A*H latent channels, U = K*H/2 half of the value channels, I and J taps of the
depthwise and the per-head convolution, R and S router width, X = E + 1 router classes, E experts,
F expert width, Q gate and up, M = L - 1 layers that have one before them.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Weight:
    """A declared weight.

    Attributes:
      axes: a letter an axis.
      shape: their sizes.
      std: standard deviation of the normal initial value; None where it is `constant`.
      constant: the initial value everywhere.
      matrix: letters of a matrix's input and output axes, for what Muon orthogonalises; all other
        axes count matrices. None for what AdamW moves.
      decay: whether weight decay applies.
    """

    axes: str
    shape: tuple[int, ...]
    std: float | None = None
    constant: float = 0.0
    matrix: tuple[str, str] | None = None
    decay: bool = False

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)

    @property
    def in_products(self) -> bool:
        """Whether products take it, in their type; the network adds the others or scales with them."""
        return self.std is not None

    def initial(self, key: jax.Array) -> jax.Array:
        """The initial value, float32."""
        if self.std is None:
            return jnp.full(self.shape, self.constant, jnp.float32)
        return self.std * jax.random.normal(key, self.shape, jnp.float32)


WeightTree = dict[str, "Weight | WeightTree"]


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The size behind each letter."""
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
    """All weights of the network, nested as `variables["params"]` is ([8B] Table I, facts 1.2)."""
    sizes = axis_sizes(config)

    def constant(axes: str, value: float) -> Weight:
        return Weight(axes, tuple(sizes[a] for a in axes), constant=value)

    def normal(axes: str, matrix: tuple[str, str] | None = None) -> Weight:
        shape = tuple(sizes[a] for a in axes)
        return Weight(axes, shape, std=config.initializer_range, matrix=matrix, decay=True)

    def residual() -> WeightTree:
        return {
            "output_scale": constant("LD", 1.0),
            "output_bias": constant("LD", 0.0),
            "residual_scale": constant("LD", 1.0),
            "residual_bias": constant("LD", 0.0),
        }

    attention: WeightTree = {
        "q_proj": normal("LDNH", ("D", "NH")),
        "k_proj": normal("LDKH", ("D", "KH")),
        "v_proj_current": normal("LDU", ("D", "U")),
        "v_proj_delayed": normal("LDU", ("D", "U")),
        "conv_depthwise": {"kernel": normal("LIC"), "bias": constant("LC", 0.0)},
        "conv_grouped": {"kernel": normal("LAJHH"), "bias": constant("LC", 0.0)},
        "temperature": constant("LK", 1.0),
        "o_proj": normal("LNHD", ("NH", "D")),
    }
    layers: WeightTree = {
        "attention_norm": {"scale": constant("LD", 1.0)},
        "attention": attention,
        "attention_residual": residual(),
        "moe_norm": {"scale": constant("LD", 1.0)},
        "router": _declare_router(config, normal, constant),
        "experts": {
            "gate_up_proj": normal("LEDQF", ("D", "F")),
            "down_proj": normal("LEFD", ("F", "D")),
        },
        "moe_residual": residual(),
    }
    tree: WeightTree = {
        "embedding": {"table": normal("VD"), "scale": constant("D", 1.0), "bias": constant("D", 0.0)},
        "layers": layers,
        "final_norm": {"scale": constant("D", 1.0)},
    }
    if config.lm_head_bias:
        tree["head"] = {"bias": constant("V", 0.0)}
    return tree


def _declare_router(config: ModelConfig, normal, constant) -> WeightTree:
    if config.router == "linear":
        return {"kernel": normal("LDX", ("D", "X"))}
    tree: WeightTree = {
        "down_proj": {"kernel": normal("LDR", ("D", "R")), "bias": constant("LR", 0.0)},
        "norm": {"scale": constant("LR", 1.0)},
        "fc1": {"kernel": normal("LRS", ("R", "S")), "bias": constant("LS", 0.0)},
        "fc2": {"kernel": normal("LRS", ("R", "S")), "bias": constant("LS", 0.0)},
        "out_proj": normal("LRX", ("R", "X")),
    }
    if config.num_hidden_layers > 1:  # the first layer has no state to average in
        tree["eda_scale"] = constant("MR", 1.0)
    return tree


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Weight]:
    """The declarations by their path, "layers/experts/down_proj"."""
    flat: dict[str, Weight] = {}
    for name, value in tree.items():
        path = f"{prefix}/{name}" if prefix else name
        flat |= {path: value} if isinstance(value, Weight) else flatten(value, path)
    return flat


def map_weights(function: Callable[..., Any], declared: Mapping, *trees: Any) -> Any:
    """A tree with `function(weight, *values)` in place of each declared weight."""
    return jax.tree.map(function, declared, *trees, is_leaf=lambda leaf: isinstance(leaf, Weight))


def initialise(declared: Mapping, key: jax.Array, prefix: str = "") -> dict:
    """Initial values. A weight's randomness depends on the key and its path only."""
    values = {}
    for name, value in declared.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(value, Weight):
            values[name] = value.initial(jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF))
        else:
            values[name] = initialise(value, key, path)
    return values


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the network, without the router's balancing biases."""
    return sum(weight.size for weight in flatten(declare(config)).values())


def abstract_variables(config: ModelConfig) -> dict:
    """Shapes and types of what `Zaya.init` gives, without allocating."""
    bias = (config.num_hidden_layers, config.num_router_classes)
    return {
        "params": map_weights(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), declare(config)),
        "router_bias": {"layers": jax.ShapeDtypeStruct(bias, jnp.float32)},
    }
