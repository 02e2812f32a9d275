"""A tiny ZAYA1 with all of its parts: trains on Python's standard library in minutes on two CPU cores."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """A model with 1.2 million parameters; the run first trains a tokenizer with 2,048 tokens."""
    config = ConfigDict()
    config.run_folder = "runs/tiny"

    config.model = ConfigDict()
    config.model.vocab_size = 2048
    config.model.hidden_size = 128
    config.model.num_hidden_layers = 2
    config.model.num_attention_heads = 4
    config.model.num_key_value_heads = 2
    config.model.head_dim = 32
    config.model.moe_intermediate_size = 256
    config.model.num_experts = 4
    config.model.router_hidden_size = 32
    config.model.layer_pattern = ("hybrid_sliding", "hybrid")
    config.model.sliding_window = 64
    config.model.rope_theta = 10_000.0
    config.model.max_position_embeddings = 1024
    config.model.initializer_range = 0.05

    config.data = ConfigDict()
    config.data.corpus = "corpora/stdlib_2048"
    config.data.source = "stdlib"
    config.data.tokenizer = "tokenizers/stdlib_2048/tokenizer.json"
    config.data.tokenizer_vocab_size = 2048
    config.data.sequence_length = 256
    config.data.batch_size = 8
    config.data.seed = 0

    config.optimizer = ConfigDict()
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 1e-2
    config.optimizer.final_learning_rate = 3e-4
    config.optimizer.warmup_steps = 20
    config.optimizer.weight_decay = 0.1

    config.balancing = ConfigDict()
    config.balancing.learning_rate = 1e-2

    config.train = ConfigDict()
    config.train.num_steps = 800
    config.train.log_every = 40
    config.train.eval_every = 800
    config.train.checkpoint_every = 400
    config.train.sample_tokens = 96  # so small a network loses the thread after that
    config.train.seed = 0

    config.execution = ConfigDict()
    config.execution.dtype = "float32"
    config.execution.remat = "products"  # on a CPU faster than keeping all
    return config
