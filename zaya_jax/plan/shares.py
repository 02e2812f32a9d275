"""What of a step's batch one GPU has, and what it hears of the rest of its sequences.

Letters: C GPUs of a sequence, T its tokens, K key/value heads, H head width, U half the value channels.
"""

import dataclasses

import jax.numpy as jnp

from zaya_jax.config import HYBRID_SLIDING, Config
from zaya_jax.parallel.context import CHUNKS
from zaya_jax.parallel.mesh import SUM_DTYPE

KEYS_AGAIN = {"none": 0, "group": 2}
"""How often keys come once more for the backward pass, by policy; of all others once. What they keep of a
layer's attention is the device's own."""


def num_groups(config: Config, num_devices: int) -> int:
    """Groups of GPUs that have rows of their own."""
    return num_devices // config.execution.context_devices


def micro_batch(config: Config, num_devices: int) -> int:
    """Sequences that a GPU has under way, alone or with others."""
    return config.data.batch_size // num_groups(config, num_devices) // config.execution.num_microbatches


def own_tokens(config: Config) -> int:
    """Tokens that a GPU has of a sequence."""
    return config.data.sequence_length // config.execution.context_devices


def keys_bytes(config: Config) -> int:
    """Bytes of a layer's keys and values of one whole sequence that a GPU has at a time, and their gradients.

    Gathered: all of them, and gradients in the type that is summed. In a ring: those on their way, of both.
    """
    ranks, execution = config.execution.context_devices, config.execution
    if ranks == 1:
        return 0
    tokens = config.data.sequence_length if execution.context_attention == "gathered" else own_tokens(config)
    return tokens * _channels(config) * (_item(execution.dtype) + _item(SUM_DTYPE))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a GPU receives of the other GPUs of its sequences in a step, in bytes.

    Attributes:
      keys: and values of all layers, forward and wherever they are computed anew.
      gradients: of these; in a ring they go all the way with the keys.
      halos: of CCA: latents and delayed values before its chunks, and their gradients.
    """

    keys: int = 0
    gradients: int = 0
    halos: int = 0

    @property
    def total(self) -> int:
        """All that is received, keys, gradients and halos."""
        return self.keys + self.gradients + self.halos


def exchange(config: Config, num_devices: int) -> Exchange:
    """What sharing sequences costs in bytes; nothing where each GPU has its own."""
    model, execution = config.model, config.execution
    ranks = execution.context_devices
    if ranks == 1:
        return Exchange()
    rows = config.data.batch_size // num_groups(config, num_devices)
    passes = 1 + KEYS_AGAIN.get(execution.remat, 1)
    of_others = (ranks - 1) * own_tokens(config)
    sliding = sum(kind == HYBRID_SLIDING for kind in model.layer_types)
    near = min(CHUNKS * ((model.sliding_window or 1) - 1), of_others)
    tokens = rows * ((model.num_hidden_layers - sliding) * of_others + sliding * near)
    channels, item = _channels(config), _item(execution.dtype)
    is_ring = execution.context_attention == "ring"
    halo = model.conv_tail * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    halo += model.num_key_value_heads * model.head_dim // 2
    return Exchange(
        # A ring's backward pass has the keys come round a second time, whatever was kept.
        keys=tokens * channels * item * (passes + is_ring),
        gradients=tokens * channels * _item(SUM_DTYPE),
        halos=rows * model.num_hidden_layers * CHUNKS * halo * item * (passes + 1),
    )


def _channels(config: Config) -> int:
    return 2 * config.model.num_key_value_heads * config.model.head_dim


def _item(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
