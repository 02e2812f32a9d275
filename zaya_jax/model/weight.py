"""What a declaration of a weight says, and trees of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

EXPERTS = "E"
"""Letter of the axis of experts."""


@dataclasses.dataclass(frozen=True)
class Change:
    """What an adapter's factor is for ([LoRA] section 4.1).

    Attributes:
      path: of the weight that changes by the product of both factors.
      scale: of that product.
    """

    path: str
    scale: float


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
      trains: whether it has a gradient; otherwise it keeps its value, and no optimiser knows of it.
      adapts: of an adapter's factor: the change that it is a part of.
    """

    axes: str
    shape: tuple[int, ...]
    std: float | None = None
    constant: float = 0.0
    matrix: tuple[str, str] | None = None
    decay: bool = False
    trains: bool = True
    adapts: Change | None = None

    @property
    def size(self) -> int:
        """Number of parameters, of all layers."""
        return math.prod(self.shape)

    @property
    def of_experts(self) -> bool:
        """Whether each expert has a part of its own in it, which the devices of a node may share."""
        return EXPERTS in self.axes

    @property
    def in_products(self) -> bool:
        """Whether products take it, in their type; the network adds the others or scales with them."""
        # A weight is changed in float32 and rounded once: factors are small, and their product smaller.
        return self.std is not None and self.adapts is None

    def initial(self, key: jax.Array) -> jax.Array:
        """A fresh initial value, float32."""
        if self.std is None:
            return jnp.full(self.shape, self.constant, jnp.float32)
        # Parameters are float32 whatever products take: in bfloat16 a small update would be rounded away.
        return self.std * jax.random.normal(key, self.shape, jnp.float32)


WeightTree = dict[str, "Weight | WeightTree"]
"""Declarations, nested as `variables["params"]` is."""


@dataclasses.dataclass(frozen=True)
class Declarer:
    """Declares weights by the letters of their axes.

    Attributes:
      sizes: behind each letter.
      std: of the normal initial values.
    """

    sizes: Mapping[str, int]
    std: float

    def constant(self, axes: str, value: float) -> Weight:
        """A scale, a bias or a temperature: one value everywhere, no decay, moved by AdamW."""
        # Decay would pull a scale from 1 to 0.
        return Weight(axes, self._shape(axes), constant=value)

    def normal(self, axes: str, matrix: tuple[str, str] | None = None) -> Weight:
        """A weight of products; with the axes of its matrices it is Muon that moves it."""
        return Weight(axes, self._shape(axes), std=self.std, matrix=matrix, decay=True)

    def _shape(self, axes: str) -> tuple[int, ...]:
        return tuple(self.sizes[a] for a in axes)


def flatten_weights(tree: Mapping, prefix: str = "") -> dict[str, Weight]:
    """The declarations by their path, "layers/experts/down_proj"."""
    flat: dict[str, Weight] = {}
    for name, value in tree.items():
        path = f"{prefix}/{name}" if prefix else name
        flat |= {path: value} if isinstance(value, Weight) else flatten_weights(value, path)
    return flat


def map_weights(function: Callable[..., Any], declared: Mapping, *trees: Any) -> Any:
    """A tree with `function(weight, *values)` in place of each declared weight."""
    # A `Weight` is no pytree, so that it is a leaf: where the values are trees, they come whole.
    return jax.tree.map(function, declared, *trees)
