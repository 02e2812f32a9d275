"""ZAYA1-74B-preview: 74.8 billion parameters, 4.3 billion active ([Weights]; no published recipe).

The sizes follow from the released weights. All training settings are ours.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The model, with training settings of our own choice."""
    config = ConfigDict()
    config.run_folder = "runs/zaya1_74b"

    config.model = ConfigDict()
    config.model.vocab_size = 262_272
    config.model.hidden_size = 4096
    config.model.num_hidden_layers = 60
    config.model.num_attention_heads = 16
    config.model.num_key_value_heads = 2
    config.model.head_dim = 128
    config.model.moe_intermediate_size = 4096
    config.model.num_experts = 24
    config.model.router_hidden_size = 256
    config.model.layer_pattern = ("hybrid", "hybrid_sliding")
    config.model.sliding_window = 4097
    config.model.rope_theta = 5_000_000.0
    config.model.sliding_rope_theta = 10_000.0

    config.data = ConfigDict()
    config.data.corpus = "corpora/pretrain"
    config.data.source = None
    config.data.tokenizer = "tokenizer.json"
    config.data.sequence_length = 4096
    config.data.batch_size = 4096

    config.optimizer = ConfigDict()
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.final_learning_rate = 3e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.newton_schulz_dtype = "bfloat16"

    config.train = ConfigDict()
    config.train.num_steps = 476_837
    config.train.eval_every = 5000
    config.train.eval_sequences = 4096
    config.train.checkpoint_every = 250

    config.execution = ConfigDict()
    config.execution.dtype = "bfloat16"
    config.execution.remat = "layer"
    config.execution.node_devices = 8
    config.execution.gradient_dtype = "bfloat16"
    config.execution.loss_chunk = 2048
    return config
