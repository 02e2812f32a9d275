"""Which fields of a config may change when a run resumes: every field has one resume rule."""

import dataclasses
import enum
from typing import Any

from zaya_jax.config.run import Config, Phase
from zaya_jax.fields import dotted_items

UNSET = "unset"
"""Value of a field that a phase does not override, in messages."""
COURSE_OPTION = "--change-course"
"""The option of `zaya train` that allows changes of fields with the rule `SCHEDULE`."""


class ResumeRule(enum.Enum):
    """Whether a run that has started may change a field."""

    FIXED = enum.auto()
    """Never: the field decides what is learned, or which data the next step reads."""
    SCHEDULE = enum.auto()
    """Only with `COURSE_OPTION`: the field decides how weights move from the next step on."""
    PATH = enum.auto()
    """To another path of the same data."""
    NUM_STEPS = enum.auto()
    """Number of steps: unless it changes the learning rate of a step that is already done."""
    FREE = enum.auto()
    """Always: the field decides how the run is computed (results differ by rounding), logged or stored."""


RESUME_RULES = {
    "run_folder": ResumeRule.FREE,
    "model": ResumeRule.FIXED,
    "data.corpus": ResumeRule.PATH,
    # The source is only used to build a missing corpus, whose fingerprint is verified after it is built.
    "data.source": ResumeRule.PATH,
    "data.source_kind": ResumeRule.PATH,
    "data.mixtures": ResumeRule.FIXED,
    "data.mixtures.corpora": ResumeRule.PATH,
    "data.mixture": ResumeRule.FIXED,
    "data.tokenizer": ResumeRule.PATH,
    # The size is only used to train a missing tokenizer, whose fingerprint is verified like a corpus's.
    "data.tokenizer_vocab_size": ResumeRule.PATH,
    "data.bos_token": ResumeRule.FIXED,
    "data.eos_token": ResumeRule.FIXED,
    "data.pad_token": ResumeRule.FIXED,
    # The data position is a number of sequences, so the length and number of sequences must not change.
    "data.sequence_length": ResumeRule.FIXED,
    "data.batch_size": ResumeRule.FIXED,
    "data.batch_ramp": ResumeRule.FIXED,
    "data.seed": ResumeRule.FIXED,
    # The structure of the optimizer state depends on these four.
    "optimizer.name": ResumeRule.FIXED,
    "optimizer.normuon": ResumeRule.FIXED,
    "optimizer.momentum_dtype": ResumeRule.FIXED,
    "optimizer.frozen": ResumeRule.FIXED,
    "optimizer": ResumeRule.SCHEDULE,
    "lora": ResumeRule.FIXED,
    "dpo": ResumeRule.FIXED,
    "distillation": ResumeRule.FIXED,
    "balancing.rule": ResumeRule.FIXED,
    "balancing": ResumeRule.SCHEDULE,
    # The average changes no weight; `TrainState` says what a resume makes of one that is missing.
    "ema": ResumeRule.FREE,
    "train.num_steps": ResumeRule.NUM_STEPS,
    # These two decide others, which have their own rules.
    "train.epochs": ResumeRule.FREE,
    "train.evaluations": ResumeRule.FREE,
    "train.z_loss": ResumeRule.SCHEDULE,
    "train.update_norms": ResumeRule.FREE,
    "train.seed": ResumeRule.FIXED,
    "train.log_every": ResumeRule.FREE,
    "train.eval_every": ResumeRule.FREE,
    "train.eval_sequences": ResumeRule.FREE,
    "train.checkpoint_every": ResumeRule.FREE,
    "train.checkpoint_minutes": ResumeRule.FREE,
    "train.checkpoint_writers": ResumeRule.FREE,
    "train.peer_copies_every": ResumeRule.FREE,
    "train.peer_copies_folder": ResumeRule.FREE,
    "train.keep_checkpoints": ResumeRule.FREE,
    "train.keep_every": ResumeRule.FREE,
    "train.keep_best": ResumeRule.FREE,
    "train.min_free_gib": ResumeRule.FREE,
    "train.on_failed_save": ResumeRule.FREE,
    "train.sample_tokens": ResumeRule.FREE,
    # This and `watch` decide when a process ends; the next process continues with the same weights.
    "train.max_consecutive_skips": ResumeRule.FREE,
    "train.init_from": ResumeRule.FIXED,
    "execution": ResumeRule.FREE,
    "watch": ResumeRule.FREE,
    "log": ResumeRule.FREE,
    "profile": ResumeRule.FREE,
    "tasks": ResumeRule.FREE,
    # The names and order of the phases. A corpus is shuffled in pieces whose size the sequence lengths of all
    # phases divide, so a new phase with longer sequences would reshuffle the data from the first step on.
    "phases": ResumeRule.FIXED,
    "phases.tokens": ResumeRule.NUM_STEPS,
    "phases.steps": ResumeRule.NUM_STEPS,
}
"""Rule by field; the rule of a section applies to its fields that are not listed."""


@dataclasses.dataclass(frozen=True)
class FieldChange:
    """A field that differs between two configs.

    Attributes:
      name: dotted name of the field.
      old: value in the config that the run started with.
      new: value in the config that it resumes with.
    """

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"


def resume_rule(name: str) -> ResumeRule:
    """The rule of a field, by its dotted name. A phase's override has the rule of the run's field."""
    parts = name.split(".")
    if len(parts) > 2 and parts[0] == "phases":
        parts = parts[2:] if len(parts) > 3 else ["phases", parts[2]]
    if parts[:2] == ["data", "mixtures"] and parts[-1] == "corpora":
        return RESUME_RULES["data.mixtures.corpora"]
    field = ".".join(parts[:2])
    return RESUME_RULES[field] if field in RESUME_RULES else RESUME_RULES[parts[0]]


def differences(new: Config, old: Config) -> list[FieldChange]:
    """The fields that differ between two configs.

    A phase that only one of them has appears as a change of the list of names, `phases`, not of its fields.
    """
    new_values, old_values = _values(new), _values(old)
    unmatched = {phase.name for phase in new.phases} ^ {phase.name for phase in old.phases}
    changes = [
        FieldChange(name, old_values.get(name, UNSET), new_values.get(name, UNSET))
        for name in dict.fromkeys((*new_values, *old_values))
    ]
    return [c for c in changes if c.old != c.new and not _belongs_to_phase(c.name, unmatched)]


def _values(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = {"phases": tuple(phase.name for phase in config.phases)}
    for name, value in dotted_items(config):
        if isinstance(value, dict):  # the overrides of a phase in one section
            values |= {f"{name}.{field}": each for field, each in value.items()}
        else:
            values[name] = value
    if config.phases:
        del values["train.num_steps"]  # it is the sum over the phases
    return values


def _belongs_to_phase(name: str, phases: set[str]) -> bool:
    parts = name.split(".")
    return len(parts) > 2 and parts[0] == "phases" and parts[1] in phases


def resume_errors(
    new: Config, old: Config, *, newest_step: int | None, change_course: bool = False
) -> list[str]:
    """Reasons why a run cannot resume with a config: one sentence per field that must not change.

    Args:
      new: config that the run would resume with.
      old: config that it started with.
      newest_step: step of its newest checkpoint; None if it has none.
      change_course: whether schedules and numbers of steps may change from `newest_step` on, so that the run
        differs from one that was never interrupted.
    """
    fixed = "it changes what is learned"
    reasons = {
        ResumeRule.FIXED: fixed,
        ResumeRule.SCHEDULE: None if change_course else f"{fixed}; {COURSE_OPTION} allows it",
        ResumeRule.NUM_STEPS: _num_steps_error(new, old, newest_step or 0, change_course=change_course),
        ResumeRule.PATH: _path_error(new, old),
    }
    return [
        f"{change.name} is {change.new} and was {change.old}: {reason}"
        for change in differences(new, old)
        if (reason := reasons.get(resume_rule(change.name))) is not None
    ]


def corpus_folders(config: Config) -> tuple[str, ...]:
    """Corpus folders of a run, one for each place in its config that names one."""
    sections = [phase.config.data for phase in config.resolved_phases]
    mixed = (folder for data in sections for mixture in data.mixtures for folder in mixture.corpora)
    return (*(data.corpus for data in sections), *mixed)


def _path_error(new: Config, old: Config) -> str | None:
    """Reason why the corpus paths cannot change as they do; None if each corpus has only moved."""
    now, before = corpus_folders(new), corpus_folders(old)
    # The mapping of paths must be one to one: a corpus that two places share is read once, in one order, and
    # would be read twice if it became two.
    if len(now) == len(before):
        num_pairs = len(set(zip(now, before, strict=True)))
        if num_pairs == len(set(now)) == len(set(before)):
            return None
    return "corpora may move to other folders, but none may be added, removed, split or merged"


def _num_steps_error(new: Config, old: Config, newest_step: int, *, change_course: bool) -> str | None:
    """Reason why the numbers of steps of the phases cannot change as they do; None if they can."""
    for now, before in zip(new.resolved_phases, old.resolved_phases, strict=False):
        if now.num_steps != before.num_steps:
            reason = None if change_course else _schedule_error(now, before, newest_step)
            reason = reason or _end_error(now, before, newest_step)
            if reason is not None:
                return f"in phase {now.name}, {reason}" if now.name else reason
    return None


def _schedule_error(new: Phase, old: Phase, newest_step: int) -> str | None:
    """Reason if the learning rate of a step that is already done would have been different."""
    optimizer = new.config.optimizer
    if optimizer.schedule in ("linear", "cosine"):
        return (
            f'optimizer.schedule "{optimizer.schedule}" depends on the number of steps, which therefore '
            f"changes what is learned; {COURSE_OPTION} allows it"
        )
    steps_done, shorter = newest_step - old.first_step, min(old.num_steps, new.num_steps)
    if optimizer.decay_steps and steps_done > shorter - optimizer.decay_steps:
        return (
            f"the newest checkpoint is of step {newest_step}, and the decay that the number of steps moves "
            f"starts after step {old.first_step + shorter - optimizer.decay_steps}"
        )
    return None


def _end_error(new: Phase, old: Phase, newest_step: int) -> str | None:
    steps_done = newest_step - old.first_step
    if steps_done > old.num_steps:
        return f"the newest checkpoint is of step {newest_step}, and the phase ended at step {old.end}"
    # A phase evaluates at its last step. Ending it at a step that is already done would skip that evaluation.
    if steps_done >= new.num_steps:
        return f"the newest checkpoint is of step {newest_step}; num_steps must leave at least one step to do"
    return None
