"""One GPU's share of a step's batch, and what it receives of the rest of its sequences.

Letters: C GPUs per sequence, T tokens per sequence, K key/value heads, H head width.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from zaya_jax.config import HYBRID_SLIDING, Config
from zaya_jax.parallel.context import CHUNKS
from zaya_jax.parallel.mesh import SUM_DTYPE
from zaya_jax.train.implementations import resolve_implementations

KEYS_AGAIN = {"none": 0, "group": 2}
"""Number of times that the backward pass gathers keys again, by remat policy; 1 for the others. The rest of
what a policy keeps of attention is local to the device."""


def with_execution(config: Config, **changes: Any) -> Config:
    """Returns the run with changed fields of `execution`."""
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, **changes))


def for_platform(config: Config, platform: str) -> Config:
    """Returns the run with the implementation named that a platform uses for each operation."""
    execution = resolve_implementations(config.execution, config.model, platform=platform)
    return dataclasses.replace(config, execution=execution)


def num_groups(config: Config, num_devices: int) -> int:
    """Number of groups of GPUs that process different rows."""
    return num_devices // config.execution.context_devices


def micro_batch(config: Config, num_devices: int) -> int:
    """Number of sequences that a GPU processes at a time, alone or with the others of its group."""
    return config.data.batch_size // num_groups(config, num_devices) // config.execution.num_microbatches


def own_tokens(config: Config) -> int:
    """Number of tokens of a sequence on one GPU."""
    return config.data.sequence_length // config.execution.context_devices


def keys_bytes(config: Config) -> int:
    """Bytes of a layer's keys and values of one sequence that a GPU holds at a time, and of their gradients.

    With gathered keys these are all keys, and gradients in the dtype of the sum; in a ring, those in flight
    of both.
    """
    ranks, execution = config.execution.context_devices, config.execution
    if ranks == 1:
        return 0
    tokens = config.data.sequence_length if execution.context_attention == "gathered" else own_tokens(config)
    return tokens * _channels(config) * (_item(execution.dtype) + _item(SUM_DTYPE))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that a GPU receives from the other GPUs of its sequences in a step.

    Attributes:
      keys: keys and values of all layers, in the forward pass and in each recomputation.
      gradients: gradients of keys and values; in a ring they make the whole round with the keys.
      halos: CCA's latents and delayed values that precede a GPU's chunks, and their gradients.
    """

    keys: int = 0
    gradients: int = 0
    halos: int = 0

    @property
    def total(self) -> int:
        """Sum of keys, gradients and halos."""
        return self.keys + self.gradients + self.halos


def exchange(config: Config, num_devices: int) -> Exchange:
    """Returns the bytes exchanged for shared sequences; zero if each GPU has whole sequences."""
    model, execution = config.model, config.execution
    ranks = execution.context_devices
    if ranks == 1:
        return Exchange()
    rows = config.data.batch_size // num_groups(config, num_devices)
    passes = 1 + KEYS_AGAIN.get(execution.remat, 1)
    # Every GPU needs the keys and values of all other GPUs of its sequences.
    of_others = (ranks - 1) * own_tokens(config)
    sliding = sum(kind == HYBRID_SLIDING for kind in model.layer_types)
    # A sliding layer only needs the window before each of a GPU's chunks.
    near = min(CHUNKS * ((model.sliding_window or 1) - 1), of_others)
    tokens = rows * ((model.num_hidden_layers - sliding) * of_others + sliding * near)
    channels, item = _channels(config), _item(execution.dtype)
    is_ring = execution.context_attention == "ring"
    # CCA's convolutions read the last latents of the preceding chunk; the value shift reads half of its
    # values.
    halo = model.conv_tail * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    halo += model.num_key_value_heads * model.head_dim // 2
    return Exchange(
        # A ring's backward pass sends the keys around a second time under every remat policy.
        keys=tokens * channels * item * (passes + is_ring),
        gradients=tokens * channels * _item(SUM_DTYPE),
        # Each pass receives the halos, and the backward pass also their gradients.
        halos=rows * model.num_hidden_layers * CHUNKS * halo * item * (passes + 1),
    )


def _channels(config: Config) -> int:
    return 2 * config.model.num_key_value_heads * config.model.head_dim


def _item(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
