"""Trains adapters of ZAYA1-8B on a file of chats, on one MI300X.

    zaya convert Zyphra/ZAYA1-8B runs/zaya1_8b       # or a local folder, after `hf download`
    zaya train --config=configs/zaya1_8b_lora.py --config.data.source=chats.jsonl
    zaya serve runs/zaya1_8b_lora

Frozen weights are stored once, in bfloat16. With `--config.lora.base_dtype=int8` or `mxfp4` the experts are
quantized (QLoRA).
"""

import zaya1_8b_sft
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The data and length of `zaya1_8b_sft.py`, with adapters of attention and router."""
    config = zaya1_8b_sft.get_config()
    config.update(
        {
            "run_folder": "runs/zaya1_8b_lora",
            "lora": {"rank": 16, "alpha": 32.0},  # ours
            "optimizer": {
                "learning_rate": 2e-4,  # ours: adapters need about ten times that of all weights
                "final_learning_rate": 0.0,
                "weight_decay": 0.0,  # ours
            },
            "execution": {"num_microbatches": 2},  # eight windows at a time fit one GPU
        }
    )
    return config
