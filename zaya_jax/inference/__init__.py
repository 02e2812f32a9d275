"""Inference: text generation, chat sessions, test-time compute and evaluation with trained weights.

- `engine`: the decoder (`prefill_chunk`, `decode_steps`), static batches (`generate`), continuous batching
  (`Engine`), and the incremental detokenizer.
- `completion`: texts of prompts, with stop strings and log-probabilities.
- `command`, `batch_generation`: `zaya generate`, for one prompt and for files of prompts.
- `line_texts`: texts of many prompts with continuous batching, for files and for `rsa`.
- `chat`: `zaya chat`. `rsa`: `zaya think`. `evaluation`: `zaya eval`, and tasks of lm-eval during training.
"""
