"""Reads several corpora as one stream with given weights; each sequence depends only on its index."""

import dataclasses
import fractions
import math
from collections.abc import Iterable, Mapping, Sequence

from zaya_jax.config import DataConfig
from zaya_jax.data.reading.order import Order, Position


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The corpora that a phase trains on, with their weights.

    Attributes:
      folders: folders of the corpora, as the config names them.
      weights: integer weight of each corpus; its share of the sequences is its weight divided by the sum.
    """

    folders: tuple[str, ...]
    weights: tuple[int, ...]


def mixture_of(config: DataConfig) -> Mixture:
    """Returns the mixture that `config.mixture` names, or `config.corpus` alone with weight 1."""
    if config.mixture is None:
        return Mixture((config.corpus,), (1,))
    # The config has checked that the name exists and is unique.
    (named,) = (mixture for mixture in config.mixtures if mixture.name == config.mixture)
    return Mixture(named.corpora, whole_weights(named.weights))


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Scales weights to the smallest integers with the same ratios: 0.7 and 0.3 become 7 and 3."""
    # repr returns the digits that the user wrote; the exact value of the float 0.7 has denominator 2**52.
    exact = [fractions.Fraction(repr(weight)) for weight in weights]
    whole = [int(weight * math.lcm(*(w.denominator for w in exact))) for weight in exact]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def corpus_of(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """Returns the corpus of sequence `index` of a mixture, and the sequence's number within that corpus.

    At any index, the number of sequences from each corpus is within a few of its exact share. The function
    keeps no state, so a run can resume at any index. It uses integers only and never rounds.
    """
    before, after = sequences_per_corpus(index, weights), sequences_per_corpus(index + 1, weights)
    # Exactly one count grows from one index to the next.
    corpus = next(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    return corpus, before[corpus]


def sequences_per_corpus(count: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Number of sequences that each corpus contributes to the first `count` sequences of a mixture.

    The first corpus contributes its share, rounded up; the rest is divided among the others the same way.
    """
    counts, remaining_weight = [], sum(weights)
    for weight in weights:
        others = count * (remaining_weight - weight) // remaining_weight
        counts.append(count - others)
        count, remaining_weight = others, remaining_weight - weight
    return tuple(counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixturePosition:
    """Position of a run in its corpora.

    Attributes:
      orders: order of each corpus of the run, by folder.
      positions: how far each corpus has been read, by folder.
      mixture: the mixture that is being read.
      first_sequence: number of sequences of this mixture that have been read, at any sequence length; it
        determines which corpus comes next.
      length: T, the current sequence length in tokens.
    """

    orders: Mapping[str, Order]
    positions: Mapping[str, Position]
    mixture: Mixture
    first_sequence: int
    length: int

    def sequence(self, number: int) -> tuple[str, int, int]:
        """Returns the folder, first token and end token (exclusive) of a sequence after this position."""
        corpus, in_mixture = corpus_of(self.first_sequence + number, self.mixture.weights)
        folder = self.mixture.folders[corpus]
        before = sequences_per_corpus(self.first_sequence, self.mixture.weights)[corpus]
        # The position of the corpus already includes the sequences before this range.
        place = self.orders[folder].sequence(self.positions[folder], in_mixture - before, self.length)
        return folder, *place

    def after(self, count: int) -> "MixturePosition":
        """The position after reading `count` more sequences."""
        end = self.first_sequence + count
        before = sequences_per_corpus(self.first_sequence, self.mixture.weights)
        after = sequences_per_corpus(end, self.mixture.weights)
        moved = {
            folder: self.orders[folder].after(self.positions[folder], new - old, self.length)
            for folder, old, new in zip(self.mixture.folders, before, after, strict=True)
        }
        return dataclasses.replace(self, positions={**self.positions, **moved}, first_sequence=end)

    def tokens(self, folder: str) -> int:
        """Number of tokens read from a corpus, counting repeated epochs."""
        position = self.positions[folder]
        return position.epoch * self.orders[folder].num_tokens + position.offset

    def epochs(self) -> dict[str, float]:
        """Number of epochs read of each corpus of the run, by folder."""
        return {folder: self.orders[folder].epochs(position) for folder, position in self.positions.items()}


def make_orders(
    phases: Iterable[DataConfig], num_tokens: Mapping[str, int], *, seed: int
) -> dict[str, Order]:
    """Creates the order of each corpus that the phases of a run train on.

    Args:
      phases: data section of each phase.
      num_tokens: tokens in the training split of each corpus, by folder.
      seed: seed of the shuffling.
    """
    lengths: dict[str, set[int]] = {}
    for data in phases:
        for folder in mixture_of(data).folders:
            lengths.setdefault(folder, set()).add(data.sequence_length)
    # The shuffled unit is a common multiple of all lengths, so that a change of length never splits a unit.
    return {
        folder: Order(num_tokens=num_tokens[folder], unit=math.lcm(*of_folder), seed=seed)
        for folder, of_folder in lengths.items()
    }
