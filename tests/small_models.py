"""The small networks that tests share: all parts of ZAYA1 at a width that compiles in seconds.

Tests of one network and of one shape of batch share its compiled programs too (`quick_compilation`), so
that a test takes one of these unless what it shows needs other sizes. Those of the layouts of weights, and
of the partition, are their own: there every size must be another.
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
    # Tokens go clearly different ways, so that a rounded sum sends none of them to another expert.
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
