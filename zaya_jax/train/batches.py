"""The batches of a range of steps, as this process reads them."""

from collections.abc import Iterator

from zaya_jax.config import StepRange
from zaya_jax.data.batch import Batch
from zaya_jax.data.loader import training_batches
from zaya_jax.data.mixture import Reading
from zaya_jax.train.opening import OpenRun


def batches_of(
    run: OpenRun, step_range: StepRange, reading: Reading, *, num_steps: int | None = None
) -> Iterator[Batch]:
    """What this process has of the batches of a range, one after the other.

    Args:
      run: that they are of.
      step_range: whose steps they are of.
      reading: where it begins to read.
      num_steps: of them; None for all.
    """
    config, first_step = step_range.phase.config, step_range.first_step + 1
    batches = training_batches(
        reading,
        run.corpora,
        batch_size=step_range.batch_size,
        num_steps=step_range.num_steps if num_steps is None else min(step_range.num_steps, num_steps),
        share=run.share_of(config, step_range.batch_size),
        num_threads=config.execution.read_threads,
        references=run.training_references,
    )
    # Here, for whoever repeats steps too; and last: whatever one's own program makes of a batch, one that is
    # passed over teaches nothing.
    return run.passed_over.out_of(run.extensions.of_batches(batches), first_step=first_step)
