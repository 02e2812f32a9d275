"""All of ZAYA1, small: trains on Python's standard library in minutes on two CPU cores."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """A byte-level model of 1.9 million parameters."""
    config = ConfigDict()
    config.run_folder = "runs/tiny"

    config.model = ConfigDict()
    config.model.vocab_size = 264  # 256 bytes, padding, begin and end of a document, to a multiple of 8
    config.model.hidden_size = 128
    config.model.num_hidden_layers = 4
    config.model.num_attention_heads = 4
    config.model.num_key_value_heads = 2
    config.model.head_dim = 32
    config.model.moe_intermediate_size = 128
    config.model.num_experts = 8
    config.model.router_hidden_size = 32
    config.model.layer_pattern = ("hybrid_sliding", "hybrid")
    config.model.sliding_window = 64
    config.model.rope_theta = 10_000.0
    config.model.max_position_embeddings = 1024
    config.model.initializer_range = 0.05

    config.data = ConfigDict()
    config.data.corpus = "corpora/stdlib"
    config.data.source = "stdlib"
    config.data.tokenizer = "byte"
    config.data.sequence_length = 256
    config.data.batch_size = 16
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
    config.train.num_steps = 200
    config.train.log_every = 10
    config.train.eval_every = 200
    config.train.checkpoint_every = 100
    config.train.seed = 0

    config.execution = ConfigDict()
    config.execution.dtype = "float32"
    config.execution.remat = "products"  # on a CPU faster than keeping all
    return config
