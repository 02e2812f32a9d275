"""Bytes of text per token, for training batches, whose tokens are not traced back to their text.

Letters: V vocabulary.
"""

import numpy as np
from jaxtyping import Float

from zaya_jax.data.corpora.shards import Corpus
from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.parallel.processes import hosts


def token_text_bytes(tokenizer: Tokenizer, corpus: Corpus) -> Float[np.ndarray, " V"]:
    """Returns the bytes of text of each token in proportion to the bytes that it spells, shape [V].

    Over a whole training split they add up to the bytes of its texts, also if the tokenizer normalizes them.
    Held-out batches do not need this: the corpus stores the bytes of each of their tokens.
    """
    train = corpus.train
    if train.spelled_bytes:
        return tokenizer.spelled_bytes * (train.text_bytes / train.spelled_bytes)
    # A corpus of an older version.
    known_V = tokenizer.token_bytes()
    return _mean_bytes(tokenizer, corpus) if known_V is None else known_V.astype(np.float64)


def padded_text_bytes(tokenizer: Tokenizer, corpus: Corpus, *, vocab_size: int) -> Float[np.ndarray, " V"]:
    """`token_text_bytes` for a vocabulary of another size: 0 for tokens that the tokenizer does not have."""
    bytes_V = np.zeros(vocab_size)
    known_V = token_text_bytes(tokenizer, corpus)
    bytes_V[: len(known_V)] = known_V[:vocab_size]
    return bytes_V


def _mean_bytes(tokenizer: Tokenizer, corpus: Corpus) -> Float[np.ndarray, " V"]:
    """Returns the mean bytes per token of the held-out split, for every token."""
    delimiters, held_out = tokenizer.delimiters, corpus.validation
    # Delimiters are not part of any text.
    between = len(delimiters.opening) + held_out.documents * len(delimiters.wrap([]))
    mean = held_out.text_bytes / (held_out.tokens - between)
    if hosts.is_first():
        print(
            f"the tokenizer {tokenizer.name} does not define bytes per token: bits/byte uses {mean:.2f} for "
            "each, the mean of the held-out texts; build the corpus again to store the bytes of each token"
        )
    bytes_V = np.full(tokenizer.vocab_size, mean)
    bytes_V[[delimiters.first_id, delimiters.eos_id]] = 0
    return bytes_V
