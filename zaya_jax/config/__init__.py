"""What a run is: frozen, checked dataclasses built from an `ml_collections.ConfigDict`.

Every rule about a value is here, with a sentence for whoever breaks it. Field names are those of
Hugging Face's `ZayaConfig` where the concept is the same. Nothing here imports jax.

Each section has a file of its name. `rules` holds what they check with, `run` the whole with the rules
between sections, `resume` what may change while a run goes on, and `files` where a config is found.
"""

from zaya_jax.config.balancing import BalancingConfig
from zaya_jax.config.data import DataConfig, MixtureConfig
from zaya_jax.config.dpo import DpoConfig
from zaya_jax.config.execution import ExecutionConfig
from zaya_jax.config.files import CONFIG_FILE, find_config, find_file, lies_in
from zaya_jax.config.log import LogConfig
from zaya_jax.config.lora import LoraConfig
from zaya_jax.config.model import HYBRID, HYBRID_SLIDING, ModelConfig
from zaya_jax.config.optimizer import OptimizerConfig
from zaya_jax.config.phases import PhaseConfig, in_phase
from zaya_jax.config.profile import ProfileConfig
from zaya_jax.config.resume import (
    COURSE_OPTION,
    KINDS,
    FieldChange,
    Kind,
    corpora_by_use,
    differences,
    kind_of,
    refusals,
)
from zaya_jax.config.run import Config, Phase
from zaya_jax.config.step_ranges import StepRange, step_ranges
from zaya_jax.config.tasks import TasksConfig
from zaya_jax.config.train import TrainConfig
from zaya_jax.config.watch import WatchConfig

__all__ = [
    "CONFIG_FILE",
    "COURSE_OPTION",
    "HYBRID",
    "HYBRID_SLIDING",
    "KINDS",
    "BalancingConfig",
    "Config",
    "DataConfig",
    "DpoConfig",
    "ExecutionConfig",
    "FieldChange",
    "Kind",
    "LogConfig",
    "LoraConfig",
    "MixtureConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Phase",
    "PhaseConfig",
    "ProfileConfig",
    "StepRange",
    "TasksConfig",
    "TrainConfig",
    "WatchConfig",
    "corpora_by_use",
    "differences",
    "find_config",
    "find_file",
    "in_phase",
    "kind_of",
    "lies_in",
    "refusals",
    "step_ranges",
]
