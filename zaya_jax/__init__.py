"""ZAYA1 in JAX: model, optimiser and training system as pure functions.

The names below are stable; tests and notebooks use only these and the modules they come from.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig, TrainConfig
    from zaya_jax.convert.pytorch.in_memory import load_pytorch, save_pytorch
    from zaya_jax.inference.engine.generate import generate
    from zaya_jax.model.attention.maps import attention_maps
    from zaya_jax.model.cache import init_cache
    from zaya_jax.model.zaya import Zaya
    from zaya_jax.train.step.train_step import train_step

__all__ = [
    "Config",
    "DataConfig",
    "ExecutionConfig",
    "ModelConfig",
    "OptimizerConfig",
    "TrainConfig",
    "Zaya",
    "attention_maps",
    "generate",
    "init_cache",
    "load_pytorch",
    "save_pytorch",
    "train_step",
]

_MODULES = {
    "Config": "config",
    "DataConfig": "config",
    "ExecutionConfig": "config",
    "ModelConfig": "config",
    "OptimizerConfig": "config",
    "TrainConfig": "config",
    "Zaya": "model.zaya",
    "attention_maps": "model.attention.maps",
    "generate": "inference.engine.generate",
    "init_cache": "model.cache",
    "load_pytorch": "convert.pytorch.in_memory",
    "save_pytorch": "convert.pytorch.in_memory",
    "train_step": "train.step.train_step",
}

if not TYPE_CHECKING:  # with it a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Imports a public name on first use, so that `zaya --help` does not import everything."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
