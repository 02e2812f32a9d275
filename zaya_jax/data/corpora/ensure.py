"""Opens the tokenizer and the corpus of a run, creating them first if they are missing."""

import contextlib
import pathlib
from collections.abc import Callable, Mapping

from zaya_jax.config import DataConfig
from zaya_jax.data.chats.chat_corpus import build_chat_corpus
from zaya_jax.data.chats.labeled_corpus import build_labeled_corpus
from zaya_jax.data.chats.packed_corpus import PackedReport, PackingOptions
from zaya_jax.data.chats.preference_corpus import build_preference_corpus
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import Corpus, describe_missing, open_corpus
from zaya_jax.data.sources.skipped import describe_skipped
from zaya_jax.data.tokenizers.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.data.tokenizers.tokenizer_files import TOKENIZER
from zaya_jax.data.tokenizers.training import CHAT_SPECIALS, train_tokenizer
from zaya_jax.errors import UserError
from zaya_jax.progress import working


def ensure_tokenizer(config: DataConfig) -> Tokenizer:
    """Loads the tokenizer of a run, after training it on `config.source` if it is missing.

    Several processes may call this at the same time; each would train the same tokenizer, and the first one
    to finish publishes it.

    Raises:
      UserError: as `load_tokenizer` and `train_tokenizer`; or if the corpus is missing and cannot be built.
    """
    _check_corpus(config)
    file, size = pathlib.Path(config.tokenizer), config.tokenizer_vocab_size
    if size is not None and config.source is not None and file.name == TOKENIZER and not file.exists():
        with contextlib.suppress(FileExistsError):
            # Includes the special tokens of chats, so that a later instruction run on this base model finds
            # embedding rows for them.
            trained = train_tokenizer(
                file.parent, source=config.source, vocab_size=size, specials=CHAT_SPECIALS
            )
            print(trained)
    return tokenizer_of(config)


def _check_corpus(config: DataConfig) -> None:
    """Reports a misspelled corpus before its missing tokenizer, which is only a consequence."""
    if config.source is None and not pathlib.Path(config.corpus).exists():
        raise UserError(
            f"{describe_missing(config.corpus)}, or let the run build it with --config.data.source=TEXTS"
        )


def ensure_corpus(config: DataConfig) -> Corpus:
    """Opens the corpus of a run, after building it from `config.source` if it is missing.

    Several processes may call this at the same time; the first one to finish publishes its corpus, and the
    others open it.

    Raises:
      UserError: if it is missing and there is no source, is damaged, or has another tokenizer.
    """
    tokenizer = ensure_tokenizer(config)
    if not pathlib.Path(config.corpus).exists():
        assert config.source is not None, "_check_corpus has checked it"
        with contextlib.suppress(FileExistsError):
            with working(f"building the corpus {config.corpus} from {config.source}"):
                left_out = _build(config, config.source, tokenizer)
            # A run prints what was skipped, because nobody sees the output of `zaya data build`.
            print(describe_skipped(pathlib.Path(config.corpus), left_out), end="")
    return open_corpus_for(config.corpus, config)


def _build(config: DataConfig, source: str, tokenizer: Tokenizer) -> Mapping[str, int]:
    """Builds the corpus, and returns what was skipped."""
    if config.source_kind == "text":
        return build_corpus(config.corpus, source=source, tokenizer=tokenizer).left_out
    # Records are packed for the length that the run reads, because a window is read as a whole.
    builders: dict[str, Callable[..., PackedReport]] = {
        "chats": build_chat_corpus,
        "preferences": build_preference_corpus,
        "answers": build_labeled_corpus,
    }
    options: PackingOptions = {
        "source": source,
        "tokenizer": tokenizer,
        "sequence_length": config.sequence_length,
    }
    return builders[config.source_kind](config.corpus, **options).corpus.left_out


def open_corpus_for(folder: str, config: DataConfig) -> Corpus:
    """Opens a corpus, and checks that it has the tokenizer of a run.

    Raises:
      UserError: as `open_corpus`, or if the corpus has another tokenizer.
    """
    corpus, tokenizer = open_corpus(folder), tokenizer_of(config)
    # Older versions ignored the tokens that files next to a tokenizer.json declare, so that their corpora
    # have the fingerprint of that file alone.
    if corpus.tokenizer_fingerprint not in (tokenizer.fingerprint, tokenizer.file_fingerprint):
        raise UserError(
            f'data.tokenizer is "{tokenizer.name}", but the corpus {folder} was made with '
            f'"{corpus.tokenizer}"; they must be the same'
        )
    # pad_id may differ: padding is never read as a token.
    ours, theirs = ((each.bos_id, each.eos_id) for each in (tokenizer, corpus))
    if ours != theirs:
        raise UserError(
            f"data.tokenizer starts and ends documents with the tokens {ours}, but the corpus {folder} with "
            f"{theirs}; set data.bos_token and data.eos_token to those, or rebuild the corpus"
        )
    return corpus
