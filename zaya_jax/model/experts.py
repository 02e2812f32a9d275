"""Top-1 experts without a capacity limit: tokens are sorted by expert once, and no token is dropped.

Letters: P rows (tokens), D model width, E experts, F expert width, G = 2*F gate and up.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.grouped_matmul import group_rows, grouped_feed_forward
from pallas_kernels.product import AnyMatrix, QuantizedMatrix


class ExpertWeights(NamedTuple):
    """Matrices of a layer's experts."""

    gate_up_EDG: AnyMatrix
    """Columns of gate, followed by those of up."""
    down_EFD: AnyMatrix


def expert_weights(weights: Mapping, dtype: DTypeLike) -> ExpertWeights:
    """Weights of the declared "experts", cast to the type of matrix products.

    Quantized ones stay as they are, with gate and up joined already: their products dequantize them.
    """
    if isinstance(weights["down_proj"], QuantizedMatrix):
        return ExpertWeights(weights["gate_up_proj"], weights["down_proj"])
    gate_up_EDQF, down_EFD = (weights[name].astype(dtype) for name in ("gate_up_proj", "down_proj"))
    experts, width = gate_up_EDQF.shape[:2]
    # Gate and up are one product of twice the width, which reads the rows only once.
    return ExpertWeights(gate_up_EDQF.reshape(experts, width, -1), down_EFD)


def apply_experts(
    x_PD: Float[Array, "P D"],
    experts_P: Int[Array, " P"],
    scores_P: Float[Array, " P"],
    weights: ExpertWeights,
    *,
    is_kept: bool = True,
    implementation: str | None = None,
) -> Float[Array, "P D"]:
    """`y = s[e] * Expert_e(x)`, where `Expert_e(x) = down(silu(gate(x)) * up(x))` ([ZAYA1-8B] II-A, eq. 1).

    Args:
      x_PD: normalized input of the block.
      experts_P: e, the selected class of each row, 0..E; class E skips, and its output is zero.
      scores_P: s[e], the router's probability of that class, float32.
      weights: matrices of the experts.
      is_kept: whether the remat policy keeps the result.
      implementation: implementation of the grouped products, as in `grouped_matmul`.
    """
    # Rows of class E belong to no group: they are sorted after all others, and have no products.
    groups = group_rows(experts_P, weights.down_EFD.shape[0])
    out_PD = grouped_feed_forward(
        groups.sort(x_PD),
        weights.gate_up_EDG,
        weights.down_EFD,
        groups.sizes_E,
        # Multiplying by s[e] before the last product is equivalent, and the backward pass does not need the
        # unweighted output.
        scale_P=groups.sort(scores_P),
        is_kept=is_kept,
        implementation=implementation,
    )
    # Named after unsorting, so that the kept array does not need the sort order to be read.
    return checkpoint_name(groups.unsort(out_PD), KEPT)
