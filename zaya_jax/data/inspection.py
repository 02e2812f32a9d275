"""What a person sees of a corpus: how long its documents are, and how they begin, as pictures of text.

And of a run's corpora: what the run draws from each.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text

from zaya_jax.config import Config, Phase
from zaya_jax.data.batch import Batch
from zaya_jax.data.blocks import BlockReader
from zaya_jax.data.loader import evaluation_batches
from zaya_jax.data.mixture import mixture_of
from zaya_jax.data.reading import Draw, draws
from zaya_jax.data.shards import Corpus, read_manifest
from zaya_jax.data.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.tables import name_column, number_column

MOST_TOKENS = 2**26
"""Of a split, that its lengths are taken of: a second or two of reading."""
_SAMPLE_TOKENS = 120
_BAR = 40
_BORDER, _MASKED = "bold cyan", "dim"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of documents, each with its begin and end.

    Attributes:
      counts: documents of 2**i up to 2**(i + 1) tokens, for each i.
      whole: whether all documents of the split are counted.
      middle: of the lengths, half are below.
      longest: of them.
    """

    counts: tuple[int, ...]
    whole: bool
    middle: int
    longest: int


def measure_lengths(corpus: Corpus, split: str, *, most_tokens: int = MOST_TOKENS) -> Lengths:
    """The lengths of a split's documents, or of those that lie in its first tokens.

    Raises:
      Damaged: if a block is not what was written.
    """
    there = corpus.split(split)
    blocks = BlockReader(corpus, split)
    num_blocks = min(there.num_blocks, math.ceil(most_tokens / corpus.block_tokens))
    first_id = corpus.borders.first_id
    begins = [
        np.flatnonzero(np.frombuffer(blocks[i], corpus.dtype) == first_id) + i * corpus.block_tokens
        for i in range(num_blocks)
    ]
    whole = num_blocks == there.num_blocks
    # A document that goes on behind what is read has no length here, unless it is the only one.
    end = min(there.tokens, num_blocks * corpus.block_tokens)
    # Without a BOS the last border of all begins none.
    has_end = (whole and corpus.borders.has_bos) or sum(map(len, begins)) == 1
    places = np.concatenate([*begins, [end]] if has_end else begins)
    lengths = np.diff(places)
    counts = np.bincount(np.log2(lengths).astype(int))
    return Lengths(tuple(map(int, counts)), whole, int(np.median(lengths)), int(lengths.max()))


def inspect(corpus: Corpus, split: str, *, num_samples: int, console: rich.console.Console) -> None:
    """Prints lengths of documents and the beginnings of a few."""
    console.print(_picture(measure_lengths(corpus, split), split))
    if not num_samples:
        return
    try:
        tokenizer = load_tokenizer(corpus.tokenizer)
    except ValueError as error:
        console.print(f"no samples: {error}", markup=False)
        return
    for text in samples(corpus, split, tokenizer, number=num_samples):
        console.print(text)


def _picture(lengths: Lengths, split: str) -> rich.table.Table:
    """A bar for each power of two."""
    of = "" if lengths.whole else f", of its first {MOST_TOKENS:,} tokens"
    table = rich.table.Table(
        number_column("tokens"), number_column("documents"), name_column(""),
        title=f"lengths of documents, {split}{of}",
        caption=f"half are below {lengths.middle:,}; the longest has {lengths.longest:,}",
        box=None,
    )  # fmt: skip
    first = next(i for i, count in enumerate(lengths.counts) if count)
    most = max(lengths.counts)
    for i, count in list(enumerate(lengths.counts))[first:]:
        table.add_row(f"{2**i:,} -", f"{count:,}", "█" * math.ceil(_BAR * count / most))
    return table


def samples(corpus: Corpus, split: str, tokenizer: Tokenizer, *, number: int) -> Iterator[rich.text.Text]:
    """How documents begin that lie at the beginning of a split, as training would have them.

    Args:
      corpus: an open one.
      split: of the documents.
      tokenizer: of the corpus.
      number: of documents.

    Yields:
      Texts with coloured borders, in which tokens that are no targets are dim.
    """
    length = _window(corpus, split)
    for batch in evaluation_batches(corpus, split=split, sequence_length=length, batch_size=1):
        tokens, learnt = np.asarray(batch.tokens_BT)[0], _is_learnt(batch)
        segments = np.asarray(batch.segments_BT)[0]
        for begin in np.flatnonzero((tokens == corpus.borders.first_id)[:-1]):
            if not number:
                return
            if segments[begin + 1] != segments[begin]:  # an empty one, behind which the split ends
                continue
            number -= 1
            yield _sample(tokens[begin:], learnt[begin:], corpus, tokenizer)


def _window(corpus: Corpus, split: str) -> int:
    """A block, or the most of one that a short split can fill."""
    most = min(corpus.block_tokens, corpus.split(split).tokens)
    return next(length for length in range(most, 0, -1) if corpus.block_tokens % length == 0)


def _is_learnt(batch: Batch) -> np.ndarray:
    """Whether each token is a target that counts: as a target it stands one place before."""
    weights_T = np.asarray(batch.weights_BT)[0]
    return np.concatenate([[True], weights_T[:-1] > 0])


def _sample(tokens: np.ndarray, learnt: np.ndarray, corpus: Corpus, tokenizer: Tokenizer) -> rich.text.Text:
    ends = (
        np.flatnonzero(tokens[1:] == corpus.eos_id) + 1
    )  # the first one may be an EOS, where there is no BOS
    end = min(int(ends[0]) if len(ends) else len(tokens), _SAMPLE_TOKENS)
    text = rich.text.Text()
    text.append("▶ ", _BORDER)
    for run, counts in _runs(tokens[1:end].tolist(), learnt[1:end].tolist()):
        text.append(_visible(tokenizer.decode(run)), None if counts else _MASKED)
    is_whole = len(ends) > 0 and end == ends[0]
    text.append(" ◀" if is_whole else " …", _BORDER)
    return text


def _visible(text: str) -> str:
    """What a terminal would obey is spelled out."""
    return "".join(each if each in "\n\t" or each.isprintable() else ascii(each)[1:-1] for each in text)


def _runs(tokens: Sequence[int], learnt: Sequence[bool]) -> Iterator[tuple[Sequence[int], bool]]:
    """Stretches of tokens that are all targets, or all none."""
    start = 0
    for i in range(1, len(tokens) + 1):
        if i == len(tokens) or learnt[i] != learnt[start]:
            yield tokens[start:i], learnt[start]
            start = i


# What a run draws


def draw_tables(config: Config) -> Iterator[rich.table.Table]:
    """A table for each phase of a run: what it draws from its corpora. Of these only manifests are read.

    Raises:
      ValueError: if a corpus is not there.
    """
    phases = config.resolved_phases
    folders = {folder for phase in phases for folder in mixture_of(phase.config.data).folders}
    num_tokens = {folder: read_manifest(folder).train.tokens for folder in sorted(folders)}
    drawn = draws(config, num_tokens)
    for phase in phases:
        yield _draw_table(phase, drawn[phase.name])


def _draw_table(phase: Phase, drawn: Sequence[Draw]) -> rich.table.Table:
    name, data = f"phase {phase.name}, " if phase.name else "", phase.config.data
    sequences, tokens = (sum(getattr(draw, what) for draw in drawn) for what in ("sequences", "tokens"))
    table = rich.table.Table(
        name_column("corpus"),
        *map(number_column, ("weight", "drawn", "sequences", "tokens", "epochs", "so far")),
        title=f"{name}steps {phase.first_step + 1:,} to {phase.end:,}, "
        f"{f'mixture {data.mixture}' if data.mixture else 'one corpus'}",
        caption=f"{sequences:,} sequences of {data.sequence_length:,}, {tokens:,} tokens; drawn: share of "
        "the sequences",
        box=rich.box.SIMPLE,
        padding=0,
    )
    for draw in drawn:
        shares = f"{draw.weight:.2%}", f"{draw.sequences / sequences:.2%}"
        counts = f"{draw.sequences:,}", f"{draw.tokens:,}"
        table.add_row(draw.folder, *shares, *counts, f"{draw.epochs:.4g}", f"{draw.epochs_so_far:.4g}")
    return table
