"""Text to batches: tokenizers, corpora of token shards, and the loader that reads them.

`tokenizer` turns text into ids, `corpus` makes shards of a source, `shards` says what a corpus holds and
whether it still does, `blocks` writes and reads its tokens, `left_out` names what became none of them,
`batch` cuts a window of tokens into an example, and `loader` gives the batch of any optimiser step.
"""
