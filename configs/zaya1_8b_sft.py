"""Fine-tunes all weights of ZAYA1-8B on a file of chats.

    zaya convert Zyphra/ZAYA1-8B runs/zaya1_8b       # or a local folder, after `hf download`
    zaya train --config=configs/zaya1_8b_sft.py --config.data.source=chats.jsonl
    zaya serve runs/zaya1_8b_sft

The run packs the chats with the model's template, and derives its steps, warm-up and evaluations from their
number. It needs the memory of 8 MI300X, or of one with the fields that docs/howto/chat-finetuning.md names.
"""

import zaya1_8b
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """ZAYA1-8B and its execution, with the data, length and learning rates of a fine-tuning."""
    config = zaya1_8b.get_config()
    config.phases = ()
    config.update(
        {
            "run_folder": "runs/zaya1_8b_sft",
            "model": {"rope_theta": 5_000_000.0},  # that of the released weights: [ZAYA1-8B] Table II
            "data": {
                "corpus": "corpora/chats",
                "source": "chats.jsonl",
                "source_kind": "chats",
                "mixtures": (),
                "mixture": None,
                "tokenizer": "runs/zaya1_8b/tokenizer/tokenizer.json",
                "sequence_length": 8192,  # ours
                "batch_size": 16,  # ours: two windows per GPU of a node
            },
            "optimizer": {
                "schedule": "linear",
                "learning_rate": 5e-5,  # the last phase of `zaya1_8b.py`
                "final_learning_rate": 5e-6,
                "warmup_steps": 0,
                "warmup_fraction": 0.03,  # ours
            },
            "balancing": {"learning_rate": 0.0},  # ours: the biases of the released weights stay
            "train": {
                "init_from": "runs/zaya1_8b",
                "epochs": 3.0,  # ours
                "evaluations": 3,
                "eval_sequences": None,
                "log_every": 1,
                "sample_tokens": 0,  # unconditional samples are not useful for a chat model
            },
            "execution": {"remat": "attention_and_experts", "node_devices": 1, "loss_chunk": 8192},
        }
    )
    return config
