"""Bytes of the original text of each held-out token, so that bits per byte refer to the original text.

What a token spells is not always what the text contained: a tokenizer may fold case, squeeze spaces, add a
space in front, or replace a letter by the unknown token. The bytes of a document are therefore divided among
its tokens in proportion to what they spell, and add up to the size of the document. If the tokenizer spells
every byte, each token has exactly its own bytes.

Letters: N tokens of a document.
"""

import pathlib

import numpy as np
from jaxtyping import Integer, UInt

from zaya_jax.data.corpora.shards import Corpus
from zaya_jax.errors import DamagedError
from zaya_jax.files import durable

FILE = "validation.token_bytes"
"""File in a corpus folder with the bytes of each token of the held-out stream; absent in older corpora."""
DTYPE = np.dtype("<u4")


def divide_bytes(spelled_N: Integer[np.ndarray, " N"], num_bytes: int) -> UInt[np.ndarray, " N_and_end"]:
    """Divides the bytes of a document among its tokens and the token that ends it.

    Args:
      spelled_N: number of bytes that each token spells, shape [N].
      num_bytes: size of the document in bytes.

    Returns:
      Bytes of each token and of the end token, shape [N + 1]. The end token has bytes only if no token of
      the document spells any.
    """
    ends_N = np.cumsum(spelled_N, dtype=np.int64)
    total = int(ends_N[-1]) if len(ends_N) else 0
    if total == 0:
        return np.append(np.zeros(len(ends_N), DTYPE), DTYPE.type(num_bytes))
    if total != num_bytes:
        # Round the cumulative sums, not the single values, so that they add up to the document exactly.
        ends_N = (ends_N * (num_bytes / total)).round().astype(np.int64)
        ends_N[-1] = num_bytes
    return np.append(np.diff(ends_N, prepend=0), 0).astype(DTYPE)


def held_out_text_bytes(corpus: Corpus, num_tokens: int | None) -> int | None:
    """Bytes of the original text in the targets of the first held-out tokens.

    Args:
      corpus: corpus of documents.
      num_tokens: number of input tokens from the start of the stream; None for all.

    Returns:
      The number of bytes. None if only a part of the split is requested from an older corpus, which does not
      have the bytes of each token.

    Raises:
      DamagedError: if the file of the bytes is damaged.
    """
    split = corpus.validation
    if num_tokens is None or num_tokens >= split.tokens:
        return split.text_bytes
    # The caller then estimates from the bytes that tokens spell.
    if FILE not in corpus.files:
        return None
    path = corpus.folder / FILE
    if not path.is_file() or durable.content_hash(path) != corpus.files[FILE].xxh3_128:
        raise DamagedError(f"{path} is not as it was written; restore it, or rebuild the corpus")
    # The first token of the stream is never a target, but it is a delimiter and has no bytes.
    bytes_N = np.memmap(path, DTYPE, mode="r")
    return int(bytes_N[: num_tokens + 1].sum(dtype=np.int64))


def join_parts(parts: list[pathlib.Path], *, opening: int, file: pathlib.Path) -> None:
    """Concatenates the bytes of the parts of a held-out split.

    Args:
      parts: files of the parts, in stream order.
      opening: number of tokens before the first document, which have no bytes.
      file: file to write.
    """
    with file.open("wb") as joined:
        joined.write(bytes(opening * DTYPE.itemsize))
        for part in parts:
            joined.write(part.read_bytes())
