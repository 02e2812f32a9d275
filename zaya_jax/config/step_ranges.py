"""Where a run is at a step: phase, batch size, and how many tokens the steps before have read.

All of it follows from the config alone, in Python's whole numbers, which 8T tokens do not overflow.
So a run that resumes at any step, in a ramp or at the border of two phases, does what an undisturbed
one would.
"""

import dataclasses
from collections.abc import Iterator

from zaya_jax.config.run import Config, Phase


@dataclasses.dataclass(frozen=True)
class StepRange:
    """Steps of one phase and one batch size: those that one compiled step makes.

    Attributes:
      phase: that they belong to.
      first_step: steps of the run before them.
      num_steps: how many they are.
      batch_size: B, sequences of each.
      first_token: tokens that the run has read before.
    """

    phase: Phase
    first_step: int
    num_steps: int
    batch_size: int
    first_token: int

    @property
    def end(self) -> int:
        """Steps of the run when they are done."""
        return self.first_step + self.num_steps

    @property
    def sequence_length(self) -> int:
        """T, tokens of a sequence of the phase."""
        return self.phase.config.data.sequence_length

    @property
    def batch_tokens(self) -> int:
        """Tokens of each of the steps."""
        return self.batch_size * self.sequence_length

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch, none larger than those of the phase's full batch."""
        full = self.phase.config
        # Rounded up: a part must not be larger than those that the run was sized for.
        return -(-self.batch_size * full.execution.num_microbatches // full.data.batch_size)

    def tokens_until(self, step: int) -> int:
        """Tokens that the run has read after a step of the range."""
        return self.first_token + (step - self.first_step) * self.batch_tokens

    def after(self, step: int) -> "StepRange":
        """What is left of it when the run has made `step` steps."""
        skipped = max(step - self.first_step, 0)
        return dataclasses.replace(
            self,
            first_step=self.first_step + skipped,
            num_steps=self.num_steps - skipped,
            first_token=self.tokens_until(self.first_step + skipped),
        )


def step_ranges(config: Config, *, first_step: int = 0) -> Iterator[StepRange]:
    """The ranges of steps of a run that are left after `first_step` steps."""
    tokens = 0
    for phase in config.resolved_phases:
        data, step = phase.config.data, phase.first_step
        # Sizes of a ramp are tokens, so that they mean the same in phases of other lengths.
        ramp = [(steps, size // data.sequence_length) for steps, size in data.batch_ramp]
        rest = (phase.config.train.num_steps - data.ramp_steps, data.batch_size)
        for num_steps, batch_size in (*ramp, rest):
            step_range = StepRange(phase, step, num_steps, batch_size, tokens)
            step, tokens = step_range.end, step_range.tokens_until(step_range.end)
            # Counted from the first step also when resumed: the tokens read before are part of each range.
            if first_step < step_range.end:
                yield step_range.after(first_step)
