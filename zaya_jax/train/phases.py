"""Phases as the lines that a run prints of them, and whether its devices can share their batches."""

from zaya_jax.config import Config, Phase, StepRange, in_phase, step_ranges
from zaya_jax.parallel.mesh import check_batch_size, describe_parts, parts_of_batch


def check_devices(config: Config, num_devices: int) -> None:
    """Refuses a run with a batch that cannot be shared evenly by the devices.

    Raises:
      ValueError: unless every batch is a multiple of devices with rows of their own times microbatches.
    """
    for each in step_ranges(config):
        shares = each.num_microbatches, num_devices, each.phase.config.execution.context_devices
        with in_phase(each.phase.name):
            # The full batch has a field of its own, and the sentence must name the field that is wrong.
            if each.batch_size == each.phase.config.data.batch_size:
                check_batch_size(each.batch_size, *shares)
            if each.batch_size % parts_of_batch(*shares):
                raise ValueError(
                    f"data.batch_ramp has steps of {each.batch_size} sequences, {each.batch_tokens} "
                    f"tokens; the sequences must be a multiple of {describe_parts(*shares)}"
                )


def describe_phase(phase: Phase) -> str:
    """What a phase is, on one line."""
    config = phase.config
    source = f"mixture {config.data.mixture}" if config.data.mixture else config.data.corpus
    ranks = config.execution.context_devices
    shared = f" over {ranks} devices each" if ranks > 1 else ""
    return (
        f"phase {phase.name}: steps {phase.first_step + 1:,} to {phase.end:,}, sequences of "
        f"{config.data.sequence_length:,}{shared}, RoPE base {config.model.rope_theta:,.0f}, from {source}"
    )


def describe_batch(step_range: StepRange) -> str:
    """What a step reads, on one line."""
    return (
        f"from step {step_range.first_step + 1:,}: {step_range.batch_size:,} x "
        f"{step_range.sequence_length:,} = {step_range.batch_tokens:,} tokens a step"
    )
