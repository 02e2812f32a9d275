"""ZAYA1-8B: 8.84 billion parameters, 0.75 billion active ([ZAYA1-8B] Tables I and II).

The published recipe: tokens, context and RoPE base of each phase, 16.78M tokens per step, a cosine from
6e-4 to 2e-4 in phase 1, Muon with AdamW. Unpublished values are marked as ours.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The model, and the four phases of its training."""
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
    config.model.rope_theta = 10_000.0

    config.data = ConfigDict()
    config.data.corpus = "corpora/held_out"  # ours: the same held-out texts in all phases
    config.data.source = None
    config.data.mixtures = MIXTURES
    config.data.mixture = "pretrain_1"
    config.data.tokenizer = "tokenizer.json"  # Gemma 3's
    config.data.sequence_length = 4096
    config.data.batch_size = 4096  # 16.78M tokens: [ZAYA1-8B] appendix B

    config.optimizer = ConfigDict()
    config.optimizer.name = "muon"
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 6e-4  # to 2e-4 by a cosine: [ZAYA1-base] section V, by [Primus]
    config.optimizer.final_learning_rate = 2e-4
    config.optimizer.warmup_steps = 2000  # ours
    config.optimizer.weight_decay = 0.1  # ours
    config.optimizer.momentum = 0.95  # ours
    config.optimizer.newton_schulz_steps = 5
    config.optimizer.newton_schulz_dtype = "bfloat16"  # [Muon]

    config.balancing = ConfigDict()
    config.balancing.learning_rate = 1e-3  # ours

    config.train = ConfigDict()
    config.train.eval_every = 5000  # ours
    config.train.eval_sequences = 4096  # ours
    config.train.checkpoint_every = 250  # ours: about every 10 minutes

    config.execution = ConfigDict()
    config.execution.dtype = "bfloat16"
    config.execution.remat = "products"  # ours: the fastest that fits, by `zaya plan --search`
    config.execution.node_devices = 8  # ours: the GPUs of a node store two experts of each layer each
    config.execution.gradient_dtype = "bfloat16"  # ours: stored and sent; summed in float32
    config.execution.loss_chunk = 16_384  # ours: 8 GiB for exponentials, and one pass over the table for all

    config.phases = PHASES
    return config


# The kinds of data of each phase are published ([ZAYA1-8B] Tables II, III), the data are not. The folders are
# ours, and so are the weights of the first two phases; those of the later two are the published percentages.
LATER_CORPORA = (
    "corpora/long_reasoning",
    "corpora/web_and_synthetic",
    "corpora/long_documents",
    "corpora/code",
    "corpora/math",
    "corpora/short_instruction",
)
MIXTURES = (
    {
        "name": "pretrain_1",
        "corpora": ("corpora/web", "corpora/code", "corpora/math", "corpora/multilingual"),
        "weights": (0.6, 0.2, 0.1, 0.1),  # ours
    },
    {
        "name": "pretrain_2",  # more code, math, reasoning and instruction
        "corpora": (
            "corpora/web",
            "corpora/code",
            "corpora/math",
            "corpora/multilingual",
            "corpora/reasoning",
            "corpora/instruction",
        ),
        "weights": (0.35, 0.25, 0.2, 0.05, 0.1, 0.05),  # ours
    },
    {
        "name": "midtrain",
        "corpora": LATER_CORPORA,
        "weights": (86.1, 5.7, 0.8, 3.0, 3.0, 1.4),
    },
    {
        "name": "finetune",
        "corpora": LATER_CORPORA,
        "weights": (75.0, 9.8, 6.4, 5.0, 2.6, 1.2),
    },
)

# A phase inherits all fields that it does not set. Published are the 16.78M tokens per step of phase 1, and
# that its batch grew. Ours are the ramp, the same tokens per step in later phases, and the learning rates
# after phase 1: constant at its last value in phase 2, then decaying. With the published context
# parallelism, 512 sequences on 2 GPUs each, or 128 on 8 each, use 1,024 GPUs.
PHASES = (
    {
        "name": "pretrain_1",
        "tokens": 8_000_000_000_000,
        "data": {"batch_ramp": ((10_000, 4_194_304), (10_000, 8_388_608))},  # ours
    },
    {
        "name": "pretrain_2",
        "tokens": 4_000_000_000_000,
        "data": {"mixture": "pretrain_2"},
        "optimizer": {"schedule": "constant", "learning_rate": 2e-4, "warmup_steps": 0},  # ours
    },
    {
        "name": "midtrain",
        "tokens": 1_200_000_000_000,
        "model": {"rope_theta": 1_000_000.0},
        "data": {"mixture": "midtrain", "sequence_length": 32_768, "batch_size": 512},  # the batch is ours
        "execution": {"context_devices": 2},  # [ZAYA1-8B] section III
        "optimizer": {  # ours
            "schedule": "linear",
            "learning_rate": 2e-4,
            "final_learning_rate": 5e-5,
            "warmup_steps": 0,
        },
    },
    {
        "name": "finetune",
        "tokens": 660_000_000_000,
        "model": {"rope_theta": 5_000_000.0},
        "data": {"mixture": "finetune", "sequence_length": 131_072, "batch_size": 128},  # the batch is ours
        "execution": {"context_devices": 8},  # [ZAYA1-8B] section III
        "optimizer": {  # ours
            "schedule": "linear",
            "learning_rate": 5e-5,
            "final_learning_rate": 5e-6,
            "warmup_steps": 0,
        },
    },
)
