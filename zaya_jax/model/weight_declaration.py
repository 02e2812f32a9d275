"""Declarations of weights, and trees of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

EXPERTS = "E"
"""Letter of the axis of experts."""


@dataclasses.dataclass(frozen=True)
class LoraTarget:
    """Target of an adapter ([LoRA] section 4.1).

    Attributes:
      path: path of the weight that the product of both factors is added to.
      scale: scale of that product, such as alpha / rank.
      weight: declaration of that weight, as a run without adapters has it.
    """

    path: str
    scale: float
    weight: "Weight"


@dataclasses.dataclass(frozen=True)
class Weight:
    """Declaration of a weight.

    Attributes:
      axes: one letter per axis.
      shape: sizes of the axes.
      std: standard deviation of normal initial values; None if all initial values are `constant`.
      constant: initial value of all elements, if `std` is None.
      matrix: letters of the input and the output axes of a matrix that Muon orthogonalizes; all other axes
        index matrices. None for weights that AdamW updates.
      decay: whether weight decay applies.
      trains: whether it has a gradient and an optimizer state; otherwise it is frozen.
      adapts: target of the adapter, for a part of an adapter; None for all other weights.
      dtype: type in which the training state stores it.
      rate: factor of the learning rate.
    """

    axes: str
    shape: tuple[int, ...]
    std: float | None = None
    constant: float = 0.0
    matrix: tuple[str, str] | None = None
    decay: bool = False
    trains: bool = True
    adapts: LoraTarget | None = None
    dtype: str = "float32"
    rate: float = 1.0

    @property
    def size(self) -> int:
        """Number of elements, over all layers."""
        return math.prod(self.shape)

    @property
    def of_experts(self) -> bool:
        """Whether it has an axis of experts, along which the devices of a node may share it."""
        return EXPERTS in self.axes

    @property
    def in_products(self) -> bool:
        """Whether it is an operand of matrix products and cast to their type; others add or scale."""
        # Factors of adapters are multiplied and added in float32, because their product is small.
        return self.std is not None and self.adapts is None

    def initial(self, key: jax.Array) -> jax.Array:
        """Computes the initial value; weights that train are float32."""
        if self.std is None:
            return jnp.full(self.shape, self.constant, self.dtype)
        # Parameters are float32: in bfloat16 small updates would be lost in rounding.
        return (self.std * jax.random.normal(key, self.shape, jnp.float32)).astype(self.dtype)


WeightTree = dict[str, "Weight | WeightTree"]
"""Declarations, nested like `variables["params"]`."""


@dataclasses.dataclass(frozen=True)
class Declarer:
    """Declares weights by the letters of their axes.

    Attributes:
      sizes: size of each letter.
      std: standard deviation of normal initial values.
    """

    sizes: Mapping[str, int]
    std: float

    def constant(self, axes: str, value: float) -> Weight:
        """Declares a scale, bias or temperature: constant initial value, no decay, updated by AdamW."""
        # Decay would pull a scale from 1 to 0.
        return Weight(axes, self._shape(axes), constant=value)

    def normal(self, axes: str, matrix: tuple[str, str] | None = None) -> Weight:
        """Declares an operand of matrix products; Muon updates it if the axes of its matrices are given."""
        return Weight(axes, self._shape(axes), std=self.std, matrix=matrix, decay=True)

    def _shape(self, axes: str) -> tuple[int, ...]:
        return tuple(self.sizes[a] for a in axes)


def flatten_weights(tree: Mapping, prefix: str = "") -> dict[str, Weight]:
    """Declarations by path, such as "layers/experts/down_proj"."""
    flat: dict[str, Weight] = {}
    for name, value in tree.items():
        path = f"{prefix}/{name}" if prefix else name
        flat |= {path: value} if isinstance(value, Weight) else flatten_weights(value, path)
    return flat


def map_weights(function: Callable[..., Any], declared: Mapping, *trees: Any) -> Any:
    """Maps `function(weight, *values)` over a tree of declarations."""
    # `Weight` is not a pytree, so it is a leaf; values at its place may be trees.
    return jax.tree.map(function, declared, *trees)
