"""Configs of runs: frozen, validated dataclasses, built from an `ml_collections.ConfigDict`.

All rules about values are here, each with its error message. Field names are those of Hugging Face's
`ZayaConfig` where the concept is the same. Nothing in this package imports jax.

`sections` has one module per section, `rules` the checks that they share, `run` the whole config and the
rules between sections, `resume` the fields that may change when a run resumes, `renamed_fields` the names and
values of earlier versions, `aliases` the names in other trainers, and `files` the lookup of config files.

The imports below are the public names of the package.
"""

from zaya_jax.config.files import find_config, find_file, is_inside, require_local
from zaya_jax.config.renamed_fields import use_current_names
from zaya_jax.config.resume import (
    COURSE_OPTION,
    RESUME_RULES,
    FieldChange,
    ResumeRule,
    corpus_folders,
    differences,
    resume_errors,
    resume_rule,
)
from zaya_jax.config.run import Config, Phase
from zaya_jax.config.sections.balancing import BalancingConfig
from zaya_jax.config.sections.data import DataConfig, MixtureConfig
from zaya_jax.config.sections.distillation import DistillationConfig
from zaya_jax.config.sections.dpo import DpoConfig
from zaya_jax.config.sections.ema import EmaConfig
from zaya_jax.config.sections.execution import ExecutionConfig
from zaya_jax.config.sections.log import LogConfig
from zaya_jax.config.sections.lora import LoraConfig
from zaya_jax.config.sections.model import HYBRID, HYBRID_SLIDING, ModelConfig
from zaya_jax.config.sections.optimizer import OptimizerConfig
from zaya_jax.config.sections.phases import PhaseConfig, in_phase
from zaya_jax.config.sections.profile import ProfileConfig
from zaya_jax.config.sections.tasks import TasksConfig
from zaya_jax.config.sections.train import TrainConfig
from zaya_jax.config.sections.watch import WatchConfig
from zaya_jax.config.step_ranges import StepRange, step_ranges
from zaya_jax.run_folder.names import CONFIG_FILE
