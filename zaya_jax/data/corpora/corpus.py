"""Builds a corpus: converts text to shards of token blocks, in a training and a held-out split.

A corpus is built in a temporary folder and renamed when it is complete, so that an incomplete corpus is never
read. `zaya_jax.data.corpora.shards` defines the format, `zaya_jax.data.corpora.assembly` writes the shards,
and `zaya_jax.data.sources.text_sources` finds the text.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zaya_jax.config import is_inside
from zaya_jax.data.corpora.assembly import StaleError, building_folder, discard, write_splits
from zaya_jax.data.corpora.document_stream import ON_BAD, DocumentStream, OnBad
from zaya_jax.data.corpora.held_out_bytes import FILE as BYTES_FILE
from zaya_jax.data.corpora.shards import (
    MANIFEST,
    SPLITS,
    Corpus,
    Split,
    describe_files,
    open_corpus,
    write_manifest,
)
from zaya_jax.data.corpora.split import SplitRule, by_hash, choose_split_rule
from zaya_jax.data.corpora.token_blocks import ShardFormat, hashes_file
from zaya_jax.data.sources.skipped import Skipped, count_reasons, write_skipped
from zaya_jax.data.sources.text_sources import TextSource, open_source
from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.files import durable

VALIDATION_PERCENT, BLOCK_TOKENS, SHARD_TOKENS = 5, 4096, 2**26
"""Defaults of `build_corpus`."""


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
    """Writes the texts of a source as a corpus, completely or not at all.

    The hash of a text's bytes determines its split. Corpora with the same `validation_percent` therefore hold
    out the same texts, whatever their path, name and number of copies, and adding a text moves no other text
    to another split. The hash of a file's path determines its position. The same source thus yields the same
    corpus on any machine, with any number of processes and interruptions. If the hash leaves a split empty,
    `choose_split_rule` decides what is held out. Files and folders whose name starts with a dot are ignored.
    Other entries without text, such as links to folders, are skipped and listed.

    Args:
      folder: folder of the new corpus.
      source: source of text, as `open_source` accepts it, or an opened one.
      pattern: glob pattern of file names, as `open_source` accepts it.
      field: field of records with the text, as `open_source` accepts it.
      tokenizer: tokenizer of the corpus.
      block_tokens: number of tokens per block.
      validation_percent: approximate share of held-out texts in percent. A larger share holds out everything
        that a smaller one does.
      shard_tokens: approximate number of tokens per shard file.
      on_bad: "stop" or "skip" at a record that is not text. A whole file that is not UTF-8 is always skipped.
      deduplicate: whether to skip exact copies of earlier texts.
      num_workers: number of worker processes; if above 1, `load_tokenizer` must be able to load the
        tokenizer.
      resume: whether to keep finished work when interrupted, and to continue from it.
      overwrite: whether to replace an existing corpus.
      advance: called with the number of bytes of the source that were processed.

    Raises:
      UserError: if an argument is invalid, `folder` is not free, or the source has too little text.
      OSError: if a file or folder of the source cannot be read.
    """
    # Resolved first: comparisons with the source need absolute paths without links.
    folder = pathlib.Path(folder).resolve()
    check_sizes(block_tokens=block_tokens, validation_percent=validation_percent, shard_tokens=shard_tokens)
    _check_work(num_workers=num_workers, on_bad=on_bad)
    # Checked before the work starts, although `durable.publish` checks again at the end.
    check_vacant(folder, overwrite=overwrite)
    source_name = str(source.root) if isinstance(source, TextSource) else source
    # The command passes an opened source, whose size it needs for the progress display.
    if not isinstance(source, TextSource):
        source = open_source(source, pattern=pattern, field=field)
    _check_apart(folder, source, source_name=source_name, tokenizer=tokenizer)
    recipe = _Recipe(
        source=source,
        split_rule=_choose_split_rule(source, validation_percent, on_bad),
        shard_format=ShardFormat(
            tokenizer=tokenizer, block_tokens=block_tokens, shard_blocks=max(1, shard_tokens // block_tokens)
        ),
        on_bad=on_bad,
        deduplicate=deduplicate,
    )
    with naming_corpus(folder), building_folder(folder, recipe.plan(), resume=resume) as work:
        _write(work, recipe, num_workers=num_workers, advance=advance)
        # A rename, so that no reader ever sees a partly written corpus.
        durable.publish(work / "corpus", folder, replace=overwrite)
    return open_corpus(folder)


@contextlib.contextmanager
def naming_corpus(folder: pathlib.Path) -> Iterator[None]:
    """Names the corpus in the error that is raised if another process has published it first."""
    try:
        yield
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "another process has built this corpus", str(folder)) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recipe:
    """Everything that the bytes of a corpus depend on."""

    source: TextSource
    split_rule: SplitRule
    shard_format: ShardFormat
    on_bad: OnBad
    deduplicate: bool

    @property
    def description(self) -> str:
        """Origin of the text, with a note if the split rule is not the usual one."""
        # Recorded in the manifest, because the held-out texts then differ from those of other corpora.
        note = self.split_rule.describe()
        return f"{self.source.description}{'; ' if note else ''}{note}"

    def plan(self) -> dict[str, Any]:
        """The recipe without the texts, as JSON; a build continues only from work with an equal plan."""
        tokenizer = self.shard_format.tokenizer
        return {
            # The description alone could be equal for two folders.
            "source": [self.description, str(self.source.root)],
            "tokenizer": [tokenizer.name, tokenizer.fingerprint, dataclasses.asdict(tokenizer.delimiters)],
            "blocks": [self.shard_format.block_tokens, self.shard_format.shard_blocks],
            "division": dataclasses.asdict(self.split_rule),
            "on_bad": self.on_bad,
            "deduplicate": self.deduplicate,
            # Distinguishes unfinished builds of older versions, which did not write this file.
            "files": BYTES_FILE,
        }


def _write(work: pathlib.Path, recipe: _Recipe, *, num_workers: int, advance: Callable[[int], None]) -> None:
    """Builds a corpus in the subfolder `corpus` of a building folder, reusing finished work."""
    stream = DocumentStream(
        recipe.source, recipe.split_rule, on_bad=recipe.on_bad, deduplicate=recipe.deduplicate
    )
    try:
        splits = write_splits(
            work,
            stream,
            recipe.split_rule,
            shard_format=recipe.shard_format,
            num_workers=num_workers,
            num_bytes=recipe.source.num_bytes,
            advance=advance,
        )
    except StaleError:
        discard(work)  # nothing is left that could be stale in the second attempt
        _write(work, recipe, num_workers=num_workers, advance=advance)
    else:
        _complete(work / "corpus", splits, stream.skipped, recipe)


def _check_apart(folder: pathlib.Path, source: TextSource, *, source_name: str, tokenizer: Tokenizer) -> None:
    """A corpus must not be read as its own source, nor be deleted together with its source or tokenizer."""
    # Otherwise the second build would read the shards of the first as text.
    if folder.is_relative_to(source.root):
        raise UserError(f"the corpus {folder} is inside its own source {source.root}; choose another folder")
    for kind, path, builtin in (("source", source_name, "stdlib"), ("tokenizer", tokenizer.name, "byte")):
        if path != builtin and is_inside(path, folder):
            raise UserError(f"the {kind} {path} is inside the corpus {folder}; --overwrite would delete it")


def check_sizes(*, block_tokens: int, validation_percent: int, shard_tokens: int) -> None:
    """Raises a UserError for invalid sizes of a corpus."""
    if block_tokens < 2:
        raise UserError(f"block_tokens is {block_tokens}; it must be at least 2: a token and its target")
    if not 1 <= validation_percent <= 99:
        raise UserError(f"validation_percent is {validation_percent}; it must be from 1 to 99")
    if shard_tokens < 1:
        raise UserError(f"shard_tokens is {shard_tokens}; it must be above 0")


def _check_work(*, num_workers: int, on_bad: str) -> None:
    if num_workers < 1:
        raise UserError(f"the number of workers is {num_workers}; it must be at least 1")
    if on_bad not in ON_BAD:
        raise UserError(f'on_bad is "{on_bad}"; it must be "stop" or "skip"')


def check_vacant(folder: pathlib.Path, *, overwrite: bool) -> None:
    """Raises a UserError if a folder cannot become a corpus."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; a corpus is a folder")
    if not any(folder.iterdir()):
        return
    # Even with --overwrite, only a corpus is deleted and never a folder with other files.
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} contains files but no {MANIFEST}; it must be empty, or a corpus for --overwrite to "
            "replace"
        )
    if not overwrite:
        raise UserError(f"{folder} is already a corpus; --overwrite replaces it")


def _choose_split_rule(source: TextSource, percent: int, on_bad: OnBad) -> SplitRule:
    """Chooses the split rule of a source, reading only as many texts as necessary.

    Raises:
      UserError: if the source has no text.
    """
    stream = DocumentStream(source, by_hash(percent), on_bad=on_bad, deduplicate=False)
    has_text = False

    def texts() -> Iterator[bytes]:
        nonlocal has_text
        for document in stream.documents():
            has_text = True
            yield document.raw

    split_rule = choose_split_rule(texts(), percent)
    if not has_text:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in count_reasons(stream.skipped).items())
        raise UserError(f"all {source.named} are without text ({reasons}); a corpus needs some text")
    return split_rule


def _complete(
    folder: pathlib.Path, splits: dict[str, Split], skipped: Sequence[Skipped], recipe: _Recipe
) -> None:
    """Turns a folder with shards into a corpus that can be opened."""
    names = {shard.file for split in splits.values() for shard in split.shards}
    names |= {hashes_file(name) for name in SPLITS} | {BYTES_FILE}
    for path in folder.iterdir():
        # Files such as a manifest of the interrupted attempt, which would not match.
        if path.name not in names:  # left by a build that was killed in this function
            path.unlink()
    write_skipped(folder, skipped)
    write_manifest(
        describe_corpus(
            folder,
            recipe.shard_format,
            source=recipe.description,
            train=splits["train"],
            validation=splits["validation"],
            left_out=count_reasons(skipped),
        )
    )
    open_corpus(folder)  # verify it before it replaces a corpus that works
    durable.sync_tree(folder)


def describe_corpus(folder: pathlib.Path, shard_format: ShardFormat, **fields: Any) -> Corpus:
    """Describes the files of a new corpus for its manifest.

    Args:
      folder: folder with all files except the manifest.
      shard_format: format of the shards.
      **fields: further fields of `Corpus`.
    """
    tokenizer = shard_format.tokenizer
    return Corpus(
        folder=folder,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        block_tokens=shard_format.block_tokens,
        dtype=shard_format.dtype,
        files=describe_files(folder),
        **fields,
    )


def training_texts(
    source: str,
    *,
    pattern: str | None = None,
    field: str | None = None,
    validation_percent: int = VALIDATION_PERCENT,
) -> Iterator[str]:
    """Yields the texts that `build_corpus` would put into the training split, in its order.

    Raises:
      UserError: as `open_source`, or if there is no text.
    """
    opened = open_source(source, pattern=pattern, field=field)
    # Broken records are skipped silently here: building the corpus reports them.
    split_rule = _choose_split_rule(opened, validation_percent, "skip")
    stream = DocumentStream(opened, split_rule, on_bad="skip", deduplicate=False)
    for document in stream.documents():
        for split, raw in split_rule.divide(document.raw):
            if split == "train":
                yield raw.decode("utf-8")
