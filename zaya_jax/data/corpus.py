"""A corpus: text made into shards of token blocks, in a training and a held-out split.

A corpus is written into a folder beside its place, and takes it when it is whole: nothing half-written
is taken for it. What lies in the folder is in `zaya_jax.data.shards`, how it comes there in
`zaya_jax.data.assembly`, and what it is made of in `zaya_jax.data.sources`.
"""

import dataclasses
import errno
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zaya_jax import durable
from zaya_jax.config import lies_in
from zaya_jax.data.assembly import StaleError, building_folder, forget, write_splits
from zaya_jax.data.blocks import ShardFormat, hashes_file
from zaya_jax.data.division import Division, by_hash, choose_division
from zaya_jax.data.intake import ON_BAD, Intake, OnBad
from zaya_jax.data.left_out import LeftOut, count_reasons, write_left_out
from zaya_jax.data.shards import (
    MANIFEST,
    SPLITS,
    Corpus,
    Split,
    describe_files,
    open_corpus,
    write_manifest,
)
from zaya_jax.data.sources import TextSource, open_source
from zaya_jax.data.tokenizer import Tokenizer

VALIDATION_PERCENT, BLOCK_TOKENS, SHARD_TOKENS = 5, 4096, 2**26
"""Of a corpus when nothing else is said."""


def build_corpus(
    folder: str | os.PathLike[str],
    *,
    source: str | TextSource = "stdlib",
    pattern: str | None = None,
    field: str | None = None,
    tokenizer: Tokenizer,
    block_tokens: int = BLOCK_TOKENS,
    validation_percent: int = VALIDATION_PERCENT,
    shard_tokens: int = SHARD_TOKENS,
    on_bad: OnBad = "stop",
    deduplicate: bool = False,
    num_workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> Corpus:
    """Writes the texts of a source as a corpus, all of it or nothing.

    A hash of a text's bytes decides its split, so that of several corpora with one
    `validation_percent` none trains on what another holds out: the same text is on the same side
    wherever it lies, whatever it is called and however often it is there. A hash of a file's path in the
    source decides its place. So the same tree gives the same corpus, whatever made it and however often it
    was stopped on the way, and a text that is added moves no other to another split. Where the hashes leave
    a split empty, `choose_division` says what is held out. Files and folders with a leading dot are no part
    of a source; what else has no text, such as a link to a folder, which is not followed, is left out and
    named.

    Args:
      folder: the corpus to be.
      source: as `open_source` takes it, or an open one.
      pattern: as `open_source` takes it.
      field: as `open_source` takes it.
      tokenizer: makes the tokens.
      block_tokens: tokens a record.
      validation_percent: share of the texts that is held out, about; what a smaller one holds out, a
        larger one does too.
      shard_tokens: tokens a shard file, about.
      on_bad: "stop" or "skip" at a record that is no text. A file of text that is not UTF-8 is left out.
      deduplicate: leaves out what is there already, byte for byte.
      num_workers: processes that make the tokens; with several, `load_tokenizer` must know the tokenizer.
      resume: leaves what is done when it is stopped, and goes on from there.
      overwrite: replaces a corpus that is there.
      advance: is told of bytes of the source that are done.

    Raises:
      ValueError: when an argument cannot be, `folder` is taken, or the source gives too little text.
      OSError: for a file or folder of the source that cannot be read.
    """
    folder = pathlib.Path(folder).resolve()
    check_sizes(block_tokens=block_tokens, validation_percent=validation_percent, shard_tokens=shard_tokens)
    _check_work(num_workers=num_workers, on_bad=on_bad)
    check_vacant(folder, overwrite=overwrite)
    given = str(source.root) if isinstance(source, TextSource) else source
    if not isinstance(source, TextSource):
        source = open_source(source, pattern=pattern, field=field)
    _check_apart(folder, source, given=given, tokenizer=tokenizer)
    shard_format = ShardFormat(
        tokenizer=tokenizer, block_tokens=block_tokens, shard_blocks=max(1, shard_tokens // block_tokens)
    )
    recipe = _Recipe(
        source=source,
        division=_choose_division(source, validation_percent, on_bad),
        shard_format=shard_format,
        on_bad=on_bad,
        deduplicate=deduplicate,
    )
    try:
        with building_folder(folder, recipe.plan(), resume=resume) as work:
            _write(work, recipe, num_workers=num_workers, advance=advance)
            durable.publish(work / "corpus", folder, replace=overwrite)
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "another process has built this corpus", str(folder)) from error
    return open_corpus(folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recipe:
    """What the bytes of a corpus depend on."""

    source: TextSource
    division: Division
    shard_format: ShardFormat
    on_bad: OnBad
    deduplicate: bool

    @property
    def description(self) -> str:
        """Where the text comes from, and what is out of the ordinary with it."""
        unusual = self.division.describe()
        return f"{self.source.description}{'; ' if unusual else ''}{unusual}"

    def plan(self) -> dict[str, Any]:
        """All of it but the texts, which an earlier build had too that can be gone on with."""
        tokenizer = self.shard_format.tokenizer
        return {
            "source": [self.description, str(self.source.root)],
            "tokenizer": [tokenizer.name, tokenizer.fingerprint, dataclasses.asdict(tokenizer.borders)],
            "blocks": [self.shard_format.block_tokens, self.shard_format.shard_blocks],
            "division": dataclasses.asdict(self.division),
            "on_bad": self.on_bad,
            "deduplicate": self.deduplicate,
        }


def _write(work: pathlib.Path, recipe: _Recipe, *, num_workers: int, advance: Callable[[int], None]) -> None:
    """Makes a corpus in the folder `corpus` of a building folder, or completes what is there."""
    intake = Intake(recipe.source, recipe.division, on_bad=recipe.on_bad, deduplicate=recipe.deduplicate)
    try:
        splits = write_splits(
            work,
            intake,
            recipe.division,
            shard_format=recipe.shard_format,
            num_workers=num_workers,
            num_bytes=recipe.source.num_bytes,
            advance=advance,
        )
    except StaleError:
        forget(work)  # so that nothing is stale the second time
        _write(work, recipe, num_workers=num_workers, advance=advance)
    else:
        _complete(work / "corpus", splits, intake.left_out, recipe)


def _check_apart(folder: pathlib.Path, source: TextSource, *, given: str, tokenizer: Tokenizer) -> None:
    """A corpus must neither be read as its own source nor be removed with what it is made of."""
    if folder.is_relative_to(source.root):
        raise ValueError(f"the corpus {folder} lies in its own source {source.root}; it must lie elsewhere")
    for what, path, harmless in (("source", given, "stdlib"), ("tokenizer", tokenizer.name, "byte")):
        if path != harmless and lies_in(path, folder):
            raise ValueError(f"the {what} {path} lies in the corpus {folder}; --overwrite would remove it")


def check_sizes(*, block_tokens: int, validation_percent: int, shard_tokens: int) -> None:
    """Raises a ValueError for a size that no corpus can have."""
    if block_tokens < 2:
        raise ValueError(f"block_tokens is {block_tokens}; it must be at least 2: a token and its target")
    if not 1 <= validation_percent <= 99:
        raise ValueError(f"validation_percent is {validation_percent}; it must be from 1 to 99")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens is {shard_tokens}; it must be above 0")


def _check_work(*, num_workers: int, on_bad: str) -> None:
    if num_workers < 1:
        raise ValueError(f"the number of workers is {num_workers}; it must be at least 1")
    if on_bad not in ON_BAD:
        raise ValueError(f'on_bad is "{on_bad}"; it must be "stop" or "skip"')


def check_vacant(folder: pathlib.Path, *, overwrite: bool) -> None:
    """Raises a ValueError for a folder that a corpus cannot take."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; a corpus is a folder")
    if not any(folder.iterdir()):
        return
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} has files and no {MANIFEST}; it must be empty, or a corpus for --overwrite to replace"
        )
    if not overwrite:
        raise ValueError(f"{folder} is a corpus already; --overwrite replaces it")


def _choose_division(source: TextSource, percent: int, on_bad: OnBad) -> Division:
    """The division of a source's texts, of which it reads as many as that takes.

    Raises:
      ValueError: when there are none.
    """
    intake = Intake(source, by_hash(percent), on_bad=on_bad, deduplicate=False)
    some = False

    def texts() -> Iterator[bytes]:
        nonlocal some
        for document in intake.texts():
            some = True
            yield document.raw

    division = choose_division(texts(), percent)
    if not some:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in count_reasons(intake.left_out).items())
        raise ValueError(f"all {source.named} are without text ({reasons}); a corpus needs some")
    return division


def _complete(
    folder: pathlib.Path, splits: dict[str, Split], left_out: Sequence[LeftOut], recipe: _Recipe
) -> None:
    """Makes a corpus of a folder with shards, one that can be opened."""
    names = {shard.file for split in splits.values() for shard in split.shards}
    names |= {hashes_file(name) for name in SPLITS}
    for path in folder.iterdir():
        if path.name not in names:  # of a build that was killed right here
            path.unlink()
    write_left_out(folder, left_out)
    write_manifest(_describe(folder, splits, recipe, count_reasons(left_out)))
    open_corpus(folder)  # what a run could not open must not take the place of what it can
    durable.sync_tree(folder)


def _describe(
    folder: pathlib.Path,
    splits: dict[str, Split],
    recipe: _Recipe,
    left_out: dict[str, int],
) -> Corpus:
    shard_format = recipe.shard_format
    return Corpus(
        folder=folder,
        tokenizer=shard_format.tokenizer.name,
        tokenizer_fingerprint=shard_format.tokenizer.fingerprint,
        vocab_size=shard_format.tokenizer.vocab_size,
        bos_id=shard_format.tokenizer.bos_id,
        eos_id=shard_format.tokenizer.eos_id,
        pad_id=shard_format.tokenizer.pad_id,
        block_tokens=shard_format.block_tokens,
        dtype=shard_format.dtype,
        source=recipe.description,
        train=splits["train"],
        validation=splits["validation"],
        left_out=left_out,
        files=describe_files(folder),
    )


def training_texts(
    source: str,
    *,
    pattern: str | None = None,
    field: str | None = None,
    validation_percent: int = VALIDATION_PERCENT,
) -> Iterator[str]:
    """The texts that `build_corpus` puts into the training split, in its order.

    Raises:
      ValueError: as `open_source`, or when there are none.
    """
    opened = open_source(source, pattern=pattern, field=field)
    # What is broken is told of by whoever builds the corpus.
    division = _choose_division(opened, validation_percent, "skip")
    for document in Intake(opened, division, on_bad="skip", deduplicate=False).texts():
        for split, raw in division.divide(document.raw):
            if split == "train":
                yield raw.decode("utf-8")
