"""Text to batches: tokenizers, corpora of token shards, and the loader that reads them.

`tokenizer` turns text into ids, `corpus` writes and checks token shards, `batch` cuts a window of
tokens into an example, and `loader` gives the batch of any optimiser step.
"""
