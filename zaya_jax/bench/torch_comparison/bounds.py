"""Upper bounds of the speeds of `zaya bench torch` on this machine, measured in the same run.

Training and prefill cannot be faster than the machine's matrix products, and decoding cannot be faster than
reading the weights of each step from memory.
"""

import dataclasses
import math

import jax.numpy as jnp

from zaya_jax.bench.kernels.memory_passes import pass_time
from zaya_jax.bench.measure import CEILING_FLOPS, best_seconds, ceiling_matmul
from zaya_jax.bench.torch_comparison.workload import MODEL, GenerationWork, TrainingWork
from zaya_jax.config import ModelConfig
from zaya_jax.model.flops import forward_flops_per_token
from zaya_jax.model.weights import declare, flatten_weights

PASS_BYTES = 2**28
"""Size of an array that exceeds every cache."""


@dataclasses.dataclass(frozen=True)
class MachineLimits:
    """What this machine can do.

    Attributes:
      flops: FLOP/s of a large product.
      bandwidth: bytes per second of memory.
    """

    flops: float
    bandwidth: float


def measure_limits(rounds: int, dtype: str) -> MachineLimits:
    """Measures the limits in this process, with products of a dtype; nothing else should use the cores."""
    # The best of several: a bound must not be lowered by other programs of the machine.
    seconds = best_seconds({"": ceiling_matmul(dtype)}, rounds=rounds)[""]
    return MachineLimits(CEILING_FLOPS / seconds, pass_time("scale", PASS_BYTES).bandwidth)


def train_bound(limits: MachineLimits, workload: TrainingWork) -> float:
    """Upper bound of trained tokens per second: only useful products."""
    # Three times the forward pass: the backward pass computes two gradients for each product.
    return limits.flops / (3 * _flops(workload.length))


def prefill_bound(limits: MachineLimits, workload: GenerationWork) -> float:
    """Upper bound of prefill tokens per second: only useful products."""
    # Only the last token of a prompt needs logits.
    head = forward_flops_per_token(MODEL, workload.prompt)["head"] * (1 - 1 / workload.prompt)
    return limits.flops / (_flops(workload.prompt) - head)


def decode_bound(limits: MachineLimits, workload: GenerationWork) -> float:
    """Upper bound of new tokens per second: each step only reads its weights from memory, or only computes
    products.
    """
    # Roofline of a decoding step: weights from memory, or the products of all rows.
    # The longest context of the continuation: its attention has the most products.
    flops = workload.batch * _flops(workload.prompt + workload.new)
    seconds = max(step_bytes(MODEL, workload) / limits.bandwidth, flops / limits.flops)
    return workload.batch / seconds


def _flops(context: int) -> float:
    return math.fsum(forward_flops_per_token(MODEL, context).values())


def step_bytes(config: ModelConfig, workload: GenerationWork) -> float:
    """Bytes of weights that a decoding step reads, with the experts that at least one of its tokens selects.

    With uniform routing, B tokens select E (1 - (1 - 1/E)^B) of E experts on average.
    """
    # Probability that at least one of the batch's tokens selects an expert.
    share = 1 - (1 - 1 / config.num_experts) ** workload.batch
    # Router, attention and head are read in every step; experts only if a token selects them.
    sizes = {
        path: weight.size * (share if path.startswith("layers/experts/") else 1)
        for path, weight in flatten_weights(declare(config)).items()
    }
    return jnp.dtype(workload.dtype).itemsize * math.fsum(sizes.values())
