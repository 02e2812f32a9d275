"""ZAYA1 in JAX: model, optimiser and training system as pure functions.

The names below are stable; tests and notebooks use only these and the modules they come from.
"""

from etils import epy

# Each name is imported when it is first used: `zaya --help`, and each process, need not wait for all.
with epy.lazy_api_imports(globals()):
    from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig, TrainConfig
    from zaya_jax.convert.pytorch.in_memory import load_pytorch, save_pytorch
    from zaya_jax.inference.engine.generate import generate
    from zaya_jax.model.attention.maps import attention_maps
    from zaya_jax.model.cache import init_cache
    from zaya_jax.model.zaya import Zaya
    from zaya_jax.train.step.train_step import train_step
