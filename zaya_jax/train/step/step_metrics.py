"""Scalar metrics of a training step, as they are displayed and written to files."""

from collections.abc import Mapping

import numpy as np

from zaya_jax.config import StepRange, TrainConfig
from zaya_jax.model.flops import train_flops_per_token
from zaya_jax.optim.balancing import expert_loads, load_entropy
from zaya_jax.platform.peak_flops import peak_flops
from zaya_jax.train.metrics.files import bits_per_byte, text_loss
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.step.train_step import Metrics

MAX_ROUTER_ROWS = 1000
"""Maximum number of router rows of a run. With 40 layers a row is twice as long as all other values of its
step, and no chart shows more."""


def has_router_row(config: TrainConfig, step: int) -> bool:
    """Returns whether a logged step has a row of router counts."""
    every = config.log_every * -(-config.num_steps // (config.log_every * MAX_ROUTER_ROWS))
    return step % every == 0 or step in (1, config.num_steps)


def train_values(
    run: PreparedRun,
    step_range: StepRange,
    step: int,
    metrics: Metrics,
    num_bytes: float,
    seconds: float,
    *,
    keys: Mapping[str, float] | None,
) -> dict[str, float]:
    """Returns the scalars of a step by name.

    Args:
      run: the run.
      step_range: range that contains the step.
      step: number of the step; the first is 1.
      metrics: metrics of the step, on the host.
      num_bytes: bytes of text of its targets.
      seconds: duration of the step.
      keys: mean number of keys per token by layer type; None if the device's peak is unknown.
    """
    # Padding included: the throughput of the hardware, not of what the run learns from.
    tokens_per_second = step_range.batch_tokens / seconds
    counts_LX = np.asarray(metrics.router_counts_LX)
    loss = float(metrics.loss)
    preferences = {name: float(mean) for name, mean in metrics.preferences.items()}
    nats = text_loss(loss, preferences) * float(metrics.num_targets)
    loads_LE = expert_loads(counts_LX)
    return {
        "loss": loss,
        "bits_per_byte": bits_per_byte(nats, num_bytes),
        **preferences,
        "gradient_norm": float(metrics.gradient_norm),
        "load_entropy": float(np.mean(load_entropy(counts_LX))),
        "router_entropy": float(np.mean(metrics.router_entropy_L)),
        "router_probability": float(np.mean(metrics.router_probability_L)),
        # The share of tokens with the skip class, the last one; unrelated to skipped_steps.
        "skipped": float(counts_LX[:, -1].sum() / counts_LX.sum()),
        # The schedule counts the steps before this one.
        "learning_rate": float(np.asarray(run.schedule(step - 1))),
        "tokens": step_range.tokens_until(step),
        "largest_load": float(np.max(loads_LE)),
        "smallest_load": float(np.min(loads_LE)),
        "dead_experts": float(np.sum(counts_LX[:, :-1] == 0)),
        "logit_bound": float(metrics.logit_bound),
        "skipped_steps": float(metrics.skipped_steps),
        **({} if metrics.data_checksum is None else {"data_checksum": float(metrics.data_checksum)}),
        **{f"gradient_norm/{group}": float(norm) for group, norm in metrics.gradient_norms.items()},
        **{f"update_norm/{group}": float(norm) for group, norm in metrics.update_norms.items()},
        "tokens_per_second": tokens_per_second,
        **_utilisation(run, step_range, tokens_per_second, keys),
    }


def compile_values(run: PreparedRun) -> None:
    """Compiles the small programs of `train_values`, of which each operation is one.

    A start does it while it waits for the step's program, instead of after the first step.
    """
    model = run.config.model
    # The type of the counts, which the programs are compiled for.
    load_entropy(np.zeros((model.num_hidden_layers, model.num_experts + 1), np.int32))
    run.schedule(0)


def peak_of(run: PreparedRun) -> float | None:
    """Returns the dense bfloat16 peak of one device in FLOP/s; None if it is unknown."""
    return peak_flops(run.mesh.devices.flat[0].device_kind)


def _utilisation(
    run: PreparedRun, step_range: StepRange, tokens_per_second: float, keys: Mapping[str, float] | None
) -> dict[str, float]:
    peak = peak_of(run)
    if peak is None:
        return {}
    # By the keys that tokens attend to: documents that are packed into a row do not attend to each other.
    flops = train_flops_per_token(run.config, step_range.sequence_length, keys=keys)
    return {"model_flops_utilisation": utilization(flops, tokens_per_second, peak * run.mesh.size)}


def utilization(flops_per_token: float, tokens_per_second: float, peak: float) -> float:
    """Returns the model FLOPs utilization: the model's share of the devices' peak ([PaLM] appendix B).

    Args:
      flops_per_token: FLOPs of the model per token, forward and backward, without recomputation.
      tokens_per_second: throughput of all devices together.
      peak: peak FLOP/s of all devices together.
    """
    return flops_per_token * tokens_per_second / peak
