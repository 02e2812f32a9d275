"""Tables and text samples for `zaya data inspect`: document lengths, and what a run reads."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Sequence

import numpy as np
import rich.console
import rich.table
import rich.text

from zaya_jax.config import Config, Phase
from zaya_jax.data.corpora.shards import Corpus, read_manifest
from zaya_jax.data.corpora.token_blocks import BlockReader
from zaya_jax.data.reading.batch import Batch
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.data.reading.mixture import mixture_of
from zaya_jax.data.reading.positions import Draw, draws
from zaya_jax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from zaya_jax.errors import UserError
from zaya_jax.text_tables import dense_table, name_column, number_column

MAX_TOKENS = 2**26
"""Maximum number of tokens of a split that document lengths are measured on; takes one or two seconds."""
_SAMPLE_TOKENS = 120
_BAR = 40
_DELIMITER_STYLE, _MASKED_STYLE = "bold cyan", "dim"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Distribution of document lengths in tokens, including delimiters.

    Attributes:
      counts: number of documents with 2**i to 2**(i + 1) - 1 tokens, for each i.
      whole: whether all documents of the split are counted.
      median: median length.
      longest: maximum length.
    """

    counts: tuple[int, ...]
    whole: bool
    median: int
    longest: int


def measure_lengths(corpus: Corpus, split: str, *, max_tokens: int = MAX_TOKENS) -> Lengths:
    """Measures the lengths of a split's documents, or of those in its first `max_tokens` tokens.

    Raises:
      DamagedError: if a block is damaged.
    """
    num_tokens, split_blocks = corpus.split(split).tokens, corpus.split(split).num_blocks
    blocks = BlockReader(corpus, split)
    num_blocks = min(split_blocks, math.ceil(max_tokens / corpus.block_tokens))
    first_id = corpus.delimiters.first_id
    starts = [
        np.flatnonzero(np.frombuffer(blocks[i], corpus.dtype) == first_id) + i * corpus.block_tokens
        for i in range(num_blocks)
    ]
    whole = num_blocks == split_blocks
    # A document that continues after the tokens that were read has no known length. It is counted as far as
    # it was read only if there is no other.
    end = min(num_tokens, num_blocks * corpus.block_tokens)
    # Without BOS the last EOS of the stream starts no document, so it is itself the end.
    has_end = (whole and corpus.delimiters.has_bos) or sum(map(len, starts)) == 1
    boundaries = np.concatenate([*starts, [end]] if has_end else starts)
    lengths = np.diff(boundaries)
    counts = np.bincount(np.log2(lengths).astype(int))
    return Lengths(tuple(map(int, counts)), whole, int(np.median(lengths)), int(lengths.max()))


def inspect(corpus: Corpus, split: str, *, num_samples: int, console: rich.console.Console) -> None:
    """Prints the distribution of document lengths and the start of a few documents."""
    console.print(_length_table(measure_lengths(corpus, split), split))
    # Samples need the tokenizer, which may have been moved since the corpus was built; lengths do not.
    if not num_samples:
        return
    try:
        tokenizer = load_tokenizer(corpus.tokenizer)
    except UserError as error:
        console.print(f"no samples: {error}", markup=False)
        return
    for text in samples(corpus, split, tokenizer, number=num_samples):
        console.print(text)


def _length_table(lengths: Lengths, split: str) -> rich.table.Table:
    """One bar per power of two."""
    extent = "" if lengths.whole else f", of its first {MAX_TOKENS:,} tokens"
    table = rich.table.Table(
        number_column("tokens"), number_column("documents"), name_column(""),
        title=f"lengths of documents, {split}{extent}",
        caption=f"half are below {lengths.median:,}; the longest has {lengths.longest:,}",
        box=None,
    )  # fmt: skip
    first = next(i for i, count in enumerate(lengths.counts) if count)
    highest = max(lengths.counts)
    # Empty rows at the start say nothing, but gaps between lengths do.
    for i, count in list(enumerate(lengths.counts))[first:]:
        table.add_row(f"{2**i:,} -", f"{count:,}", "█" * math.ceil(_BAR * count / highest))
    return table


def samples(corpus: Corpus, split: str, tokenizer: Tokenizer, *, number: int) -> Iterator[rich.text.Text]:
    """Yields the start of the first documents of a split, with the mask of the loss.

    Args:
      corpus: opened corpus.
      split: split of the documents.
      tokenizer: tokenizer of the corpus.
      number: number of documents.

    Yields:
      Texts with colored delimiters, in which tokens without a loss are dim.
    """
    length = _window(corpus, split)
    for batch in evaluation_batches(corpus, split=split, sequence_length=length, batch_size=1):
        tokens, learned = np.asarray(batch.tokens_BT)[0], _is_learned(batch)
        segments = np.asarray(batch.segments_BT)[0]
        for start in np.flatnonzero((tokens == corpus.delimiters.first_id)[:-1]):
            if not number:
                return
            # The last delimiter of the split is followed by padding instead of a document.
            if segments[start + 1] != segments[start]:
                continue
            number -= 1
            yield _sample(tokens[start:], learned[start:], corpus, tokenizer)


def _window(corpus: Corpus, split: str) -> int:
    """The length of a block, or for a short split its longest divisor that the split fills."""
    limit = min(corpus.block_tokens, corpus.split(split).tokens)
    return next(length for length in range(limit, 0, -1) if corpus.block_tokens % length == 0)


def _is_learned(batch: Batch) -> np.ndarray:
    """Whether each token has a loss, which is stored at the position before, where it is the target."""
    weights_T = np.asarray(batch.weights_BT)[0]
    return np.concatenate([[True], weights_T[:-1] > 0])


def _sample(tokens: np.ndarray, learned: np.ndarray, corpus: Corpus, tokenizer: Tokenizer) -> rich.text.Text:
    # Token 0 starts the document, and without BOS it is itself an EOS.
    ends = np.flatnonzero(tokens[1:] == corpus.eos_id) + 1
    end = min(int(ends[0]) if len(ends) else len(tokens), _SAMPLE_TOKENS)
    text = rich.text.Text()
    text.append("▶ ", _DELIMITER_STYLE)
    pairs = zip(tokens[1:end].tolist(), learned[1:end].tolist(), strict=True)
    for is_learned, run in itertools.groupby(pairs, key=operator.itemgetter(1)):
        shown = _visible(tokenizer.decode(token for token, _ in run))
        text.append(shown, None if is_learned else _MASKED_STYLE)
    is_whole = len(ends) > 0 and end == ends[0]
    text.append(" ◀" if is_whole else " …", _DELIMITER_STYLE)
    return text


def _visible(text: str) -> str:
    """Escapes control characters, which a terminal would execute."""
    return "".join(each if each in "\n\t" or each.isprintable() else ascii(each)[1:-1] for each in text)


# What a run reads


def draw_tables(config: Config) -> Iterator[rich.table.Table]:
    """Yields a table per phase of a run with what it reads from its corpora. Reads only their manifests.

    Raises:
      UserError: if a corpus is missing.
    """
    phases = config.resolved_phases
    folders = {folder for phase in phases for folder in mixture_of(phase.config.data).folders}
    # Opening the corpora would hash them, which is unnecessary for counting.
    num_tokens = {folder: read_manifest(folder).train.tokens for folder in sorted(folders)}
    draws_of_phase = draws(config, num_tokens)
    for phase in phases:
        yield _draw_table(phase, draws_of_phase[phase.name])


def _draw_table(phase: Phase, phase_draws: Sequence[Draw]) -> rich.table.Table:
    name, data = f"phase {phase.name}, " if phase.name else "", phase.config.data
    sequences = sum(draw.sequences for draw in phase_draws)
    tokens = sum(draw.tokens for draw in phase_draws)
    table = dense_table(
        "corpus",
        *("weight", "drawn", "sequences", "tokens", "epochs", "so far"),
        title=f"{name}steps {phase.first_step + 1:,} to {phase.end:,}, "
        f"{f'mixture {data.mixture}' if data.mixture else 'one corpus'}",
        caption=f"{sequences:,} sequences of {data.sequence_length:,}, {tokens:,} tokens; drawn: share of "
        "the sequences",
    )
    for draw in phase_draws:
        shares = f"{draw.weight:.2%}", f"{draw.sequences / sequences:.2%}"
        counts = f"{draw.sequences:,}", f"{draw.tokens:,}"
        table.add_row(draw.folder, *shares, *counts, f"{draw.epochs:.4g}", f"{draw.epochs_so_far:.4g}")
    return table
