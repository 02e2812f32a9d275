"""Text to batches: tokenizers, corpora of token shards, and the loader that reads them.

- `sources`: finds text, and reads documents from plain files, JSON Lines, Parquet and Arrow.
- `tokenizers`: converts text to token ids and back; trains, saves and loads tokenizers.
- `corpora`: builds, opens, verifies and inspects corpora of documents.
- `chats`: reads chats and pairs of answers, and packs them into windows; `chats.templates` renders
  chats and converts them to tokens and loss masks.
- `reading`: order, mixture, batches and the loader.
"""
