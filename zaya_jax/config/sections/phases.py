"""Section `phases`: consecutive parts of a run that override some of its fields."""

import contextlib
import dataclasses
import typing
from collections.abc import Iterator

from zaya_jax.config.rules import require, require_name
from zaya_jax.config.sections.balancing import BalancingConfig
from zaya_jax.config.sections.data import DataConfig
from zaya_jax.config.sections.execution import ExecutionConfig
from zaya_jax.config.sections.model import ModelConfig
from zaya_jax.config.sections.optimizer import OptimizerConfig
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.fields import build, convert

PHASE_FIELDS = {
    "model": ("rope_theta", "sliding_rope_theta"),
    "data": ("mixture", "sequence_length", "batch_size", "batch_ramp"),
    "optimizer": (
        "schedule", "learning_rate", "final_learning_rate", "warmup_steps", "decay_steps", "weight_decay",
        "matrix_rate", "hyperball", "cautious_decay", "momentum", "newton_schulz_steps", "beta1", "beta2",
        "eps", "clip_norm",
    ),
    "balancing": (
        "learning_rate", "beta1", "beta2", "eps", "proportional", "derivative", "skip_share",
    ),
    "execution": tuple(
        field.name for field in dataclasses.fields(ExecutionConfig) if field.name != "node_devices"
    ),
}  # fmt: skip
"""Fields that a phase may override: those that do not change the shapes of the train state."""
SECTIONS = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig,
            "balancing": BalancingConfig, "execution": ExecutionConfig}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """One part of a run: its length, and its overrides of the run's config.

    Attributes:
      name: name of the phase, in progress lines and in `--config.phases.NAME.SECTION.FIELD=VALUE`.
      tokens: number of tokens that the phase reads, rounded up to whole steps; None if `steps` is set.
      steps: number of optimizer steps of the phase; None if `tokens` is set.
      model: overridden fields of section `model`; `PHASE_FIELDS` lists those that can be overridden.
      data: overridden fields of section `data`.
      optimizer: overridden fields of section `optimizer`.
      balancing: overridden fields of section `balancing`.
      execution: overridden fields of section `execution`.
    """

    name: str
    tokens: int | None = None
    steps: int | None = None
    model: dict = dataclasses.field(default_factory=dict)
    data: dict = dataclasses.field(default_factory=dict)
    optimizer: dict = dataclasses.field(default_factory=dict)
    balancing: dict = dataclasses.field(default_factory=dict)
    execution: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        require_name("phases", self.name)
        path = f"phases.{self.name}"
        require(
            (self.tokens is None) != (self.steps is None),
            f"{path} has tokens {self.tokens} and steps {self.steps}; it must have one of them",
        )
        for name, value in (("tokens", self.tokens), ("steps", self.steps)):
            require(value is None or value > 0, f"{path}.{name} is {value}; it must be above 0")
        for section in PHASE_FIELDS:
            # Converted to the types of the section, so that a phase read from JSON equals the one written.
            object.__setattr__(self, section, _phase_values(path, section, getattr(self, section)))


def _phase_values(path: str, section: str, values: dict) -> dict:
    """A phase's overrides of one section, validated and converted to the types of its fields."""
    allowed, hints = PHASE_FIELDS[section], typing.get_type_hints(SECTIONS[section])
    # The hint covers fields that are written in the wrong section of a phase.
    for field in values:
        elsewhere = [f'"{path}.{other}.{field}"' for other, has in PHASE_FIELDS.items() if field in has]
        hint = f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
        require(
            field in allowed,
            f"{path} sets {section}.{field}; of {section} a phase can set {', '.join(allowed)}{hint}",
        )
    return {field: convert(hints[field], v, f"{path}.{section}.{field}") for field, v in values.items()}


def num_steps(values: dict, phase: PhaseConfig) -> int:
    """Number of steps of a phase: its `steps`, or the smallest number that reads its `tokens`.

    Args:
      values: plain values of the run's config.
      phase: a phase of it.

    Raises:
      UserError: if the batch ramp alone reads that many tokens, or the section `data` is invalid.
    """
    if phase.steps is not None:
        return phase.steps
    # PhaseConfig requires exactly one of the two.
    assert phase.tokens is not None, "a phase has steps or tokens"
    with in_phase(phase.name):
        return build(DataConfig, merge(values, phase)["data"], "data").steps_for(phase.tokens)


def merge(values: dict, phase: PhaseConfig) -> dict:
    """Plain values of the run's config with the overrides of a phase applied, and without `phases`."""
    # Sections that a phase cannot override are those of the run.
    sections = {name: values.get(name, {}) | getattr(phase, name) for name in PHASE_FIELDS}
    return values | sections | {"phases": ()}


@contextlib.contextmanager
def in_phase(name: str) -> Iterator[None]:
    """Prefixes messages of errors within the context with the phase, if the phase has a name.

    Raises:
      UserError: instead of each UserError within the context.
    """
    try:
        yield
    except UserError as error:
        if not name or isinstance(error, DamagedError):  # a damaged file is not an error in the phase
            raise
        raise UserError(f"in phase {name}: {error}") from error
