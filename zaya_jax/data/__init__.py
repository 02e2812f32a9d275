"""Text to batches: tokenizers, corpora of token shards, and the loader that reads them.

`tokenizer` turns text into ids, `corpus` makes shards of a source, `shards` says what a corpus holds and
whether it still does, `blocks` writes and reads its tokens, `left_out` names what became none of them,
`batch` cuts a window of tokens into an example, and `loader` gives the batch of any optimiser step.

Of instruction data, `chat_records` reads chats, `chat_template` writes one as text and `chat_format` as
tokens, `chat_trimming` makes it fit, `packing` says which share a window, `windows` how one is kept, and
`chat_corpus` does all of it.
"""
