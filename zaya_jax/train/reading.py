"""What a run has read of its corpora before each range of its steps.

It follows from the config and the sizes of the corpora, in whole numbers, counted from the run's
beginning: a corpus goes on where it was left, through any change of mixture, length and batch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from zaya_jax.config import Config
from zaya_jax.data.mixture import Reading, make_orders, mixture_of
from zaya_jax.data.order import Position
from zaya_jax.train.phases import StepRange, step_ranges


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


def describe_epochs(reading: Reading) -> str:
    """How often each corpus has been read, on one line."""
    return "epochs read so far: " + ", ".join(f"{folder} {n:.3g}" for folder, n in reading.epochs().items())
