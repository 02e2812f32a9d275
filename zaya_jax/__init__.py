"""ZAYA1 in JAX: model, optimiser and training system as pure functions.

The names below are stable; tests and notebooks use only these and the modules they come from.
"""

from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig, TrainConfig
from zaya_jax.convert.pytorch import load_pytorch, save_pytorch
from zaya_jax.inference.generate import generate
from zaya_jax.model.cache import init_cache
from zaya_jax.model.zaya import Zaya
from zaya_jax.train.step import train_step

__all__ = [
    "Config",
    "DataConfig",
    "ExecutionConfig",
    "ModelConfig",
    "OptimizerConfig",
    "TrainConfig",
    "Zaya",
    "generate",
    "init_cache",
    "load_pytorch",
    "save_pytorch",
    "train_step",
]
