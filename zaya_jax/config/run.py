"""A whole run: its sections, the rules between them, and its phases resolved."""

import dataclasses
import functools
import json

from ml_collections import ConfigDict

from zaya_jax.config.balancing import BalancingConfig
from zaya_jax.config.data import DataConfig
from zaya_jax.config.dpo import DpoConfig
from zaya_jax.config.execution import ExecutionConfig
from zaya_jax.config.log import LogConfig
from zaya_jax.config.lora import LoraConfig
from zaya_jax.config.model import ModelConfig
from zaya_jax.config.optimizer import OptimizerConfig
from zaya_jax.config.phases import SECTIONS, PhaseConfig, in_phase, merge, num_steps
from zaya_jax.config.profile import ProfileConfig
from zaya_jax.config.rules import require, require_different
from zaya_jax.config.tasks import TasksConfig
from zaya_jax.config.train import TrainConfig
from zaya_jax.config.watch import WatchConfig
from zaya_jax.fields import UnknownField, build, convert, field_paths, to_plain
from zaya_jax.json_files import parse_object


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run, resolved.

    Attributes:
      name: of the phase.
      first_step: steps of the run before it.
      config: the run's, with what the phase sets; `train.num_steps` are the phase's own.
    """

    name: str
    first_step: int
    config: "Config"

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the phase alone."""
        return self.config.train.num_steps

    @property
    def end(self) -> int:
        """Steps of the run when the phase is done."""
        return self.first_step + self.num_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run.

    Attributes:
      run_folder: where the run keeps its config, metrics and checkpoints.
      model: the network.
      data: its tokens.
      optimizer: how weights move.
      lora: adapters that train in place of them.
      dpo: learning from pairs of answers in place of the next token.
      balancing: how router biases move.
      train: the run around the step.
      execution: how all of it is computed.
      watch: how long it may stand still.
      log: who is told of it.
      profile: which of its steps are traced.
      tasks: what lm-eval asks of it on the way.
      phases: the parts of the run, one after the other; without any, the run is one phase of
        `train.num_steps`.
    """

    run_folder: str = "runs/unnamed"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    dpo: DpoConfig = dataclasses.field(default_factory=DpoConfig)
    balancing: BalancingConfig = dataclasses.field(default_factory=BalancingConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    execution: ExecutionConfig = dataclasses.field(default_factory=ExecutionConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)
    tasks: TasksConfig = dataclasses.field(default_factory=TasksConfig)
    phases: tuple[PhaseConfig, ...] = ()

    def __post_init__(self):
        require(self.run_folder != "", "run_folder is empty; it must name the folder of the run")
        require(
            not (self.lora.rank and self.optimizer.frozen),
            f"lora.rank is {self.lora.rank} and optimizer.frozen {', '.join(self.optimizer.frozen)}; with "
            "adapters all weights of the network are frozen, so leave optimizer.frozen empty",
        )
        if self.dpo.beta:
            self._check_dpo()
        if self.phases:
            self._check_phases()
        else:
            self._check_phase()

    def _check_dpo(self) -> None:
        beta = self.dpo.beta
        require(
            self.train.init_from is not None,
            f"dpo.beta is {beta} and train.init_from None; it must name the run whose weights are "
            "the reference",
        )
        require(
            not self.train.z_loss,
            f"train.z_loss is {self.train.z_loss} and dpo.beta {beta}; the loss of pairs has none, so it "
            "must be 0",
        )
        require(
            not self.phases,
            f"dpo.beta is {beta} and there are {len(self.phases)} phases; a run that learns preferences has "
            "none: set phases to ()",
        )

    def _check_phases(self) -> None:
        require_different("phases", [phase.name for phase in self.phases])
        total = self.resolved_phases[-1].end
        require(
            self.train.num_steps == total,
            f"train.num_steps is {self.train.num_steps}, and the phases have {total} steps in all; it "
            "must be the same, or be left out",
        )

    def _check_phase(self) -> None:
        require(
            self.data.sequence_length <= self.model.max_position_embeddings,
            f"data.sequence_length is {self.data.sequence_length}; model.max_position_embeddings allows "
            f"{self.model.max_position_embeddings}",
        )
        require(
            self.data.batch_size % self.execution.num_microbatches == 0,
            f"data.batch_size is {self.data.batch_size}; it must be a multiple of "
            f"execution.num_microbatches, {self.execution.num_microbatches}",
        )
        self._check_context()
        asked = self.tasks.context
        require(
            asked is None or asked <= self.model.max_position_embeddings,
            f"tasks.context is {asked}; model.max_position_embeddings allows "
            f"{self.model.max_position_embeddings}",
        )
        trained = self.data.tokenizer_vocab_size
        require(
            trained is None or trained <= self.model.vocab_size,
            f"data.tokenizer_vocab_size is {trained}; model.vocab_size has rows for {self.model.vocab_size}",
        )
        steps = self.train.num_steps
        require(
            self.optimizer.warmup_steps < steps,
            f"optimizer.warmup_steps is {self.optimizer.warmup_steps}; it must be below train.num_steps, "
            f"{steps}",
        )
        require(
            self.optimizer.warmup_steps + self.optimizer.decay_steps <= steps,
            f"optimizer.warmup_steps + decay_steps is {self.optimizer.warmup_steps} + "
            f"{self.optimizer.decay_steps}; together they must be at most train.num_steps, {steps}",
        )
        require(
            self.data.ramp_steps < steps,
            f"data.batch_ramp has {self.data.ramp_steps} steps; it must end before train.num_steps, {steps}",
        )

    def _check_context(self) -> None:
        ranks, length = self.execution.context_devices, self.data.sequence_length
        if ranks == 1:
            return
        rest = length % (2 * ranks)
        require(
            not rest,
            f"data.sequence_length is {length}; with execution.context_devices {ranks} it must be a multiple "
            f"of {2 * ranks}, as {length - rest or 2 * ranks} is",
        )
        require(
            not self.dpo.beta,
            f"dpo.beta is {self.dpo.beta} and execution.context_devices {ranks}; answers are compared within "
            "a device, so it must be 1",
        )

    @functools.cached_property
    def resolved_phases(self) -> tuple[Phase, ...]:
        """The phases as whole configs; a run without phases is one phase without a name."""
        if not self.phases:
            return (Phase("", 0, self),)
        values, resolved, step = dataclasses.asdict(self), [], 0
        for phase in self.phases:
            resolved.append(Phase(phase.name, step, _resolve(values, phase)))
            step = resolved[-1].end
        return tuple(resolved)

    def phase_at(self, step: int) -> Phase:
        """The phase that makes step `step`, counted from 1; the first and last go on outside."""
        return next((phase for phase in self.resolved_phases if step <= phase.end), self.resolved_phases[-1])

    @classmethod
    def from_dict(cls, values: ConfigDict | dict) -> "Config":
        """Builds and checks a config from the `ConfigDict` of a config file.

        Raises:
          ValueError: for an unknown field, a value of the wrong type, or a value that cannot be.
        """
        plain = to_plain(values)
        sections = (plain.get(name, {}) for name in ("train", *SECTIONS))
        if plain.get("phases") and all(isinstance(section, dict) for section in sections):
            phases = convert(tuple[PhaseConfig, ...], plain["phases"], "phases")
            total = sum(num_steps(plain, phase) for phase in phases)
            plain = plain | {"train": {"num_steps": total} | plain.get("train", {})}
        try:
            return build(cls, plain, "")
        except UnknownField as error:
            if sentence := _known_elsewhere(error):
                raise ValueError(sentence) from error
            raise

    def to_text(self) -> str:
        """The resolved config as JSON, one field a line: what a run folder keeps."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Config":
        """The config that `to_text` wrote, checked like any other.

        Raises:
          ValueError: if the text is no JSON object, or not of a config.
        """
        return cls.from_dict(parse_object(text.encode(), "it"))


def _known_elsewhere(error: UnknownField) -> str | None:
    """A sentence about a field that another section has; None where none has it."""
    meant = [f'"{path}"' for path in field_paths(Config) if path.rpartition(".")[2] == error.name]
    if not meant or error.section.startswith("phases"):
        return None
    return f"{error.subject}; did you mean {' or '.join(meant)}?"


def _resolve(values: dict, phase: PhaseConfig) -> Config:
    """The config of a phase, from the values around it."""
    merged = merge(values, phase)
    merged["train"] = values["train"] | {"num_steps": num_steps(values, phase)}
    with in_phase(phase.name):
        return build(Config, merged, "")
