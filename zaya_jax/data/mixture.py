"""Several corpora read as one stream, in given shares, each sequence a function of its index alone."""

import dataclasses
import fractions
import math
from collections.abc import Sequence

from zaya_jax.config import DataConfig
from zaya_jax.data.corpus import open_corpus_for
from zaya_jax.data.shards import Corpus


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What a phase trains on.

    Attributes:
      corpora: of one tokenizer.
      weights: whole numbers, a corpus's share of the sequences over the sum of all.
    """

    corpora: tuple[Corpus, ...]
    weights: tuple[int, ...]

    @property
    def folders(self) -> str:
        """Where it lies, for people."""
        return ", ".join(str(corpus.folder) for corpus in self.corpora)


def open_mixture(config: DataConfig, corpus: Corpus) -> Mixture:
    """Opens the corpora that `config.mixture` names, or takes `corpus` alone.

    Raises:
      ValueError: when one is missing, damaged, or has another tokenizer.
    """
    if config.mixture is None:
        return Mixture((corpus,), (1,))
    (named,) = (mixture for mixture in config.mixtures if mixture.name == config.mixture)
    corpora = tuple(open_corpus_for(folder, config.tokenizer) for folder in named.corpora)
    return Mixture(corpora, whole_weights(named.weights))


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers in the very proportions that were written down: 0.7 and 0.3 are 7 and 3."""
    exact = [fractions.Fraction(repr(weight)) for weight in weights]
    whole = [int(weight * math.lcm(*(w.denominator for w in exact))) for weight in exact]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def pick(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """Which corpus gives sequence `index` of a mixture, and which of its sequences that is.

    Among the first n sequences the first corpus has its share of n, rounded up; what is left is dealt
    out to the others in the same way. So every corpus is within a few sequences of its share at any
    time, and no state is needed to go on from anywhere. Whole numbers of any size: nothing is rounded.
    """
    left, before, after = sum(weights), index, index + 1
    for corpus, weight in enumerate(weights):
        left_before, left_after = (n * (left - weight) // left for n in (before, after))
        if before - left_before != after - left_after:
            return corpus, before - left_before
        left, before, after = left - weight, left_before, left_after
    raise AssertionError("one corpus or another gets the sequence")
