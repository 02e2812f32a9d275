"""Training a tokenizer: byte-level BPE on the texts that a corpus of the same source trains on.

What a corpus holds out is held out here too, or the held-out bits per byte would be of text that the
tokenizer has seen.
"""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from zaya_jax import durable
from zaya_jax.data.corpus import VALIDATION_PERCENT, training_texts
from zaya_jax.data.tokenizer_files import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    as_json,
    begin_with,
    transformers_config,
)

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
CHAT_SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Tokens that chats are written with."""


@dataclasses.dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer that was trained.

    Attributes:
      file: its tokenizer.json.
      vocab_size: its tokens, which a small text may keep below those that were asked for.
      text_bytes: of the texts that it was trained on.
      seconds: that it took.
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
    """Writes a folder with a tokenizer.json and what transformers wants beside it, all of it or nothing.

    The same texts give the same file, byte for byte.

    Args:
      folder: to be, in which nothing else will lie.
      source: "stdlib", a file or a folder with text, as `build_corpus`.
      pattern: names of the files to take, as of `build_corpus`.
      vocab_size: tokens, with those for bytes and the special ones.
      specials: further special tokens, behind those that pad, end and begin.
      validation_percent: that the corpus will hold out.
      overwrite: replaces a tokenizer that is there.

    Raises:
      ValueError: when an argument cannot be, `folder` is taken, or there is no text.
      FileExistsError: when another process was first.
    """
    given, folder = pathlib.Path(folder), pathlib.Path(folder).resolve()
    names = [PAD, EOS, BOS, *specials]
    _check_names(names, vocab_size)
    _check_vacant(folder, overwrite=overwrite)
    texts = _Texts(source, pattern, validation_percent)
    begun = time.monotonic()
    tokenizer = _train(texts, vocab_size, names)
    if not texts.num_bytes:
        raise ValueError(
            f"there is no text in {source} to train a tokenizer on; all may be held out or empty"
        )
    with durable.folder_aside(folder, replace=overwrite) as aside:
        durable.write(aside / TOKENIZER, tokenizer.to_str(pretty=True))
        beside = transformers_config(bos_token=BOS, eos_token=EOS, pad_token=PAD)
        durable.write(aside / TOKENIZER_CONFIG, as_json(beside))
    size, seconds = tokenizer.get_vocab_size(), time.monotonic() - begun
    return TrainedTokenizer(given / TOKENIZER, size, texts.num_bytes, seconds)


def _check_names(names: Sequence[str], vocab_size: int) -> None:
    for name in names:
        if not name or names.count(name) > 1:
            raise ValueError(f'the special token "{name}" is empty or there twice; each must be another')
    least = 256 + len(names)
    if vocab_size < least:
        raise ValueError(
            f"the vocabulary is to have {vocab_size} tokens; it must have at least {least}: 256 bytes and "
            f"{', '.join(names)}"
        )


def _check_vacant(folder: pathlib.Path, *, overwrite: bool) -> None:
    if folder.is_file():
        raise ValueError(f"{folder} is a file; a tokenizer that is trained is a folder with {TOKENIZER}")
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if others := sorted(found - {TOKENIZER, TOKENIZER_CONFIG}):
        raise ValueError(f"{folder} has {others[0]}, which would be lost; choose another folder")
    if found and not overwrite:
        raise ValueError(f"{folder} is a tokenizer already; --overwrite replaces it")


class _Texts:
    """The texts to train on, counted as they are read."""

    def __init__(self, source: str, pattern: str | None, validation_percent: int):
        self.num_bytes = 0
        self._texts = training_texts(source, pattern=pattern, validation_percent=validation_percent)

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.num_bytes += len(text.encode())
            yield text


def _train(texts: _Texts, vocab_size: int, names: Sequence[str]) -> tokenizers.Tokenizer:
    # Any: the package's stubs leave out its setters.
    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=vocab_size,
        special_tokens=list(names),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = begin_with(BOS, tokenizer.token_to_id(BOS))
    return tokenizer
