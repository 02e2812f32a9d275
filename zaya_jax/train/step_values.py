"""The scalars that a run tells of a step, for people and files."""

import numpy as np

from zaya_jax.config import StepRange, TrainConfig
from zaya_jax.model.flops import train_flops_per_token
from zaya_jax.optim.balancing import expert_loads, load_entropy
from zaya_jax.train.metrics import bits_per_byte, peak_flops, text_loss
from zaya_jax.train.opening import OpenRun
from zaya_jax.train.step import Metrics

MOST_ROUTER_ROWS = 1000
"""Of a run. One of 40 layers is twice as long as all other values of its step, and no picture shows more."""


def has_router_row(config: TrainConfig, step: int) -> bool:
    """Whether it is written down what each layer's router did in a logged step."""
    every = config.log_every * -(-config.num_steps // (config.log_every * MOST_ROUTER_ROWS))
    return step % every == 0 or step in (1, config.num_steps)


def train_values(
    run: OpenRun, step_range: StepRange, step: int, metrics: Metrics, num_bytes: float, seconds: float
) -> dict[str, float]:
    """The scalars of a step.

    Args:
      run: that the step is of.
      step_range: that it is in.
      step: its number; the first is 1.
      metrics: what it told, on the host.
      num_bytes: of text that its targets stand for.
      seconds: that it took.
    """
    # Those read, padding included: what the hardware did, not what the run learned from.
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
        # The share of tokens that took the skip class, the last one; skipped_steps is another matter.
        "skipped": float(counts_LX[:, -1].sum() / counts_LX.sum()),
        # The schedule counts the steps before this one.
        "learning_rate": float(np.asarray(run.schedule(step - 1))),
        "tokens": step_range.tokens_until(step),
        "largest_load": float(np.max(loads_LE)),
        "smallest_load": float(np.min(loads_LE)),
        "dead_experts": float(np.sum(counts_LX[:, :-1] == 0)),
        "logit_bound": float(metrics.logit_bound),
        "skipped_steps": float(metrics.skipped_steps),
        **{f"gradient_norm/{group}": float(norm) for group, norm in metrics.gradient_norms.items()},
        **{f"update_norm/{group}": float(norm) for group, norm in metrics.update_norms.items()},
        "tokens_per_second": tokens_per_second,
        **_utilisation(run, step_range, tokens_per_second),
    }


def _utilisation(run: OpenRun, step_range: StepRange, tokens_per_second: float) -> dict[str, float]:
    peak = peak_flops(run.mesh.devices.flat[0].device_kind)
    if peak is None:
        return {}
    # The model's FLOPs, not the machine's: what is recomputed does not count ([PaLM] appendix B).
    flops = train_flops_per_token(run.config, step_range.sequence_length) * tokens_per_second
    return {"model_flops_utilisation": flops / (peak * run.mesh.size)}
