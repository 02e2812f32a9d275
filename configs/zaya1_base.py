"""ZAYA1-base: the network of ZAYA1-8B, as first released in November 2025.

Its code gives a token that chooses the skip class the router's probability times the block's input
(Mixture-of-Depths), where Hugging Face and the later releases give it nothing.
"""

from ml_collections import ConfigDict

from configs.zaya1_8b import get_config as zaya1_8b


def get_config() -> ConfigDict:
    """ZAYA1-8B with the identity as skip class and the RoPE base of the 32k stage it was released at."""
    config = zaya1_8b()
    config.run_folder = "runs/zaya1_base"
    config.model.skip_class = "identity"
    config.model.rope_theta = 1_000_000.0
    config.model.max_position_embeddings = 32_768
    return config
