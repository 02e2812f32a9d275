"""What the backward pass recomputes rather than keeps."""

import jax

from pallas_kernels import flash_attention, grouped_matmul

KEPT = "kept"
"""Name (`jax.ad_checkpoint.checkpoint_name`) of results of attention's and the experts' products."""

STREAM = "stream"
"""Name of the stream between a layer's two blocks."""

_keep_names = jax.checkpoint_policies.save_only_these_names
_keep_products = _keep_names(KEPT, flash_attention.KEPT, grouped_matmul.KEPT)

REMAT_POLICIES = {
    "products": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _keep_products
    ),
    "attention_and_experts": _keep_products,
    "block": _keep_names(STREAM),
    "layer": jax.checkpoint_policies.nothing_saveable,
}
"""By the names that `ModelConfig.remat` has besides "none"; described there."""
