"""Phase, batch size and token count of each step of a run.

All of it is computed from the config alone, in Python's unbounded integers (8T tokens would overflow int32).
A run that resumes at any step, in a ramp or between two phases, therefore does what an uninterrupted run
would.
"""

import dataclasses
from collections.abc import Iterator

from zaya_jax.config.run import Config, Phase


@dataclasses.dataclass(frozen=True)
class StepRange:
    """Consecutive steps of one phase and one batch size, which share a compiled program.

    Attributes:
      phase: phase that the steps belong to.
      first_step: number of steps of the run that precede the range.
      num_steps: number of steps in the range.
      batch_size: B, sequences per step.
      first_token: number of tokens that the preceding steps read.
    """

    phase: Phase
    first_step: int
    num_steps: int
    batch_size: int
    first_token: int

    @property
    def end(self) -> int:
        """Number of steps of the run after the range."""
        return self.first_step + self.num_steps

    @property
    def sequence_length(self) -> int:
        """T, tokens per sequence."""
        return self.phase.config.data.sequence_length

    @property
    def batch_tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.sequence_length

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches, none larger than those of the phase's full batch."""
        full = self.phase.config
        # Rounded up: a larger microbatch than that of the full batch might not fit in memory.
        return -(-self.batch_size * full.execution.num_microbatches // full.data.batch_size)

    def tokens_until(self, step: int) -> int:
        """Number of tokens that the run has read after a step of the range."""
        return self.first_token + (step - self.first_step) * self.batch_tokens

    def after(self, step: int) -> "StepRange":
        """The rest of the range after `step` steps of the run."""
        # A range that starts after `step` is returned as it is.
        skipped = max(step - self.first_step, 0)
        return dataclasses.replace(
            self,
            first_step=self.first_step + skipped,
            num_steps=self.num_steps - skipped,
            first_token=self.tokens_until(self.first_step + skipped),
        )


def step_ranges(config: Config) -> Iterator[StepRange]:
    """Yields all ranges of a run, in order; `StepRange.after` cuts the one in which a run resumes."""
    tokens = 0
    for phase in config.resolved_phases:
        data, step = phase.config.data, phase.first_step
        # A ramp is given in tokens, so that it means the same in phases with different sequence lengths.
        ramp = [(steps, size // data.sequence_length) for steps, size in data.batch_ramp]
        # The ramp is part of the phase, followed by steps with the full batch.
        rest = (phase.config.train.num_steps - data.ramp_steps, data.batch_size)
        for num_steps, batch_size in (*ramp, rest):
            step_range = StepRange(phase, step, num_steps, batch_size, tokens)
            step, tokens = step_range.end, step_range.tokens_until(step_range.end)
            yield step_range
