"""Names (`jax.ad_checkpoint.checkpoint_name`) of results that a rematerialization policy may keep.

The operations assign them, because only they know which of their results are expensive to recompute.
"""

KEPT = "kept"
"""Results of attention, convolutions and expert products, and the residuals that their gradients need."""
PRODUCT = "product"
"""Results of products with weights, except those of experts."""
STREAM = "stream"
"""The residual stream between a layer's two blocks."""
