"""Checks that devices can share the batches of all phases, and describes phases in one line."""

from zaya_jax.config import Config, Phase, StepRange, in_phase, step_ranges
from zaya_jax.errors import UserError
from zaya_jax.parallel.mesh import check_batch_size, describe_batch_parts, num_batch_parts


def check_devices(config: Config, num_devices: int) -> None:
    """Checks that every batch can be shared evenly by the devices.

    Raises:
      UserError: unless every batch is a multiple of data-parallel ranks times microbatches.
    """
    for each in step_ranges(config):
        shares = each.num_microbatches, num_devices, each.phase.config.execution.context_devices
        with in_phase(each.phase.name):
            # The full batch has its own config field, and the message must name the field that is wrong.
            if each.batch_size == each.phase.config.data.batch_size:
                check_batch_size(each.batch_size, *shares)
            if each.batch_size % num_batch_parts(*shares):
                raise UserError(
                    f"data.batch_ramp has steps of {each.batch_size} sequences, {each.batch_tokens} "
                    f"tokens; the sequences must be a multiple of {describe_batch_parts(*shares)}"
                )


def describe_phase(phase: Phase) -> str:
    """Describes a phase in one line."""
    config = phase.config
    source = f"mixture {config.data.mixture}" if config.data.mixture else config.data.corpus
    ranks = config.execution.context_devices
    shared = f" over {ranks} devices each" if ranks > 1 else ""
    return (
        f"phase {phase.name}: steps {phase.first_step + 1:,} to {phase.end:,}, sequences of "
        f"{config.data.sequence_length:,}{shared}, RoPE base {config.model.rope_theta:,.0f}, from {source}"
    )


def describe_batch(step_range: StepRange) -> str:
    """Describes the batch of a range of steps in one line."""
    return (
        f"from step {step_range.first_step + 1:,}: {step_range.batch_size:,} x "
        f"{step_range.sequence_length:,} = {step_range.batch_tokens:,} tokens per step"
    )
