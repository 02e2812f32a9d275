"""ZAYA1-base: the network of ZAYA1-8B, as first released in November 2025.

In its code ([legacy], branch `zaya`), the output for a token that chooses the skip class is the block's input
times the router's probability (Mixture-of-Depths); in [HF] and later releases it is zero.
"""

import zaya1_8b
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """ZAYA1-8B with the identity as skip class, after pretraining and the 32k phase."""
    config = zaya1_8b.get_config()
    config.update(
        {
            "run_folder": "runs/zaya1_base",
            "phases": zaya1_8b.PHASES[:3],
            "model": {
                "skip_class": "identity",
                "rope_theta": 1_000_000.0,
                "max_position_embeddings": 32_768,
            },
        }
    )
    return config
