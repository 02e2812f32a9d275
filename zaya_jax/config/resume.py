"""What a run may have otherwise when it goes on: each field of a config is of one kind."""

import dataclasses
import enum
from typing import Any

from zaya_jax.config.run import Config, Phase
from zaya_jax.fields import dotted_items

UNSET = "unset"
"""Stands for what a phase leaves as the run has it."""


class Kind(enum.Enum):
    """What a field decides, and so whether a run that has begun may have it otherwise."""

    LEARNED = enum.auto()
    """What is learned, or where the run is in its data: never."""
    COURSE = enum.auto()
    """How weights move from here on: where one asks for it."""
    PLACE = enum.auto()
    """Where data lies: as long as it is the same data."""
    LENGTH = enum.auto()
    """How many steps there are: where the learning rates of the steps that are done do not depend on it."""
    EXECUTION = enum.auto()
    """How it is computed, which changes results by rounding alone: always."""
    KEEPING = enum.auto()
    """What is logged and kept, and where: always."""


KINDS = {
    "run_folder": Kind.KEEPING,
    "model": Kind.LEARNED,
    "data.corpus": Kind.PLACE,
    # From which a corpus that is missing is built; whether it is the one that was read is checked.
    "data.source": Kind.PLACE,
    "data.mixtures": Kind.LEARNED,
    "data.mixtures.corpora": Kind.PLACE,
    "data.mixture": Kind.LEARNED,
    "data.tokenizer": Kind.PLACE,
    # By which one that is missing is trained; whether it is the same is checked, as of a corpus.
    "data.tokenizer_vocab_size": Kind.PLACE,
    "data.bos_token": Kind.LEARNED,
    "data.eos_token": Kind.LEARNED,
    "data.pad_token": Kind.LEARNED,
    # A run's place in its data is a number of sequences, made of these.
    "data.sequence_length": Kind.LEARNED,
    "data.batch_size": Kind.LEARNED,
    "data.batch_ramp": Kind.LEARNED,
    "data.seed": Kind.LEARNED,
    # What an optimiser keeps depends on its name and on the type of the momentum.
    "optimizer.name": Kind.LEARNED,
    "optimizer.momentum_dtype": Kind.LEARNED,
    # And on what trains.
    "optimizer.frozen": Kind.LEARNED,
    "optimizer": Kind.COURSE,
    "lora": Kind.LEARNED,
    "dpo": Kind.LEARNED,
    "balancing.rule": Kind.LEARNED,
    "balancing": Kind.COURSE,
    "train.num_steps": Kind.LENGTH,
    "train.z_loss": Kind.COURSE,
    "train.update_norms": Kind.KEEPING,
    "train.seed": Kind.LEARNED,
    "train.log_every": Kind.KEEPING,
    "train.eval_every": Kind.KEEPING,
    "train.eval_sequences": Kind.KEEPING,
    "train.checkpoint_every": Kind.KEEPING,
    "train.checkpoint_minutes": Kind.KEEPING,
    "train.keep_checkpoints": Kind.KEEPING,
    "train.keep_every": Kind.KEEPING,
    "train.keep_best": Kind.KEEPING,
    "train.min_free_gib": Kind.KEEPING,
    "train.on_failed_save": Kind.KEEPING,
    "train.sample_tokens": Kind.KEEPING,
    # It ends a run sooner or later, and moves nothing.
    "train.stop_after_skips": Kind.KEEPING,
    "train.init_from": Kind.LEARNED,
    "execution": Kind.EXECUTION,
    # It ends a process sooner or later, and the next one goes on.
    "watch": Kind.KEEPING,
    "log": Kind.KEEPING,
    "profile": Kind.KEEPING,
    "tasks": Kind.KEEPING,
    # Their names, in their order. One more with longer sequences would shuffle its corpora anew, from the
    # first step on: a corpus is shuffled in pieces that the lengths of all phases divide.
    "phases": Kind.LEARNED,
    "phases.tokens": Kind.LENGTH,
    "phases.steps": Kind.LENGTH,
}
"""By field, or by section for the fields that are not named."""
COURSE_OPTION = "--change-course"
"""What one gives `zaya train` to ask for it."""


@dataclasses.dataclass(frozen=True)
class FieldChange:
    """A field that two configs have otherwise.

    Attributes:
      name: of the field, with its section.
      old: its value before.
      new: its value now.
    """

    name: str
    old: Any
    new: Any

    @property
    def kind(self) -> Kind:
        """What the field decides: what is learned, or only how."""
        return kind_of(self.name)

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"


def kind_of(name: str) -> Kind:
    """The kind of a field, by its dotted name; a phase's fields are of the kinds that the run's are."""
    parts = name.split(".")
    if len(parts) > 2 and parts[0] == "phases":
        parts = parts[2:] if len(parts) > 3 else ["phases", parts[2]]
    if parts[:2] == ["data", "mixtures"] and parts[-1] == "corpora":
        return KINDS["data.mixtures.corpora"]
    field = ".".join(parts[:2])
    return KINDS[field] if field in KINDS else KINDS[parts[0]]


def differences(ours: Config, theirs: Config) -> list[FieldChange]:
    """The fields that two configs have otherwise; of phases that only one has, the names alone."""
    new, old = _values(ours), _values(theirs)
    in_one = {phase.name for phase in ours.phases} ^ {phase.name for phase in theirs.phases}
    found = [
        FieldChange(name, old.get(name, UNSET), new.get(name, UNSET)) for name in dict.fromkeys((*new, *old))
    ]
    return [each for each in found if each.old != each.new and not _is_of_phase(each.name, in_one)]


def _values(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = {"phases": tuple(phase.name for phase in config.phases)}
    for name, value in dotted_items(config):
        if isinstance(value, dict):  # what a phase sets in a section
            values |= {f"{name}.{field}": each for field, each in value.items()}
        else:
            values[name] = value
    if config.phases:
        del values["train.num_steps"]  # follows from theirs
    return values


def _is_of_phase(name: str, phases: set[str]) -> bool:
    parts = name.split(".")
    return len(parts) > 2 and parts[0] == "phases" and parts[1] in phases


def refusals(
    ours: Config, theirs: Config, *, newest_step: int | None, change_course: bool = False
) -> list[str]:
    """Why a run cannot go on with a config: a sentence for each field that stands against it.

    Args:
      ours: with which it is to go on.
      theirs: with which it has begun.
      newest_step: of its newest checkpoint; None without one.
      change_course: whether rates, decays and lengths may be others from that step on, which an undisturbed
        run would not have had.
    """
    learned = "it changes what is learned"
    reasons = {
        Kind.LEARNED: learned,
        Kind.COURSE: None if change_course else f"{learned}, unless {COURSE_OPTION} asks for it",
        Kind.LENGTH: _against_length(ours, theirs, newest_step or 0, change_course=change_course),
        Kind.PLACE: _against_places(ours, theirs),
    }
    return [
        f"{each.name} is {each.new} and was {each.old}: {reason}"
        for each in differences(ours, theirs)
        if (reason := reasons.get(each.kind)) is not None
    ]


def corpora_by_use(config: Config) -> tuple[str, ...]:
    """The folders that a run reads, one for each place in its config that names one."""
    datas = [phase.config.data for phase in config.resolved_phases]
    mixed = (folder for data in datas for mixture in data.mixtures for folder in mixture.corpora)
    return (*(data.corpus for data in datas), *mixed)


def _against_places(ours: Config, theirs: Config) -> str | None:
    """Why corpora cannot be called so; None where each is one of those before, which may have moved."""
    new, old = corpora_by_use(ours), corpora_by_use(theirs)
    # One that stood for two was read as one, in one order: apart they would be read twice.
    if len(new) == len(old) and len(set(zip(new, old, strict=True))) == len(set(new)) == len(set(old)):
        return None
    return "a corpus may lie elsewhere, and none may come, go or be two"


def _against_length(ours: Config, theirs: Config, newest_step: int, *, change_course: bool) -> str | None:
    """Why phases cannot have other numbers of steps than they had; None where they can."""
    for new, old in zip(ours.resolved_phases, theirs.resolved_phases, strict=False):
        if new.num_steps != old.num_steps:
            reason = None if change_course else _against_rates(new, old, newest_step)
            reason = reason or _against_end(new, old, newest_step)
            if reason is not None:
                return f"in phase {new.name}, {reason}" if new.name else reason
    return None


def _against_rates(new: Phase, old: Phase, newest_step: int) -> str | None:
    """Whether a learning rate that was taken already would have been another."""
    optimizer = new.config.optimizer
    if optimizer.schedule in ("linear", "cosine"):
        return (
            f'optimizer.schedule "{optimizer.schedule}" goes on to the last step, so that another number of '
            f"steps changes what is learned, unless {COURSE_OPTION} asks for it"
        )
    done, shorter = newest_step - old.first_step, min(old.num_steps, new.num_steps)
    if optimizer.decay_steps and done > shorter - optimizer.decay_steps:
        return (
            f"the newest checkpoint is of step {newest_step}, and the decay that the number of steps moves "
            f"begins behind step {old.first_step + shorter - optimizer.decay_steps}"
        )
    return None


def _against_end(new: Phase, old: Phase, newest_step: int) -> str | None:
    done = newest_step - old.first_step
    if done > old.num_steps:
        return f"the newest checkpoint is of step {newest_step}, and the phase ended at {old.end}"
    # A phase tells its held-out loss at its last step: one that is cut off where it stands would not.
    if done >= new.num_steps:
        return f"the newest checkpoint is of step {newest_step}, and there must be steps left"
    return None
