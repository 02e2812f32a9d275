"""A run on preferences: pairs of answers, from the weights of an instruction run, which are the reference.

    zaya train --config=configs/sft.py               # the weights: runs/sft
    zaya data preferences corpora/preferences --source preferences.jsonl --sequence-length 512 \
        --tokenizer tokenizers/stdlib_2048/tokenizer.json
    zaya train --config=configs/dpo.py
    zaya generate runs/dpo --chat --prompt "What is a router?"

With ZAYA1-8B change what `configs/sft.py` says; `data.sequence_length` to the longest pair that is to be
learned, in both, and the learning rates to 5e-7 and 0. With adapters (`lora.rank`) ten times as much.
"""

import sft
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The model and execution of the instruction run, with other data, loss, learning rates and length."""
    config = sft.get_config()
    config.update(
        {
            "run_folder": "runs/dpo",
            "data": {"corpus": "corpora/preferences"},
            "dpo": {"beta": 0.1},
            "optimizer": {
                "learning_rate": 1e-4,  # a tenth of the instruction run's
                "final_learning_rate": 0.0,
                "weight_decay": 0.0,  # of it the reference knows nothing
            },
            "train": {"init_from": "runs/sft", "num_steps": 200, "eval_every": 100, "log_every": 10},
        }
    )
    return config
