"""ZAYA1-8B: 8.84 billion parameters, 0.75 billion active ([8B] Tables I and II).

Phase 1 of the published recipe: 8T tokens at 4,096, 16.78M tokens a step, cosine from 6e-4 to 2e-4.
Values that are not published are marked as ours.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The model and the first phase of its training."""
    config = ConfigDict()
    config.run_folder = "runs/zaya1_8b"

    config.model = ConfigDict()
    config.model.vocab_size = 262_272
    config.model.hidden_size = 2048
    config.model.num_hidden_layers = 40
    config.model.num_attention_heads = 8
    config.model.num_key_value_heads = 2
    config.model.head_dim = 128
    config.model.moe_intermediate_size = 2048
    config.model.num_experts = 16
    config.model.router_hidden_size = 256
    config.model.rope_theta = 10_000.0  # 1M from 32k on, 5M at 131k
    config.model.dtype = "bfloat16"
    config.model.remat = "layer"  # ours

    config.data = ConfigDict()
    config.data.corpus = "corpora/pretrain"
    config.data.source = None
    config.data.tokenizer = "tokenizer.json"  # Gemma 3's
    config.data.sequence_length = 4096
    config.data.batch_size = 4096

    config.optimizer = ConfigDict()
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 6e-4
    config.optimizer.final_learning_rate = 2e-4
    config.optimizer.warmup_steps = 2000  # ours
    config.optimizer.weight_decay = 0.1  # ours
    config.optimizer.momentum = 0.95  # ours
    config.optimizer.newton_schulz_steps = 5
    config.optimizer.newton_schulz_dtype = "bfloat16"  # Jordan's Muon

    config.balancing = ConfigDict()
    config.balancing.learning_rate = 1e-3  # ours

    config.train = ConfigDict()
    config.train.num_steps = 476_837  # 8T tokens
    config.train.gradient_dtype = "bfloat16"  # ours
    config.train.loss_chunk = 2048  # ours: 2 GiB of logits
    config.train.eval_every = 5000  # ours
    config.train.eval_sequences = 4096  # ours
    config.train.checkpoint_every = 250  # ours: about every 10 minutes
    return config
