"""ZAYA1-base: the network of ZAYA1-8B, as first released in November 2025.

Its code ([legacy], branch `zaya`) gives a token that chooses the skip class the router's probability
times the block's input (Mixture-of-Depths), where [HF] and the later releases give it nothing.
"""

import zaya1_8b
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """ZAYA1-8B with the identity as skip class, after its pretraining and the stage of 32k."""
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
