"""`zaya train --dry-run`: what a run would be, by arithmetic and abstract shapes."""

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.config import Config
from zaya_jax.model.flops import active_parameters, train_flops_per_token
from zaya_jax.model.weights import Weight, count_parameters, declare, flatten
from zaya_jax.optim.optimizer import learning_rate_schedule
from zaya_jax.parallel.mesh import check_batch_size
from zaya_jax.plan.memory import memory_by_kind

GIB = 2**30


def describe(config: Config, *, devices: int | None = None, console: Console | None = None) -> None:
    """Prints shapes, counts, tokens a step, schedule and memory of a run. Allocates no weights.

    Args:
      config: of the run.
      devices: how many share the batch; None for those of this machine.
      console: where to print.

    Raises:
      ValueError: if the batch cannot be dealt out to the devices.
    """
    devices = jax.device_count() if devices is None else devices
    if devices < 1:
        raise ValueError(f"--devices is {devices}; it must be at least 1")
    check_batch_size(config.data.batch_size, config.train.num_microbatches, devices)
    console = console or Console(soft_wrap=True, highlight=False)
    console.print(_weights_table(flatten(declare(config.model)), config))
    console.print(_facts_table(config))
    console.print(_memory_table(memory_by_kind(config, devices), devices))


def _weights_table(weights: dict[str, Weight], config: Config) -> Table:
    table = Table(
        "weight", "axes", "shape", "parameters", "moved by", title=f"weights of {config.run_folder}"
    )
    for path, weight in weights.items():
        mover = "Muon" if weight.matrix and config.optimizer.name == "muon" else "AdamW"
        shape = " x ".join(map(str, weight.shape))
        table.add_row(path, weight.axes, shape, f"{weight.size:,}", mover)
    return table


def _facts_table(config: Config) -> Table:
    model, data, optimizer = config.model, config.data, config.optimizer
    tokens = data.batch_size * data.sequence_length
    flops = train_flops_per_token(model, data.sequence_length)
    schedule = learning_rate_schedule(optimizer, config.train.num_steps)
    moments = sorted({0, optimizer.warmup_steps, config.train.num_steps // 2, config.train.num_steps})
    rates = ", ".join(f"{float(np.asarray(schedule(step))):.2e} at {step:,}" for step in moments)
    table = Table("what", "how much", title="run")
    table.add_row("parameters", f"{count_parameters(model):,}")
    table.add_row("active a token, without embedding", f"{active_parameters(model):,}")
    table.add_row("router biases", f"{model.num_hidden_layers * model.num_router_classes:,}")
    table.add_row("tokens a step", f"{data.batch_size:,} x {data.sequence_length:,} = {tokens:,}")
    table.add_row("steps", f"{config.train.num_steps:,} ({tokens * config.train.num_steps:,} tokens)")
    table.add_row("training FLOPs a token", f"{flops:.4g}")
    table.add_row("training FLOPs a step", f"{flops * tokens:.4g}")
    table.add_row("learning rate", f"{rates} (linear warm-up, cosine)")
    return table


def _memory_table(estimate: dict[str, int], devices: int) -> Table:
    table = Table("memory a device", "GiB", title=f"{devices:,} devices, by arithmetic")
    for name, size in estimate.items():
        table.add_row(name, f"{size / GIB:,.2f}")
    table.add_row("sum", f"{sum(estimate.values()) / GIB:,.2f}")
    return table
