"""What a run has read of its corpora before each range of its steps.

It follows from the config and the sizes of the corpora, in whole numbers, counted from the run's
beginning: a corpus goes on where it was left, through any change of mixture, length and batch.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from zaya_jax.config import Config, StepRange, step_ranges
from zaya_jax.data.mixture import Reading, make_orders, mixture_of, shares
from zaya_jax.data.order import Position


def readings(
    config: Config, num_tokens: Mapping[str, int], *, first_step: int = 0
) -> Iterator[tuple[StepRange, Reading]]:
    """The ranges of steps of a run that are left after `first_step` steps, and where each begins to read.

    Args:
      config: of the run.
      num_tokens: of the training split of each corpus that the phases read, by folder.
      first_step: steps that are done.
    """
    orders = make_orders(
        (phase.config.data for phase in config.resolved_phases), num_tokens, seed=config.data.seed
    )
    positions: Mapping[str, Position] = dict.fromkeys(orders, Position())
    read: Counter[str | None] = Counter()
    # From the beginning, also when resumed: where a range reads depends on what all before it have read.
    for step_range in step_ranges(config):
        data = step_range.phase.config.data
        reading = Reading(
            orders=orders,
            positions=positions,
            mixture=mixture_of(data),
            first_sequence=read[data.mixture],
            length=data.sequence_length,
        )
        if first_step < step_range.end:
            left = step_range.after(first_step)
            yield left, reading.after((left.first_step - step_range.first_step) * step_range.batch_size)
        count = step_range.num_steps * step_range.batch_size
        # Corpora go on where they are; a mixture goes on with its own pattern when it comes back.
        positions = reading.after(count).positions
        read[data.mixture] += count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """What a run draws from a corpus in a phase.

    Attributes:
      folder: of the corpus.
      weight: share of the phase's sequences that the config asks for.
      sequences: that are drawn.
      tokens: of these; the last of an epoch may be a short one.
      epochs: that they are of the corpus.
      epochs_so_far: those of all phases up to this one.
    """

    folder: str
    weight: float
    sequences: int
    tokens: int
    epochs: float
    epochs_so_far: float


def draws(config: Config, num_tokens: Mapping[str, int]) -> dict[str, list[Draw]]:
    """What each phase of a run draws from its corpora, by the phase's name: counted, not estimated.

    Args:
      config: of the run.
      num_tokens: of the training split of each corpus that the phases read, by folder.
    """
    ranges: dict[str, list[tuple[StepRange, Reading]]] = {}
    for step_range, reading in readings(config, num_tokens):
        ranges.setdefault(step_range.phase.name, []).append((step_range, reading))
    return {name: _draws_of_phase(of_phase) for name, of_phase in ranges.items()}


def _draws_of_phase(ranges: list[tuple[StepRange, Reading]]) -> list[Draw]:
    first, mixture = ranges[0][1], ranges[0][1].mixture
    count = sum(step_range.num_steps * step_range.batch_size for step_range, _ in ranges)
    # One length and one mixture: a ramp of batch sizes alone is several ranges of a phase.
    last = first.after(count)
    before, behind = (shares(each.first_sequence, mixture.weights) for each in (first, last))
    return [
        Draw(
            folder=folder,
            weight=weight / sum(mixture.weights),
            sequences=new - old,
            tokens=last.tokens(folder) - first.tokens(folder),
            epochs=last.epochs()[folder] - first.epochs()[folder],
            epochs_so_far=last.epochs()[folder],
        )
        for folder, weight, old, new in zip(mixture.folders, mixture.weights, before, behind, strict=True)
    ]


def describe_epochs(reading: Reading) -> str:
    """How often each corpus has been read, on one line."""
    return "epochs read so far: " + ", ".join(f"{folder} {n:.3g}" for folder, n in reading.epochs().items())
