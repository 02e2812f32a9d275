"""A corpus: text files made into shards of token blocks, in a training and a held-out split.

A corpus is written into a folder beside its place, and takes it when it is whole: nothing half-written
is taken for it. What lies in the folder is in `zaya_jax.data.shards`.
"""

import argparse
import contextlib
import dataclasses
import errno
import fnmatch
import hashlib
import lzma
import os
import pathlib
import platform
import stat
import sysconfig
import zlib
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text

from zaya_jax.config import DataConfig, lies_in
from zaya_jax.data.blocks import BlockWriter, ShardFormat
from zaya_jax.data.left_out import LeftOut, count_reasons, describe_left_out, printable, write_left_out
from zaya_jax.data.shards import (
    MANIFEST,
    SPLITS,
    Corpus,
    Split,
    describe_files,
    describe_missing,
    open_corpus,
    verify_corpus,
    write_manifest,
)
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.durable import folder_aside
from zaya_jax.options import Parser
from zaya_jax.tables import name_column, number_column

# Beside what others installed, tests: they hold generated data, bad syntax and other encodings.
_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


# Building


def build_corpus(
    folder: str | os.PathLike[str],
    *,
    source: str = "stdlib",
    pattern: str | None = None,
    tokenizer: Tokenizer,
    block_tokens: int = 4096,
    validation_percent: int = 5,
    shard_tokens: int = 2**26,
    overwrite: bool = False,
) -> Corpus:
    """Writes the text files of a folder as a corpus, all of it or nothing.

    A hash of a file's bytes decides its split, so that of several corpora with one
    `validation_percent` none trains on what another holds out: the same text is on the same side
    wherever it lies, whatever it is called and however often it is there. A hash of its path in the
    source decides its place. So the same tree gives the same corpus, and a file that is added moves
    no other to another split. Files and folders with a leading dot are no part of the source; what else
    has no text, such as a link to a folder, which is not followed, is left out and named.

    Args:
      folder: the corpus to be.
      source: "stdlib" for Python's own library without its tests, or a folder.
      pattern: names of the files to take; "*.py" for "stdlib" and "*" for a folder when None.
      tokenizer: makes the tokens.
      block_tokens: tokens a record.
      validation_percent: share of the files that is held out, about; what a smaller one holds out, a
        larger one does too.
      shard_tokens: tokens a shard file, about.
      overwrite: replaces a corpus that is there.

    Raises:
      ValueError: when an argument cannot be, `folder` is taken, or the source gives no text for a split.
      OSError: for a file or folder of the source that cannot be read.
    """
    folder = pathlib.Path(folder).resolve()
    check_sizes(block_tokens=block_tokens, validation_percent=validation_percent, shard_tokens=shard_tokens)
    check_vacant(folder, overwrite=overwrite)
    origin = _find_origin(source, pattern)
    _check_apart(folder, origin, source=source, tokenizer=tokenizer)
    paths, left_out = _list_files(origin)

    shard_format = ShardFormat(
        tokenizer=tokenizer, block_tokens=block_tokens, shard_blocks=max(1, shard_tokens // block_tokens)
    )
    try:
        with folder_aside(folder, replace=overwrite) as aside:
            splits, without_text = _write_splits(
                aside, paths, shard_format=shard_format, origin=origin, validation_percent=validation_percent
            )
            left_out += without_text
            write_left_out(aside, left_out)
            write_manifest(_describe(aside, splits, shard_format, origin, count_reasons(left_out)))
            open_corpus(aside)  # what a run could not open must not take the place of what it can
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "another process has built this corpus", str(folder)) from error
    return open_corpus(folder)


def _check_apart(folder: pathlib.Path, origin: "_Origin", *, source: str, tokenizer: Tokenizer) -> None:
    """A corpus must neither be read as its own source nor be removed with what it is made of."""
    if folder.is_relative_to(origin.root):
        raise ValueError(f"the corpus {folder} lies in its own source {origin.root}; it must lie elsewhere")
    for what, path, given in (("source", source, "stdlib"), ("tokenizer", tokenizer.name, "byte")):
        if path != given and lies_in(path, folder):
            raise ValueError(f"the {what} {path} lies in the corpus {folder}; --overwrite would remove it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Origin:
    """Where text comes from: a folder, the names to take, folders to leave out, and how it is called."""

    root: pathlib.Path
    pattern: str
    excluded: frozenset[str]
    description: str


def check_sizes(*, block_tokens: int, validation_percent: int, shard_tokens: int) -> None:
    """Raises a ValueError for a size that no corpus can have."""
    if block_tokens < 2:
        raise ValueError(f"block_tokens is {block_tokens}; it must be at least 2: a token and its target")
    if not 1 <= validation_percent <= 99:
        raise ValueError(f"validation_percent is {validation_percent}; it must be from 1 to 99")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens is {shard_tokens}; it must be above 0")


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


def _find_origin(source: str, pattern: str | None) -> _Origin:
    if source == "stdlib":
        return _Origin(
            root=pathlib.Path(sysconfig.get_paths()["stdlib"]).resolve(),
            pattern=pattern or "*.py",
            excluded=_STDLIB_EXCLUDED,
            description=f"stdlib of Python {platform.python_version()}",
        )
    root = pathlib.Path(source).resolve()
    if not root.is_dir():
        raise ValueError(f'there is no source folder {root}; it must be a folder of text files, or "stdlib"')
    return _Origin(root=root, pattern=pattern or "*", excluded=frozenset(), description=str(root))


def _list_files(origin: _Origin) -> tuple[list[str], list[LeftOut]]:
    """Paths, relative to the root, of the files that the pattern takes, in the order of their hashes.

    Returns:
      The paths, and what has such a name but is no file.

    Raises:
      ValueError: when it takes none.
    """
    paths: list[str] = []
    left_out: list[LeftOut] = []
    for parent, folders, names in os.walk(origin.root, onerror=_raise):
        folders[:] = [name for name in folders if name not in origin.excluded and not name.startswith(".")]
        # A link may lead back to where it lies; os.walk follows none.
        links = [name for name in folders if pathlib.Path(parent, name).is_symlink()]
        taken = [name for name in fnmatch.filter(names, origin.pattern) if not name.startswith(".")]
        for place in (pathlib.Path(parent, name) for name in (*links, *taken)):
            path, reason = place.relative_to(origin.root).as_posix(), _why_no_file(place)
            if reason is None:
                paths.append(path)
            else:
                left_out.append(LeftOut(path, reason))
    if not paths:
        raise ValueError(
            f'no file in {origin.root} has a name like "{origin.pattern}"; a corpus needs some text'
        )
    return sorted(paths, key=lambda path: (_hash(os.fsencode(path)), path)), left_out


def _why_no_file(path: pathlib.Path) -> str | None:
    """What lies at a path, as a reason to leave it out; None for a file, or a link to one.

    Opening a pipe or some devices would wait for ever.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        if path.is_symlink():
            return "a link to nothing"
        raise
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return "a link to a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _raise(error: OSError) -> NoReturn:
    raise error


def _hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest())


def _write_splits(
    folder: pathlib.Path,
    paths: Sequence[str],
    *,
    shard_format: ShardFormat,
    origin: _Origin,
    validation_percent: int,
) -> tuple[dict[str, Split], list[LeftOut]]:
    """Reads each file once and streams it to its split; at most one document is in memory.

    Returns:
      The splits, and the files without text.

    Raises:
      ValueError: when a split gets no text.
    """
    writers = {name: _SplitWriter(folder, name, shard_format) for name in SPLITS}
    buckets: set[int] = set()
    left_out: list[LeftOut] = []
    for path in paths:
        raw = _read(origin.root / path)
        # Not of the path: a file that two overlapping sources share has two of them.
        bucket = _hash(raw) % 100
        without = writers["validation" if bucket < validation_percent else "train"].append(path, raw)
        if without is None:
            buckets.add(bucket)
        else:
            left_out.append(without)
    splits = {name: writer.finish() for name, writer in writers.items()}
    _check_splits(splits, buckets, origin=origin, validation_percent=validation_percent)
    return splits, left_out


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a file which opens and cannot be read has none
        raise


class _SplitWriter:
    """Writes the documents of a split into shards, and counts them."""

    def __init__(self, folder: pathlib.Path, name: str, shard_format: ShardFormat):
        self._shard_format = shard_format
        self._blocks = BlockWriter(folder, name, shard_format)
        self._compressed = _CompressedSize() if name == "validation" else None
        self._documents = self._skipped = self._text_bytes = self._tokens = 0

    def append(self, path: str, raw: bytes) -> LeftOut | None:
        """Takes the bytes of a file; one that is empty or not UTF-8 is counted, and left out."""
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self._skipped += 1
            return LeftOut(path, "not UTF-8", byte=error.start)
        if not text:
            self._skipped += 1
            return LeftOut(path, "empty")
        tokenizer = self._shard_format.tokenizer
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        self._blocks.append(np.array(ids, self._shard_format.dtype))
        if self._compressed is not None:
            self._compressed.append(raw)
        self._documents += 1
        self._text_bytes += len(raw)
        self._tokens += len(ids)
        return None

    def finish(self) -> Split:
        """Writes what is left, and says what the split holds."""
        gzip_9_bytes, xz_9_bytes = (None, None) if self._compressed is None else self._compressed.finish()
        return Split(
            shards=self._blocks.finish(),
            documents=self._documents,
            skipped=self._skipped,
            text_bytes=self._text_bytes,
            tokens=self._tokens,
            gzip_9_bytes=gzip_9_bytes,
            xz_9_bytes=xz_9_bytes,
        )


class _CompressedSize:
    """What concatenated documents come to under gzip -9 and xz -9, without keeping them."""

    def __init__(self):
        self._gzip = zlib.compressobj(level=9, wbits=31)  # 31: gzip's header and trailer
        self._xz = lzma.LZMACompressor(preset=9)
        self._gzip_bytes = self._xz_bytes = 0

    def append(self, raw: bytes) -> None:
        self._gzip_bytes += len(self._gzip.compress(raw))
        self._xz_bytes += len(self._xz.compress(raw))

    def finish(self) -> tuple[int, int]:
        return self._gzip_bytes + len(self._gzip.flush()), self._xz_bytes + len(self._xz.flush())


def _check_splits(
    splits: dict[str, Split], buckets: set[int], *, origin: _Origin, validation_percent: int
) -> None:
    """Refuses a split without text.

    Args:
      splits: as they were written.
      buckets: of the texts, from 0 to 99; those below `validation_percent` are held out.
      origin: of the texts.
      validation_percent: that was asked for.

    Raises:
      ValueError: with the percentages that would do, when there are any.
    """
    if not buckets:
        skipped = sum(split.skipped for split in splits.values())
        raise ValueError(
            f'all {skipped} files like "{origin.pattern}" in {origin.root} are empty or not UTF-8; '
            "a corpus needs some text"
        )
    for name, split in splits.items():
        if split.documents:
            continue
        none = f"the {name} split got no text from {origin.root}"
        first, last = min(buckets), max(buckets)
        if first == last:  # as one text, or many copies of it, always is
            raise ValueError(
                f"{none}, and another validation_percent would leave the other split without any; there must "
                "be more different texts"
            )
        raise ValueError(
            f"{none} at validation_percent {validation_percent}; it must be from {first + 1} to {last} (zaya "
            "corpus --validation-percent), or there must be more different texts"
        )


def _describe(
    folder: pathlib.Path,
    splits: dict[str, Split],
    shard_format: ShardFormat,
    origin: _Origin,
    left_out: dict[str, int],
) -> Corpus:
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
        source=f"{origin.description}, {origin.pattern}",
        train=splits["train"],
        validation=splits["validation"],
        left_out=left_out,
        files=describe_files(folder),
    )


def ensure_corpus(config: DataConfig) -> Corpus:
    """Opens the corpus that a run wants, building it from `config.source` when it is missing.

    Several processes may do this at once: the first to finish puts its corpus in place, and the
    others open that.

    Raises:
      ValueError: when it is missing with no source to build from, is damaged, or has another tokenizer.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if not pathlib.Path(config.corpus).exists():
        if config.source is None:
            raise ValueError(
                f"{describe_missing(config.corpus)}, or the run itself with --config.data.source=TEXTS"
            )
        with contextlib.suppress(FileExistsError):
            corpus = build_corpus(config.corpus, source=config.source, tokenizer=tokenizer)
            print(describe_left_out(corpus.folder, corpus.left_out), end="")
    return open_corpus_for(config.corpus, config.tokenizer)


def open_corpus_for(folder: str, tokenizer: str) -> Corpus:
    """Opens a corpus that is to be of the tokenizer of a run.

    Raises:
      ValueError: as `open_corpus`, or when it is of another.
    """
    corpus = open_corpus(folder)
    if corpus.tokenizer_fingerprint != load_tokenizer(tokenizer).fingerprint:
        raise ValueError(
            f'data.tokenizer is "{tokenizer}", and the corpus {folder} was made with '
            f'"{corpus.tokenizer}"; they must be the same'
        )
    return corpus


# zaya corpus

_EXAMPLES = (
    "zaya corpus corpora/stdlib                                   # Python's own standard library, as bytes",
    "zaya corpus corpora/notes --source ~/notes --pattern '*.md'  # the Markdown files of a folder",
    "zaya corpus corpora/web --source web --tokenizer tokenizer.json --block-tokens 8192",
    "zaya corpus corpora/web --verify                             # are its files what was written?",
)


def main(argv: Sequence[str] | None = None) -> None:
    """`zaya corpus`: builds a corpus and prints what is in it."""
    options = _parse_options(argv)
    if options.verify:
        corpus = verify_corpus(options.folder)
        size = sum(file.bytes for file in corpus.files.values())
        print(f"verified: all {size:,} bytes of {corpus.folder} are as they were written")
        return
    corpus = build_corpus(
        options.folder,
        source=options.source,
        pattern=options.pattern,
        tokenizer=load_tokenizer(options.tokenizer),
        block_tokens=options.block_tokens,
        validation_percent=options.validation_percent,
        overwrite=options.overwrite,
    )
    rich.console.Console().print(_make_table(corpus))
    print(describe_left_out(corpus.folder, corpus.left_out), end="")


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "corpus", "Writes text files as a corpus of token shards, with a part held out.", _EXAMPLES
    )
    parser.add_argument("folder", metavar="OUT", help="folder of the corpus to be")
    parser.add_argument("--source", default="stdlib", help='"stdlib" (default) or a folder of text files')
    parser.add_argument("--pattern", help='names of the files to take; default "*.py" for stdlib, else "*"')
    parser.add_argument(
        "--tokenizer", default="byte", help='"byte" (default) or the path of a Hugging Face tokenizer.json'
    )
    parser.add_argument(
        "--validation-percent", type=int, default=5, help="share of the files that is held out; default 5"
    )
    parser.add_argument("--block-tokens", type=int, default=4096, help="tokens a record; default 4096")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    parser.add_argument(
        "--verify", action="store_true", help="build nothing: read every byte of OUT and check its hashes"
    )
    options = parser.parse_args(argv)
    if options.verify and options.overwrite:
        raise ValueError("--verify reads a corpus and --overwrite replaces it; give one of them")
    return options


def _make_table(corpus: Corpus) -> rich.table.Table:
    """A row a split; the bits per byte are what a model of the held-out files has to beat."""
    table = rich.table.Table(
        name_column("split"),
        *map(number_column, ("documents", "skipped", "bytes", "tokens", "gzip -9", "xz -9")),
        title=rich.text.Text(f"{printable(str(corpus.folder))}\n{printable(corpus.source)}"),
        caption="gzip and xz: bits per byte of the held-out files",
        box=rich.box.SIMPLE,
        padding=0,
    )
    for name in SPLITS:
        split = corpus.split(name)
        counts = [f"{n:,}" for n in (split.documents, split.skipped, split.text_bytes, split.tokens)]
        rates = [_format_rate(n, split.text_bytes) for n in (split.gzip_9_bytes, split.xz_9_bytes)]
        table.add_row(name, *counts, *rates)
    return table


def _format_rate(compressed: int | None, raw: int) -> str:
    return "" if compressed is None else f"{8 * compressed / raw:.3f}"
