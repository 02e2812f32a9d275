"""Text to batches: tokenizers, corpora of token shards, and the loader that reads them.

`sources` finds text and `json_lines` and `tables` read records of it, `intake` sorts out what is none and
`division` what is held out. `tokenizer` turns text into ids, `tasks` does so in processes and `assembly`
makes shards of what they made, `corpus` a corpus of all. `shards` says what a corpus holds and whether it
still does, `blocks` writes and reads its tokens, `left_out` names what became none of them,
`batch` cuts a window of tokens into an example, and `loader` gives the batch of any optimiser step.

Of instruction data, `chat_records` reads chats, `chat_template` writes one as text and `chat_format` as
tokens, `chat_trimming` makes it fit, `packing` says which share a window, `windows` how one is kept,
`packed_corpus` writes all of them, and `chat_corpus` does all of it. `preference_records` and
`preference_corpus` do so of pairs of answers.
"""
