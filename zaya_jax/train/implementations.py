"""Which implementation each operation of a run takes, where its config leaves that open."""

import dataclasses

from pallas_kernels.choice import choose
from zaya_jax.config import ExecutionConfig, ModelConfig

OPERATIONS = {
    "attention_implementation": "flash_attention",
    "decode_implementation": "decode_attention",
    "experts_implementation": "grouped_swiglu",
    "residual_implementation": "residual_rms_norm",
    "cca_implementation": "cca",
    "loss_implementation": "cross_entropy",
    "newton_schulz_implementation": "newton_schulz",
}
"""What `pallas_kernels.choice` calls the operation of each field of `ExecutionConfig`."""


def resolve_implementations(
    execution: ExecutionConfig, config: ModelConfig, *, platform: str | None = None
) -> ExecutionConfig:
    """The execution with an implementation named for each operation of network, loss and optimiser.

    Args:
      execution: in whose fields None stands for `implementation`, and there for what was measured best.
      config: of the network, whose widths a kernel must be able to take.
      platform: that the program is compiled for: "cpu", "cuda" or "rocm"; None is the one that runs here.
    """
    widths = {
        "flash_attention": config.head_dim,
        "decode_attention": config.head_dim,
        "residual_rms_norm": config.hidden_size,
        "cca": config.head_dim,
    }

    def chosen(field: str, operation: str) -> str:
        asked = getattr(execution, field) or execution.implementation
        return asked or choose(operation, None, platform=platform, width=widths.get(operation, 0))

    named = {field: chosen(field, operation) for field, operation in OPERATIONS.items()}
    return dataclasses.replace(execution, **named)


def describe_implementations(execution: ExecutionConfig, config: ModelConfig) -> str:
    """Which operations of a run are Pallas kernels on the platform that runs here, on one line."""
    named = resolve_implementations(execution, config)
    taken = {field.removesuffix("_implementation"): getattr(named, field) for field in OPERATIONS}
    said = {"pallas": "{}", "ragged_dot+pallas": "gradients of {}"}
    kernels = [said[form].format(name) for name, form in taken.items() if form in said]
    return f"Pallas kernels: {', '.join(kernels)}; the rest by XLA" if kernels else "Pallas kernels: none"
