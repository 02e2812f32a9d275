"""The section `phases`: what parts of a run have otherwise than the run."""

import contextlib
import dataclasses
import typing
from collections.abc import Iterator

from zaya_jax.config.balancing import BalancingConfig
from zaya_jax.config.data import DataConfig
from zaya_jax.config.execution import ExecutionConfig
from zaya_jax.config.model import ModelConfig
from zaya_jax.config.optimizer import OptimizerConfig
from zaya_jax.config.rules import require, require_name
from zaya_jax.durable import Damaged
from zaya_jax.fields import build, convert

PHASE_FIELDS = {
    "model": ("rope_theta", "sliding_rope_theta"),
    "data": ("mixture", "sequence_length", "batch_size", "batch_ramp"),
    "optimizer": (
        "schedule", "learning_rate", "final_learning_rate", "warmup_steps", "decay_steps", "weight_decay",
        "momentum", "newton_schulz_steps", "beta1", "beta2", "eps", "clip_norm",
    ),
    "balancing": (
        "learning_rate", "beta1", "beta2", "eps", "proportional", "derivative", "skip_share",
    ),
    "execution": tuple(
        field.name for field in dataclasses.fields(ExecutionConfig) if field.name != "node_devices"
    ),
}  # fmt: skip
"""What a phase may have otherwise than the run: what leaves the shapes of the state as they are."""
SECTIONS = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig,
            "balancing": BalancingConfig, "execution": ExecutionConfig}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """A part of a run: how long it is, and what it has otherwise than the config around it.

    Attributes:
      name: of the phase, in the progress line and for `--config.phases.NAME.SECTION.FIELD=VALUE`.
      tokens: that the phase reads; its last step may go past them. None where `steps` says it.
      steps: of the phase. None where `tokens` says it.
      model: fields of the section that the phase sets anew; which it can are in `PHASE_FIELDS`.
      data: the same.
      optimizer: the same.
      balancing: the same.
      execution: the same.
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
            # Of the types that the section has, so that a phase read from JSON equals the one written.
            object.__setattr__(self, section, _phase_values(path, section, getattr(self, section)))


def _phase_values(path: str, section: str, values: dict) -> dict:
    """What a phase sets in a section, checked and of its types."""
    allowed, hints = PHASE_FIELDS[section], typing.get_type_hints(SECTIONS[section])
    for field in values:
        elsewhere = [f'"{path}.{other}.{field}"' for other, has in PHASE_FIELDS.items() if field in has]
        hint = f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
        require(
            field in allowed,
            f"{path} sets {section}.{field}; of {section} a phase can set {', '.join(allowed)}{hint}",
        )
    return {field: convert(hints[field], v, f"{path}.{section}.{field}") for field, v in values.items()}


def num_steps(values: dict, phase: PhaseConfig) -> int:
    """Steps of a phase, from the values around it: those it has, or the fewest that read its tokens.

    Raises:
      ValueError: when its batch ramp alone reads as many, or its data cannot be.
    """
    if phase.steps is not None:
        return phase.steps
    assert phase.tokens is not None, "a phase has steps or tokens"
    with in_phase(phase.name):
        return build(DataConfig, merge(values, phase)["data"], "data").steps_for(phase.tokens)


def merge(values: dict, phase: PhaseConfig) -> dict:
    """The values around a phase, with what it sets in place of theirs, and without phases."""
    sections = {name: values.get(name, {}) | getattr(phase, name) for name in PHASE_FIELDS}
    return values | sections | {"phases": ()}


@contextlib.contextmanager
def in_phase(name: str) -> Iterator[None]:
    """Says of a mistake in which phase it is, where phases have names.

    Raises:
      ValueError: in place of one that comes up within.
    """
    try:
        yield
    except ValueError as error:
        if not name or isinstance(error, Damaged):  # what a disk lost is no mistake of a phase
            raise
        raise ValueError(f"in phase {name}: {error}") from error
