"""Instruction fine-tuning on chats, from the weights of another run, with a small learning rate.

    zaya train                                       # the base: runs/tiny
    zaya data chats corpora/chats --source chats.jsonl --sequence-length 512 \
        --tokenizer tokenizers/stdlib_2048/tokenizer.json
    zaya train --config=configs/sft.py
    zaya generate runs/sft --chat --prompt "What is a router?"

`configs/zaya1_8b_sft.py` fine-tunes ZAYA1-8B.
"""

import tiny
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The base model and its execution, with data, learning rates and length for fine-tuning."""
    config = tiny.get_config()
    config.update(
        {
            "run_folder": "runs/sft",
            "data": {
                "corpus": "corpora/chats",
                "source": None,
                "tokenizer_vocab_size": None,  # the base's tokenizer, which has chat delimiters
                "sequence_length": 512,  # that of the packed corpus
                "batch_size": 8,
            },
            "optimizer": {
                "schedule": "linear",
                "learning_rate": 1e-3,  # a tenth of the base model's
                "final_learning_rate": 1e-4,
                "warmup_steps": 20,
            },
            "train": {
                "init_from": "runs/tiny",
                "sample_tokens": 0,  # unconditional samples are not useful for a chat model
            },
        }
    )
    return config
