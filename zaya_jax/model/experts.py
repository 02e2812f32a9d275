"""Top-1 experts without capacity: tokens are sorted by expert once, and no token is dropped.

Letters: P rows (tokens), D model width, E experts, F expert width, G = 2*F gate and up.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checkpoint_names import KEPT
from pallas_kernels.grouped_matmul import group_rows, grouped_matmul, grouped_swiglu
from pallas_kernels.product import Matrix


class ExpertWeights(NamedTuple):
    """The matrices of a layer's experts."""

    gate_up_EDG: Matrix
    """Gate's columns first, then up's."""
    down_EFD: Matrix


def expert_weights(weights: Mapping, dtype: DTypeLike) -> ExpertWeights:
    """The declared weights of "experts", in the type of products."""
    gate_up_EDQF, down_EFD = (weights[name].astype(dtype) for name in ("gate_up_proj", "down_proj"))
    experts, width = gate_up_EDQF.shape[:2]
    # Side by side they are one product of twice the width, whose rows are read once.
    return ExpertWeights(gate_up_EDQF.reshape(experts, width, -1), down_EFD)


def apply_experts(
    x_PD: Float[Array, "P D"],
    experts_P: Int[Array, " P"],
    scores_P: Float[Array, " P"],
    weights: ExpertWeights,
    *,
    implementation: str | None = None,
) -> Float[Array, "P D"]:
    """`y = s[e] * Expert_e(x)`, where `Expert_e(x) = down(silu(gate(x)) * up(x))` ([ZAYA1-8B] II-A, eq. 1).

    Args:
      x_PD: the block's normalised input.
      experts_P: e, the chosen class of each row, 0..E; class E skips and gives zeros.
      scores_P: s[e], the router's probability of that class, float32.
      weights: of the experts.
      implementation: of the grouped products, by the names that `grouped_matmul` has.
    """
    # Rows of class E are of no group: they are sorted behind all others, and no product is made for them.
    groups = group_rows(experts_P, weights.down_EFD.shape[0])
    hidden_PF = grouped_swiglu(
        groups.sort(x_PD),
        weights.gate_up_EDG,
        groups.sizes_E,
        # s[e] is multiplied in before the last product: that is the same at the width F, and the backward
        # pass then needs no unweighted output.
        scale_P=groups.sort(scores_P),
        implementation=implementation,
    )
    out_PD: jax.Array = grouped_matmul(
        hidden_PF, weights.down_EFD, groups.sizes_E, implementation=implementation
    )
    # Behind the sorting back: what is kept then needs no order to be read again.
    return checkpoint_name(groups.unsort(out_PD), KEPT)
