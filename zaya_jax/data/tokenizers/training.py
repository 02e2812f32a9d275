"""Trains a byte-level BPE tokenizer on the training split of a source.

Text that the corpus holds out is excluded here too. Otherwise the held-out bits per byte would be measured on
text that the tokenizer was trained on.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from zaya_jax.data.corpora.corpus import VALIDATION_PERCENT, training_texts
from zaya_jax.data.tokenizers.tokenizer_files import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    as_json,
    begin_with,
    transformers_config,
)
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.progress import working

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
CHAT_SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Special tokens of chats."""


@dataclasses.dataclass(frozen=True)
class TrainedTokenizer:
    """A trained tokenizer.

    Attributes:
      file: path of its tokenizer.json.
      vocab_size: number of tokens; smaller than requested if the text is small.
      text_bytes: size of the training texts in bytes.
      seconds: duration of the training.
    """

    file: pathlib.Path
    vocab_size: int
    text_bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"trained {self.file}: {self.vocab_size:,} tokens, from {self.text_bytes / 1e6:,.1f} MB of text "
            f"in {self.seconds:.1f} s"
        )


def train_tokenizer(
    folder: str | os.PathLike[str],
    *,
    source: str = "stdlib",
    pattern: str | None = None,
    vocab_size: int,
    specials: Sequence[str] = (),
    validation_percent: int = VALIDATION_PERCENT,
    overwrite: bool = False,
) -> TrainedTokenizer:
    """Trains a tokenizer and writes its folder, completely or not at all.

    The folder has a tokenizer.json and a tokenizer_config.json for transformers. The same texts yield the
    same file, byte for byte.

    Args:
      folder: folder of the new tokenizer, which must contain nothing else.
      source: "stdlib", a file or a folder with text, as in `build_corpus`.
      pattern: glob pattern of file names, as in `build_corpus`.
      vocab_size: number of tokens, including the 256 bytes and the special tokens.
      specials: further special tokens, after those for padding, end and start.
      validation_percent: share of the texts in percent that the corpus holds out.
      overwrite: whether to replace an existing tokenizer.

    Raises:
      UserError: if an argument is invalid, `folder` is not free, or there is no text.
      FileExistsError: if another process has written the folder first.
    """
    path, folder = pathlib.Path(folder), pathlib.Path(folder).resolve()
    # In this order, so that their ids 0 to 2 equal those of the byte tokenizer.
    names = [PAD, EOS, BOS, *specials]
    _check_names(names, vocab_size)
    _check_vacant(folder, overwrite=overwrite)
    texts = _Texts(source, pattern, validation_percent)
    begun = time.monotonic()
    tokenizer = _train(texts, vocab_size, names)
    # Known only after the training, which has read the texts.
    if not texts.num_bytes:
        raise UserError(f"there is no text in {source} to train a tokenizer on; all may be held out or empty")
    with durable.temporary_folder(folder, replace=overwrite) as aside:
        durable.write(aside / TOKENIZER, tokenizer.to_str(pretty=True))
        beside = transformers_config(bos_token=BOS, eos_token=EOS, pad_token=PAD)
        durable.write(aside / TOKENIZER_CONFIG, as_json(beside))
    size, seconds = tokenizer.get_vocab_size(), time.monotonic() - begun
    return TrainedTokenizer(path / TOKENIZER, size, texts.num_bytes, seconds)


def _check_names(names: Sequence[str], vocab_size: int) -> None:
    for name in names:
        if not name or names.count(name) > 1:
            raise UserError(f'the special token "{name}" is empty or occurs twice; the names must be unique')
    minimum = 256 + len(names)
    if vocab_size < minimum:
        raise UserError(
            f"the vocabulary size is {vocab_size}; it must be at least {minimum}: 256 bytes and "
            f"{', '.join(names)}"
        )


def _check_vacant(folder: pathlib.Path, *, overwrite: bool) -> None:
    if folder.is_file():
        raise UserError(f"{folder} is a file; a folder for {TOKENIZER} is required")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if others := sorted(names - {TOKENIZER, TOKENIZER_CONFIG}):
        raise UserError(f"{folder} has {others[0]}, which would be lost; choose another folder")
    if names and not overwrite:
        raise UserError(f"{folder} is already a tokenizer; --overwrite replaces it")


class _Texts:
    """The training texts; counts their bytes while they are read."""

    def __init__(self, source: str, pattern: str | None, validation_percent: int):
        self.num_bytes = 0
        self._texts = training_texts(source, pattern=pattern, validation_percent=validation_percent)

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.num_bytes += len(text.encode())
            yield text


def _train(texts: _Texts, vocab_size: int, names: Sequence[str]) -> tokenizers.Tokenizer:
    # Any, because the type stubs of the package lack its setters.
    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    # Byte-level: any text can be encoded, and each token has exactly its own bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=vocab_size,
        special_tokens=list(names),
        # All 256 bytes, including those that the training text lacks.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # its progress bars would only count to 0 of 0
    )
    with working(f"training a tokenizer of {vocab_size:,} tokens"):
        tokenizer.train_from_iterator(texts, trainer)
    # Only for transformers: `HuggingFaceTokenizer` never adds tokens itself.
    tokenizer.post_processor = begin_with(BOS, tokenizer.token_to_id(BOS))
    return tokenizer
