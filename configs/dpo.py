"""Preference training (DPO) from the weights of a fine-tuned run, which are also the reference.

    zaya train --config=configs/sft.py               # the weights: runs/sft
    zaya data preferences corpora/preferences --source preferences.jsonl --sequence-length 512 \
        --tokenizer tokenizers/stdlib_2048/tokenizer.json
    zaya train --config=configs/dpo.py
    zaya generate runs/dpo --chat --prompt "What is a router?"

For ZAYA1-8B, make the changes that `configs/sft.py` lists, and set `data.sequence_length` here and in
`zaya data preferences` to the length of the longest pair, and the learning rates to 5e-7 and 0. With LoRA
(`lora.rank`) use ten times these learning rates.
"""

import sft
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The model and execution of `sft.py`, with preference data, the DPO loss and smaller learning rates."""
    config = sft.get_config()
    config.update(
        {
            "run_folder": "runs/dpo",
            "data": {"corpus": "corpora/preferences"},
            "dpo": {"beta": 0.1},
            "optimizer": {
                "learning_rate": 1e-4,  # a tenth of that of sft.py
                "final_learning_rate": 0.0,
                "weight_decay": 0.0,  # decay would move the model away from the reference
            },
            "train": {"init_from": "runs/sft", "num_steps": 200, "eval_every": 100, "log_every": 10},
        }
    )
    return config
