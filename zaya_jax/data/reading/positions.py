"""Position of a run in its corpora at the start of each range of steps.

Positions are computed in integers from the config and the corpus sizes, starting at step 0. A corpus
continues where reading stopped, across any change of mixture, sequence length or batch size.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from zaya_jax.config import Config, StepRange, step_ranges
from zaya_jax.data.reading.mixture import MixturePosition, make_orders, mixture_of, sequences_per_corpus
from zaya_jax.data.reading.order import Position


def mixture_positions(
    config: Config, num_tokens: Mapping[str, int], *, first_step: int = 0
) -> Iterator[tuple[StepRange, MixturePosition]]:
    """Yields the remaining ranges of steps after `first_step`, each with the position where reading starts.

    Args:
      config: config of the run.
      num_tokens: tokens in the training split of each corpus that the phases read, by folder.
      first_step: number of completed steps.
    """
    orders = make_orders(
        (phase.config.data for phase in config.resolved_phases), num_tokens, seed=config.data.seed
    )
    positions: Mapping[str, Position] = dict.fromkeys(orders, Position())
    read: Counter[str | None] = Counter()
    # Always start at step 0, also on resume: a range's position depends on everything read before it.
    for step_range in step_ranges(config):
        data = step_range.phase.config.data
        position = MixturePosition(
            orders=orders,
            positions=positions,
            mixture=mixture_of(data),
            first_sequence=read[data.mixture],
            length=data.sequence_length,
        )
        if first_step < step_range.end:
            remaining = step_range.after(first_step)
            num_done = (remaining.first_step - step_range.first_step) * step_range.batch_size
            yield remaining, position.after(num_done)
        count = step_range.num_steps * step_range.batch_size
        # Corpora keep their positions across phases. A mixture that returns later also continues its own
        # sequence of corpora, so its proportions hold over all its phases together.
        positions = position.after(count).positions
        read[data.mixture] += count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """What a run reads from one corpus in one phase.

    Attributes:
      folder: folder of the corpus.
      weight: share of the phase's sequences that the config requests, from 0 to 1.
      sequences: number of sequences that are read.
      tokens: number of tokens that are read; the last sequence of an epoch may be short.
      epochs: epochs of the corpus that are read in this phase.
      epochs_so_far: epochs of the corpus that are read up to the end of this phase.
    """

    folder: str
    weight: float
    sequences: int
    tokens: int
    epochs: float
    epochs_so_far: float


def draws(config: Config, num_tokens: Mapping[str, int]) -> dict[str, list[Draw]]:
    """Counts what each phase of a run reads from its corpora.

    Args:
      config: config of the run.
      num_tokens: tokens in the training split of each corpus that the phases read, by folder.

    Returns:
      One `Draw` per corpus, by phase name. The counts are exact, not estimates.
    """
    ranges: dict[str, list[tuple[StepRange, MixturePosition]]] = {}
    for step_range, position in mixture_positions(config, num_tokens):
        # The ranges of a phase follow each other.
        ranges.setdefault(step_range.phase.name, []).append((step_range, position))
    return {name: _draws_of_phase(of_phase) for name, of_phase in ranges.items()}


def _draws_of_phase(ranges: list[tuple[StepRange, MixturePosition]]) -> list[Draw]:
    first, mixture = ranges[0][1], ranges[0][1].mixture
    count = sum(step_range.num_steps * step_range.batch_size for step_range, _ in ranges)
    # A batch-size ramp splits a phase into several ranges, which share one sequence length and one mixture.
    last = first.after(count)
    before, after = (sequences_per_corpus(each.first_sequence, mixture.weights) for each in (first, last))
    return [
        Draw(
            folder=folder,
            weight=weight / sum(mixture.weights),
            sequences=new - old,
            tokens=last.tokens(folder) - first.tokens(folder),
            epochs=last.epochs()[folder] - first.epochs()[folder],
            epochs_so_far=last.epochs()[folder],
        )
        for folder, weight, old, new in zip(mixture.folders, mixture.weights, before, after, strict=True)
    ]


def describe_epochs(position: MixturePosition) -> str:
    """Returns one line with the number of epochs read of each corpus."""
    return "epochs read so far: " + ", ".join(f"{folder} {n:.3g}" for folder, n in position.epochs().items())
