"""Several corpora read as one stream, in given shares, each sequence a function of its index alone."""

import dataclasses
import fractions
import math
from collections.abc import Iterable, Mapping, Sequence

from zaya_jax.config import DataConfig
from zaya_jax.data.order import Order, Position


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What a phase trains on.

    Attributes:
      folders: of the corpora, as the config names them.
      weights: whole numbers, a corpus's share of the sequences over the sum of all.
    """

    folders: tuple[str, ...]
    weights: tuple[int, ...]


def mixture_of(config: DataConfig) -> Mixture:
    """The corpora that `config.mixture` names, or `config.corpus` alone."""
    if config.mixture is None:
        return Mixture((config.corpus,), (1,))
    (named,) = (mixture for mixture in config.mixtures if mixture.name == config.mixture)
    return Mixture(named.corpora, whole_weights(named.weights))


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers in the very proportions that were written down: 0.7 and 0.3 are 7 and 3."""
    # repr gives back the digits that were written; as a fraction the float 0.7 has the denominator 2**52.
    exact = [fractions.Fraction(repr(weight)) for weight in weights]
    whole = [int(weight * math.lcm(*(w.denominator for w in exact))) for weight in exact]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def pick(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """Which corpus gives sequence `index` of a mixture, and which of its sequences that is.

    Every corpus is within a few sequences of its share at any time, and no state is needed to go on from
    anywhere. Whole numbers of any size: nothing is rounded.
    """
    before, after = shares(index, weights), shares(index + 1, weights)
    corpus = next(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    return corpus, before[corpus]


def shares(count: int, weights: Sequence[int]) -> tuple[int, ...]:
    """How many of the first `count` sequences of a mixture each corpus gives.

    The first corpus has its share, rounded up; what is left is dealt out to the others in the same way.
    """
    given, left = [], sum(weights)
    for weight in weights:
        others = count * (left - weight) // left
        given.append(count - others)
        count, left = others, left - weight
    return tuple(given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Where a run is in its corpora.

    Attributes:
      orders: of each corpus of the run, by folder.
      positions: how far each has been read.
      mixture: that is being read.
      first_sequence: sequences of this mixture that have been read, at any length: they say whose turn it is.
      length: T, at which it is being read.
    """

    orders: Mapping[str, Order]
    positions: Mapping[str, Position]
    mixture: Mixture
    first_sequence: int
    length: int

    def sequence(self, number: int) -> tuple[str, int, int]:
        """The corpus of sequence `number` from here on, its first token and the first behind its last."""
        corpus, in_mixture = pick(self.first_sequence + number, self.mixture.weights)
        folder = self.mixture.folders[corpus]
        before = shares(self.first_sequence, self.mixture.weights)[corpus]
        place = self.orders[folder].sequence(self.positions[folder], in_mixture - before, self.length)
        return folder, *place

    def after(self, count: int) -> "Reading":
        """Where the run is when so many sequences more have been read."""
        ends = (self.first_sequence, self.first_sequence + count)
        before, behind = (shares(end, self.mixture.weights) for end in ends)
        moved = {
            folder: self.orders[folder].after(self.positions[folder], new - old, self.length)
            for folder, old, new in zip(self.mixture.folders, before, behind, strict=True)
        }
        return dataclasses.replace(self, positions={**self.positions, **moved}, first_sequence=ends[1])

    def tokens(self, folder: str) -> int:
        """How many tokens of a corpus have been read, those of each epoch anew."""
        place = self.positions[folder]
        return place.epoch * self.orders[folder].num_tokens + place.offset

    def epochs(self) -> dict[str, float]:
        """How often each corpus of the run has been read, by folder."""
        return {folder: self.orders[folder].epochs(place) for folder, place in self.positions.items()}


def make_orders(
    phases: Iterable[DataConfig], num_tokens: Mapping[str, int], *, seed: int
) -> dict[str, Order]:
    """The order of each corpus that the phases of a run train on.

    Args:
      phases: the data of each.
      num_tokens: of each corpus's training split, by folder.
      seed: of the order.
    """
    lengths: dict[str, set[int]] = {}
    for data in phases:
        for folder in mixture_of(data).folders:
            lengths.setdefault(folder, set()).add(data.sequence_length)
    return {
        folder: Order(num_tokens=num_tokens[folder], unit=math.lcm(*found), seed=seed)
        for folder, found in lengths.items()
    }
