"""The small networks that tests share: all parts of ZAYA1 at a width that compiles in seconds.

Tests of the same network and batch shape also share compiled programs (`quick_compilation`), so a test uses
one of these unless it needs other sizes. Tests of weight layouts and of the partition have their own
networks, in which all sizes differ.
"""

import dataclasses

from zaya_jax.config import HYBRID, HYBRID_SLIDING, ExecutionConfig, ModelConfig

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=24,
    num_experts=4,
    router_hidden_size=16,
    # Routing is decisive, so that rounding a sum changes no expert.
    initializer_range=0.3,
    max_position_embeddings=160,
)
"""Two heads of queries to a head of keys, and two layers: the second has what the first hands on."""

SLIDING = dataclasses.replace(
    SMALL, num_hidden_layers=3, layer_pattern=(HYBRID_SLIDING, HYBRID), sliding_window=5
)
"""Both kinds of layers, and a pattern that ends in its middle."""

EXECUTION = ExecutionConfig(dtype="float32")
"""Float32 throughout: results then differ by the order of sums alone."""
