"""The config of a whole run: its sections, the rules between sections, and its resolved phases."""

import dataclasses
import functools
import json

from ml_collections import ConfigDict

from zaya_jax.config.aliases import field_by_alias
from zaya_jax.config.files import require_local
from zaya_jax.config.renamed_fields import RENAMED_FIELDS, RENAMED_VALUES, current_value, use_current_names
from zaya_jax.config.rules import require, require_different
from zaya_jax.config.sections.balancing import BalancingConfig
from zaya_jax.config.sections.data import DataConfig
from zaya_jax.config.sections.distillation import DistillationConfig
from zaya_jax.config.sections.dpo import DpoConfig
from zaya_jax.config.sections.ema import EmaConfig
from zaya_jax.config.sections.execution import ExecutionConfig
from zaya_jax.config.sections.log import LogConfig
from zaya_jax.config.sections.lora import QUANTIZED, LoraConfig
from zaya_jax.config.sections.model import ModelConfig
from zaya_jax.config.sections.optimizer import OptimizerConfig
from zaya_jax.config.sections.phases import SECTIONS, PhaseConfig, in_phase, merge, num_steps
from zaya_jax.config.sections.profile import ProfileConfig
from zaya_jax.config.sections.tasks import TasksConfig
from zaya_jax.config.sections.train import TrainConfig
from zaya_jax.config.sections.watch import WatchConfig
from zaya_jax.errors import UserError
from zaya_jax.fields import UnknownField, build, convert, field_paths, join_path, to_plain
from zaya_jax.files.json_files import parse_object


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a run with its resolved config.

    Attributes:
      name: name of the phase; "" if the run has no phases.
      first_step: number of steps of the run that precede the phase.
      config: config of the run with the phase's overrides; `train.num_steps` is that of the phase.
    """

    name: str
    first_step: int
    config: "Config"

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the phase."""
        return self.config.train.num_steps

    @property
    def end(self) -> int:
        """Number of steps of the run after the phase."""
        return self.first_step + self.num_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The config of a whole run.

    Attributes:
      run_folder: folder of the run's config, metrics and checkpoints.
      model: architecture.
      data: corpora, tokenizer and batches.
      optimizer: Muon, AdamW and the learning-rate schedule.
      lora: low-rank adapters, which train instead of the other weights.
      dpo: preference optimization, which replaces the next-token loss.
      distillation: learning from the predictions of another run.
      balancing: controller of the router biases.
      ema: exponential moving average of the weights.
      train: length of the run, logging, evaluation and checkpoints.
      execution: how everything is computed.
      watch: timeouts and health checks.
      log: experiment trackers.
      profile: steps to trace.
      tasks: evaluation on lm-eval tasks during training.
      phases: consecutive parts of the run; if empty, the run is one phase of `train.num_steps`.
    """

    run_folder: str = "runs/unnamed"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    dpo: DpoConfig = dataclasses.field(default_factory=DpoConfig)
    distillation: DistillationConfig = dataclasses.field(default_factory=DistillationConfig)
    balancing: BalancingConfig = dataclasses.field(default_factory=BalancingConfig)
    ema: EmaConfig = dataclasses.field(default_factory=EmaConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    execution: ExecutionConfig = dataclasses.field(default_factory=ExecutionConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)
    tasks: TasksConfig = dataclasses.field(default_factory=TasksConfig)
    phases: tuple[PhaseConfig, ...] = ()

    def __post_init__(self):
        require(self.run_folder != "", "run_folder is empty; it must be the path of a folder")
        # A run would otherwise create a local folder named "gs:".
        require_local("run_folder", self.run_folder)
        require(
            # With adapters, `frozen` would have no effect, so a config with both is probably a mistake.
            not (self.lora.rank and self.optimizer.frozen),
            f"lora.rank is {self.lora.rank} and optimizer.frozen {', '.join(self.optimizer.frozen)}; with "
            "adapters all other weights are frozen anyway, so set optimizer.frozen to ()",
        )
        switches = self.optimizer.muon_switches
        require(
            # AdamW updates the factors: B starts at zero, a norm that hyperball would keep.
            not (self.lora.rank and switches),
            f"lora.rank is {self.lora.rank} and optimizer.{' and '.join(switches)} True; AdamW updates "
            "adapters, so that no matrix of Muon trains; set it to False",
        )
        # Rules that involve several sections are checked here; each section checks its own values.
        if self.lora.rank and self.lora.base_dtype in QUANTIZED:
            self._check_quantized_base()
        if self.dpo.beta:
            self._check_dpo()
        if self.distillation.teacher is not None:
            self._check_distillation()
        self._check_derived()
        # A run with phases is validated phase by phase: resolving them builds and checks one config each.
        if self.phases:
            self._check_phases()
        else:
            self._check_phase()

    def _check_quantized_base(self) -> None:
        base = self.lora.base_dtype
        require(
            # Random experts would stay random.
            self.train.init_from is not None,
            f'lora.base_dtype is "{base}" and train.init_from None; it must name the run whose experts are '
            "quantized",
        )
        require(
            self.execution.remat != "none",
            f'lora.base_dtype is "{base}" and execution.remat "none", which would keep the dequantized '
            'experts of all layers; set it to "products" or a later policy',
        )

    def _check_dpo(self) -> None:
        beta = self.dpo.beta
        require(
            # Without a reference there is nothing that the first weights would have to be.
            self.train.init_from is not None or not self.dpo.has_reference,
            f"dpo.beta is {beta} and train.init_from None; it must name the run whose weights are "
            "the reference",
        )
        require(
            # The z-loss regularizes next-token logits, and [DPO] has no such term.
            not self.train.z_loss,
            f"train.z_loss is {self.train.z_loss} and dpo.beta {beta}; the preference loss does not "
            "support it, so it must be 0",
        )
        require(
            not self.phases,
            f"dpo.beta is {beta} and there are {len(self.phases)} phases; preference optimization does not "
            "support phases: set phases to ()",
        )

    def _check_distillation(self) -> None:
        require(
            # Both would replace the loss.
            not self.dpo.beta,
            f"distillation.teacher is {self.distillation.teacher} and dpo.beta {self.dpo.beta}; a run has "
            "one of both: set dpo.beta to 0, or distillation.teacher to None",
        )
        require(
            not self.train.z_loss,
            f"train.z_loss is {self.train.z_loss} and distillation.teacher {self.distillation.teacher}; the "
            "distillation loss does not support it, so it must be 0",
        )
        require(
            # Predictions are stored by windows, whose borders are those of one sequence length.
            not self.phases,
            f"distillation.teacher is {self.distillation.teacher} and there are {len(self.phases)} phases; "
            "distillation does not support phases: set phases to ()",
        )

    def _check_derived(self) -> None:
        train, fraction = self.train, self.optimizer.warmup_fraction
        if train.epochs is None and train.evaluations is None and fraction is None:
            return
        require(
            # Each phase has its own length, and a mixture has no epoch.
            not self.phases and self.data.mixture is None,
            f"train.epochs is {train.epochs}, train.evaluations {train.evaluations} and "
            f"optimizer.warmup_fraction {fraction}; runs with phases or a mixture do not support them: set "
            "them to None",
        )

    def _check_phases(self) -> None:
        require_different("phases", [phase.name for phase in self.phases])
        # num_steps is redundant with phases, but written to config.json, so it must be consistent.
        total = self.resolved_phases[-1].end
        require(
            self.train.num_steps == total,
            f"train.num_steps is {self.train.num_steps}, and the phases have {total} steps in all; "
            "set it to the same number, or remove it",
        )

    def _check_phase(self) -> None:
        require(
            self.data.sequence_length <= self.model.max_position_embeddings,
            f"data.sequence_length is {self.data.sequence_length}; model.max_position_embeddings allows "
            f"{self.model.max_position_embeddings}",
        )
        require(
            # Microbatches must have equal sizes, because the step is compiled for one shape.
            self.data.batch_size % self.execution.num_microbatches == 0,
            f"data.batch_size is {self.data.batch_size}; it must be a multiple of "
            f"execution.num_microbatches, {self.execution.num_microbatches}",
        )
        self._check_context()
        length = self.tasks.context
        require(
            length is None or length <= self.model.max_position_embeddings,
            f"tasks.context is {length}; model.max_position_embeddings allows "
            f"{self.model.max_position_embeddings}",
        )
        size = self.data.tokenizer_vocab_size
        require(
            # The embedding may have unused rows, but a token without a row would read another row silently.
            size is None or size <= self.model.vocab_size,
            f"data.tokenizer_vocab_size is {size}; it must be at most model.vocab_size, "
            f"{self.model.vocab_size}",
        )
        steps = self.train.num_steps
        require(
            # Otherwise the learning rate would never reach its peak.
            self.optimizer.warmup_steps < steps,
            f"optimizer.warmup_steps is {self.optimizer.warmup_steps}; it must be below train.num_steps, "
            f"{steps}",
        )
        require(
            # Otherwise the decay would start before the warm-up ends.
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
        # Each device has an early and a late chunk, which balances causal attention ([Llama3] section 3.3.2).
        rest = length % (2 * ranks)
        require(
            not rest,
            f"data.sequence_length is {length}; with execution.context_devices {ranks} it must be a multiple "
            f"of {2 * ranks}, for example {length - rest or 2 * ranks}",
        )
        require(
            # The loss compares sums over whole answers, which would otherwise be split over devices.
            not self.dpo.beta,
            f"dpo.beta is {self.dpo.beta} and execution.context_devices {ranks}; the preference loss "
            "compares answers within a device, so the latter must be 1",
        )

    @functools.cached_property
    def resolved_phases(self) -> tuple[Phase, ...]:
        """The phases with complete configs; a run without phases has one phase without a name."""
        if not self.phases:
            return (Phase("", 0, self),)
        # Overrides are applied to plain values, so that each phase is validated as a whole config.
        values, resolved, step = dataclasses.asdict(self), [], 0
        for phase in self.phases:
            resolved.append(Phase(phase.name, step, _resolve(values, phase)))
            step = resolved[-1].end
        return tuple(resolved)

    def phase_at(self, step: int) -> Phase:
        """The phase of step `step`, counted from 1; the last phase for steps after the end of the run."""
        # Step 0, before the first one, belongs to the first phase.
        return next((phase for phase in self.resolved_phases if step <= phase.end), self.resolved_phases[-1])

    @classmethod
    def from_dict(cls, values: ConfigDict | dict) -> "Config":
        """Builds and validates a config from the `ConfigDict` of a config file.

        Raises:
          UserError: for an unknown field, or for a value that has the wrong type or breaks a rule.
        """
        plain = to_plain(values)
        _refuse_old_values(plain)
        # The sum of the phases replaces a missing num_steps. If a section is not a dictionary, building the
        # config below reports a better error.
        sections = (plain.get(name, {}) for name in ("train", *SECTIONS))
        if plain.get("phases") and all(isinstance(section, dict) for section in sections):
            phases = convert(tuple[PhaseConfig, ...], plain["phases"], "phases")
            total = sum(num_steps(plain, phase) for phase in phases)
            plain = plain | {"train": {"num_steps": total} | plain.get("train", {})}
        try:
            return build(cls, plain, "")
        except UnknownField as error:
            # Only this class knows the other sections, so that hints are added here and not in `build`.
            if message := _hint(error):
                raise UserError(message) from error
            raise

    def to_text(self) -> str:
        """The resolved config as JSON, one field per line, as it is stored in the run folder."""
        # One field per line makes diffs of two runs readable.
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Config":
        """Reads a config that `to_text` wrote, in this version or an earlier one, and validates it.

        Raises:
          UserError: if the text is not a JSON object, or not a valid config.
        """
        return cls.from_dict(use_current_names(parse_object(text.encode(), "it")))


def _refuse_old_values(plain: dict) -> None:
    """Raises a `UserError` with the current value if a field has a value that has been renamed."""
    for path in RENAMED_VALUES:
        section, _, field = path.partition(".")
        fields = plain.get(section)
        value = fields.get(field) if isinstance(fields, dict) else None
        if (current := current_value(path, value)) != value:
            raise UserError(f"unknown value '{value}' of {path}; it is called '{current}' now")


def _hint(error: UnknownField) -> str | None:
    """An error message that names the field that was probably meant; None if nothing is known of the name.

    It looks at former names, at fields of the same name in other sections, and at names in other trainers.
    """
    path = join_path(error.section, error.name)
    # Former names come first: they are unambiguous.
    if path in RENAMED_FIELDS:
        return f"unknown field '{path}'; it is called {RENAMED_FIELDS[path]} now"
    meant = [f'"{field}"' for field in field_paths(Config) if field.rpartition(".")[2] == error.name]
    if not meant and (field := field_by_alias(error.name)) is not None:
        meant = [f'"{field}"']
    if not meant or error.section.startswith("phases"):
        return None
    return f"{error.subject}; did you mean {' or '.join(meant)}?"


def _resolve(values: dict, phase: PhaseConfig) -> Config:
    """Builds the config of a phase from the plain values of the run's config."""
    merged = merge(values, phase)
    # A phase has its own number of steps, so that schedules and ranges need no other source.
    merged["train"] = values["train"] | {"num_steps": num_steps(values, phase)}
    with in_phase(phase.name):
        return build(Config, merged, "")
