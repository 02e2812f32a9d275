"""Names (`jax.ad_checkpoint.checkpoint_name`) of results that a rematerialisation policy may keep.

The operations give them, because only they know which of their results are dear to make again.
"""

KEPT = "kept"
"""Results of attention, of convolutions and of the experts' products, and what their gradients need."""
STREAM = "stream"
"""The residual stream between a layer's two blocks."""
