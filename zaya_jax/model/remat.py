"""What the backward pass recomputes rather than keeps."""

import jax

KEPT = "kept"
"""Name (`jax.ad_checkpoint.checkpoint_name`) of what remat "products" keeps besides plain products."""

REMAT_POLICIES = {
    "layer": jax.checkpoint_policies.nothing_saveable,
    "products": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(KEPT),
    ),
}
"""By the names that `ModelConfig.remat` has besides "none"."""
