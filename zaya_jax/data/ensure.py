"""What a run reads, made where it is missing and the run says of what: its tokenizer and its corpus."""

import contextlib
import pathlib

from zaya_jax.config import DataConfig
from zaya_jax.data.corpus import build_corpus
from zaya_jax.data.left_out import describe_left_out
from zaya_jax.data.shards import Corpus, describe_missing, open_corpus
from zaya_jax.data.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.data.tokenizer_files import TOKENIZER
from zaya_jax.data.tokenizer_training import CHAT_SPECIALS, train_tokenizer


def ensure_tokenizer(config: DataConfig) -> Tokenizer:
    """Loads the tokenizer that a run wants, training it on `config.source` when it is missing.

    Several processes may do this at once, as with a corpus: they make the same one.

    Raises:
      ValueError: as `load_tokenizer` and `train_tokenizer`, or when there is no corpus nor what makes one.
    """
    _check_corpus(config)
    file, size = pathlib.Path(config.tokenizer), config.tokenizer_vocab_size
    if size is not None and config.source is not None and file.name == TOKENIZER and not file.exists():
        with contextlib.suppress(FileExistsError):
            # With the borders of chats: an instruction run that starts from this one finds their rows.
            made = train_tokenizer(file.parent, source=config.source, vocab_size=size, specials=CHAT_SPECIALS)
            print(made)
    return tokenizer_of(config)


def _check_corpus(config: DataConfig) -> None:
    """First: of a corpus that is misspelt, the tokenizer that is missing too tells nothing."""
    if config.source is None and not pathlib.Path(config.corpus).exists():
        raise ValueError(
            f"{describe_missing(config.corpus)}, or the run itself with --config.data.source=TEXTS"
        )


def ensure_corpus(config: DataConfig) -> Corpus:
    """Opens the corpus that a run wants, building it from `config.source` when it is missing.

    Several processes may do this at once: the first to finish puts its corpus in place, and the
    others open that.

    Raises:
      ValueError: when it is missing with no source to build from, is damaged, or has another tokenizer.
    """
    tokenizer = ensure_tokenizer(config)
    if not pathlib.Path(config.corpus).exists():
        assert config.source is not None, "without one there is no tokenizer either"
        with contextlib.suppress(FileExistsError):
            corpus = build_corpus(config.corpus, source=config.source, tokenizer=tokenizer)
            print(describe_left_out(corpus.folder, corpus.left_out), end="")
    return open_corpus_for(config.corpus, config)


def open_corpus_for(folder: str, config: DataConfig) -> Corpus:
    """Opens a corpus that is to be of the tokenizer of a run.

    Raises:
      ValueError: as `open_corpus`, or when it is of another.
    """
    corpus, tokenizer = open_corpus(folder), tokenizer_of(config)
    if corpus.tokenizer_fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f'data.tokenizer is "{tokenizer.name}", and the corpus {folder} was made with '
            f'"{corpus.tokenizer}"; they must be the same'
        )
    # Not pad_id: what a split was filled up with is never read.
    ours, theirs = ((each.bos_id, each.eos_id) for each in (tokenizer, corpus))
    if ours != theirs:
        raise ValueError(
            f"data.tokenizer begins and ends documents with the tokens {ours}, and the corpus {folder} with "
            f"{theirs}; name those by data.bos_token and data.eos_token, or rebuild it"
        )
    return corpus
