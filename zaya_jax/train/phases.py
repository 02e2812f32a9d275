"""Where a run is at a step: phase, batch size, and how many tokens the steps before have read.

All of it follows from the config alone, in Python's whole numbers, which 8T tokens do not overflow.
So a run that resumes at any step, in a ramp or at the border of two phases, does what an undisturbed
one would.
"""

import dataclasses
from collections.abc import Iterator

from zaya_jax.config import Config, Phase, in_phase
from zaya_jax.parallel.mesh import check_batch_size


@dataclasses.dataclass(frozen=True)
class Stretch:
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
        """T."""
        return self.phase.config.data.sequence_length

    @property
    def batch_tokens(self) -> int:
        """Tokens of each step."""
        return self.batch_size * self.sequence_length

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch, none larger than those of the phase's full batch."""
        full = self.phase.config
        return -(-self.batch_size * full.execution.num_microbatches // full.data.batch_size)

    def tokens_until(self, step: int) -> int:
        """Tokens that the run has read after a step of the stretch."""
        return self.first_token + (step - self.first_step) * self.batch_tokens

    def after(self, step: int) -> "Stretch":
        """What is left of it when the run has made `step` steps."""
        skipped = max(step - self.first_step, 0)
        return dataclasses.replace(
            self,
            first_step=self.first_step + skipped,
            num_steps=self.num_steps - skipped,
            first_token=self.tokens_until(self.first_step + skipped),
        )


def stretches(config: Config, *, first_step: int = 0) -> Iterator[Stretch]:
    """The stretches of a run that are left after `first_step` steps."""
    tokens = 0
    for phase in config.resolved_phases:
        data, step = phase.config.data, phase.first_step
        ramp = [(steps, size // data.sequence_length) for steps, size in data.batch_ramp]
        rest = (phase.config.train.num_steps - data.ramp_steps, data.batch_size)
        for num_steps, batch_size in (*ramp, rest):
            stretch = Stretch(phase, step, num_steps, batch_size, tokens)
            step, tokens = stretch.end, stretch.tokens_until(stretch.end)
            if first_step < stretch.end:
                yield stretch.after(first_step)


def check_devices(config: Config, num_devices: int) -> None:
    """Refuses a run with a batch that cannot be dealt out to the devices.

    Raises:
      ValueError: unless every batch is a multiple of devices times microbatches.
    """
    for stretch in stretches(config):
        with in_phase(stretch.phase.name):
            if stretch.batch_size == stretch.phase.config.data.batch_size:
                check_batch_size(stretch.batch_size, stretch.num_microbatches, num_devices)
            parts = num_devices * stretch.num_microbatches
            if stretch.batch_size % parts:
                raise ValueError(
                    f"data.batch_ramp has steps of {stretch.batch_size} sequences, {stretch.batch_tokens} "
                    f"tokens; the sequences must be a multiple of {parts}: {num_devices} devices times "
                    f"{stretch.num_microbatches} microbatches"
                )


def describe_phase(phase: Phase) -> str:
    """What a phase is, on one line."""
    config = phase.config
    source = f"mixture {config.data.mixture}" if config.data.mixture else config.data.corpus
    return (
        f"phase {phase.name}: steps {phase.first_step + 1:,} to {phase.end:,}, sequences of "
        f"{config.data.sequence_length:,}, RoPE base {config.model.rope_theta:,.0f}, from {source}"
    )


def describe_batch(stretch: Stretch) -> str:
    """What a step reads, on one line."""
    return (
        f"from step {stretch.first_step + 1:,}: {stretch.batch_size:,} x {stretch.sequence_length:,} = "
        f"{stretch.batch_tokens:,} tokens a step"
    )
