"""ZAYA1-8B trained further on sequences of a million tokens, each sharded over 64 GPUs; settings are ours.

    zaya plan --config=configs/zaya1_8b_million.py --nodes=8
    zaya train --config=configs/zaya1_8b_million.py

Starts from the run of `configs/zaya1_8b.py`, or from one that `zaya convert` wrote from the released weights.
"""

import zaya1_8b
from ml_collections import ConfigDict

CONTEXT = 2**20
"""Number of tokens per sequence."""


def get_config() -> ConfigDict:
    """The 8B model with a longer context, and one phase after the published ones."""
    config = zaya1_8b.get_config()
    config.update(
        {
            "run_folder": "runs/zaya1_8b_million",
            "phases": (),
            # Published: the base grew 100-fold when the context grew 8-fold, and 5-fold when it grew 4-fold.
            "model": {"max_position_embeddings": CONTEXT, "rope_theta": 50_000_000.0},
            # 16.78M tokens per step, as in all phases of the base run.
            "data": {"mixture": "finetune", "sequence_length": CONTEXT, "batch_size": 16},
            "execution": {"context_devices": 64},
            "optimizer": {
                "schedule": "linear",
                "learning_rate": 5e-6,
                "final_learning_rate": 5e-7,
                "warmup_steps": 0,
            },
            "train": {
                "num_steps": 1000,
                "eval_every": 250,
                "eval_sequences": 16,
                "init_from": "runs/zaya1_8b",
            },
        }
    )
    return config
