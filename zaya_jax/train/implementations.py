"""Selection of an implementation for each operation of a run."""

import dataclasses

from pallas_kernels.choice import choose
from zaya_jax.config import ExecutionConfig, ModelConfig

OPERATIONS = {
    "attention_implementation": "flash_attention",
    "decode_implementation": "decode_attention",
    "experts_implementation": "grouped_feed_forward",
    "residual_implementation": "residual_rms_norm",
    "cca_implementation": "cca",
    "loss_implementation": "cross_entropy",
    "newton_schulz_implementation": "newton_schulz",
}
"""Name of the operation in `pallas_kernels.choice`, by field of `ExecutionConfig`."""


def resolve_implementations(
    execution: ExecutionConfig, config: ModelConfig, *, platform: str | None = None
) -> ExecutionConfig:
    """Returns the execution config with an implementation named for each operation.

    Args:
      execution: execution config; None in a field selects the field `implementation`, and None there selects
        the implementation that was measured fastest for the platform.
      config: network config, whose widths a kernel must support.
      platform: platform that the program is compiled for: "cpu", "cuda" or "rocm"; None for the current one.
    """
    widths = {
        "flash_attention": config.head_dim,
        "decode_attention": config.head_dim,
        "residual_rms_norm": config.hidden_size,
        "cca": config.head_dim,
    }

    def chosen(field: str, operation: str) -> str:
        # The field of an operation precedes the field for all of them, and both precede the table.
        requested = getattr(execution, field) or execution.implementation
        return requested or choose(operation, None, platform=platform, width=widths.get(operation, 0))

    named = {field: chosen(field, operation) for field, operation in OPERATIONS.items()}
    return dataclasses.replace(execution, **named)


def describe_implementations(execution: ExecutionConfig, config: ModelConfig) -> str:
    """Describes in one line which operations are Pallas kernels on the current platform."""
    named = resolve_implementations(execution, config)
    chosen = {field.removesuffix("_implementation"): getattr(named, field) for field in OPERATIONS}
    templates = {"pallas": "{}", "ragged_dot+pallas": "gradients of {}", "pallas+xla": "{} without gradients"}
    kernels = [templates[form].format(name) for name, form in chosen.items() if form in templates]
    return f"Pallas kernels: {', '.join(kernels)}; the rest by XLA" if kernels else "Pallas kernels: none"
