"""Preference training (DPO) of adapters of ZAYA1-8B on a file of pairs of answers, on one MI300X.

    zaya convert Zyphra/ZAYA1-8B runs/zaya1_8b       # or a local folder, after `hf download`
    zaya train --config=configs/zaya1_8b_dpo.py --config.data.source=preferences.jsonl
    zaya serve runs/zaya1_8b_dpo

The starting weights are also the reference. To start from a fine-tuned run, set `train.init_from`.
"""

import zaya1_8b_lora
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The model and adapters of `zaya1_8b_lora.py`, with pairs of answers and the loss of DPO."""
    config = zaya1_8b_lora.get_config()
    config.update(
        {
            "run_folder": "runs/zaya1_8b_dpo",
            "data": {
                "corpus": "corpora/preferences",
                "source": "preferences.jsonl",
                "source_kind": "preferences",
            },
            "dpo": {"beta": 0.1},  # [DPO] section 6
            "optimizer": {"learning_rate": 5e-6},  # ours: ten times that of all weights
            "train": {"epochs": 1.0},  # ours
        }
    )
    return config
