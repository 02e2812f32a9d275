"""ZAYA1-8B, further trained on sequences of a million tokens, each shared by 64 GPUs. All of it is ours.

    zaya plan --config=configs/zaya1_8b_million.py --nodes=8
    zaya train --config=configs/zaya1_8b_million.py

From the run that `configs/zaya1_8b.py` made, or that `zaya convert` made of the released weights.
"""

import zaya1_8b
from ml_collections import ConfigDict

CONTEXT = 2**20
"""Tokens of a sequence."""


def get_config() -> ConfigDict:
    """The 8B model with a longer context, and one phase after the published ones."""
    config = zaya1_8b.get_config()
    config.update(
        {
            "run_folder": "runs/zaya1_8b_million",
            "phases": (),
            # The base grew by 100 where the context grew by 8, and by 5 where it grew by 4.
            "model": {"max_position_embeddings": CONTEXT, "rope_theta": 50_000_000.0},
            # 16.78M tokens a step, as before.
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
