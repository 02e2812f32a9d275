"""Residual scaling: affine maps of the block's output and of the residual stream ([ZAYA1-8B] eq. 6)."""

from collections.abc import Mapping

from pallas_kernels.rms_norm import ResidualScaling


def residual_scaling(weights: Mapping) -> ResidualScaling:
    """Residual scaling of a block from its declared weights."""
    return ResidualScaling(
        weights["output_bias"], weights["output_scale"], weights["residual_bias"], weights["residual_scale"]
    )
