"""Residual scaling: an affine on the layer's output and one on the stream ([ZAYA1-8B] eq. 6)."""

from collections.abc import Mapping

from pallas_kernels.rms_norm import ResidualScaling


def residual_scaling(weights: Mapping) -> ResidualScaling:
    """A block's declared weights as the operations take them."""
    return ResidualScaling(
        weights["output_bias"], weights["output_scale"], weights["residual_bias"], weights["residual_scale"]
    )
