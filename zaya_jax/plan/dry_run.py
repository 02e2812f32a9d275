"""`zaya train --dry-run`: size and schedule of a run, by arithmetic and abstract shapes."""

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.config import Config, Phase, step_ranges
from zaya_jax.model.adapters import declare_run, describe_trained
from zaya_jax.model.flops import active_parameters, train_flops_per_token
from zaya_jax.model.weights import Weight, count_parameters, flatten_weights
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.plan.fitting import MemoryBudget, describe_fit, local_budget, planned_budget
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.shares import for_platform
from zaya_jax.text_tables import memory_table, name_column, number_column
from zaya_jax.train.phase_summary import check_devices


def print_dry_run(config: Config, *, devices: int | None = None, console: Console | None = None) -> None:
    """Prints shapes, counts, phases, schedule and memory of a run. Allocates no weights.

    Args:
      config: config of the run.
      devices: number of GPUs that share the batch, each like `PLANNED_GPU`; None means the devices of this
        machine.
      console: console to print to.

    Raises:
      UserError: if the batch cannot be divided among the devices.
    """
    # Without --devices the run is to be trained on this machine.
    budget = local_budget() if devices is None else planned_budget()
    devices = jax.device_count() if devices is None else devices
    check_devices(config, devices)
    config = for_platform(config, budget.platform)
    console = console or Console(soft_wrap=True, highlight=False)
    console.print(_weights_table(flatten_weights(declare_run(config)), config))
    console.print(_facts_table(config))
    console.print(_phases_table(config))
    memory = {}
    for phase in config.resolved_phases:
        estimate = memory_by_kind(phase.config, devices)
        memory[phase.name] = sum(estimate.values())
        console.print(_memory_table(estimate, devices, phase, budget))
    console.print(describe_fit(config, devices, budget, memory))


def _weights_table(weights: dict[str, Weight], config: Config) -> Table:
    """A row per weight. Sizes of axes are listed once, which leaves space for the names."""
    sizes = {
        axis: size for each in weights.values() for axis, size in zip(each.axes, each.shape, strict=True)
    }
    table = Table(
        name_column("weight"),
        "axes",
        number_column("parameters"),
        "update",
        title=f"weights of {config.run_folder}",
        caption="axes: " + ", ".join(f"{axis} {size:,}" for axis, size in sizes.items()),
    )
    for path, weight in weights.items():
        table.add_row(path, weight.axes, f"{weight.size:,}", _optimizer_of(weight, config))
    return table


def _optimizer_of(weight: Weight, config: Config) -> str:
    if not weight.trains:
        return "none"
    return config.optimizer.matrix_optimizer if weight.matrix else "AdamW"


def _facts_table(config: Config) -> Table:
    model = config.model
    # A batch ramp makes steps of different sizes.
    tokens = sum(each.num_steps * each.batch_tokens for each in step_ranges(config))
    table = Table(name_column("quantity"), number_column("value"), title="run")
    table.add_row("parameters", f"{count_parameters(model):,}")
    if (trained := describe_trained(declare_run(config))) is not None:
        table.add_row("trained parameters", trained)
    table.add_row("active per token, without embedding", f"{active_parameters(model):,}")
    table.add_row("router biases", f"{model.num_hidden_layers * model.num_router_classes:,}")
    table.add_row("steps", f"{config.train.num_steps:,}")
    table.add_row("tokens", f"{tokens:,}")
    return table


def _phases_table(config: Config) -> Table:
    """A column per phase; a run without phases has one."""
    phases = config.resolved_phases
    headers = ("phase", *(phase.name or "all" for phase in phases))
    table = Table(*map(name_column, headers), title="phases")
    columns = [_phase_facts(config, phase) for phase in phases]
    for what in columns[0]:
        table.add_row(what, *(column[what] for column in columns))
    return table


def _phase_facts(config: Config, phase: Phase) -> dict[str, str]:
    model, data, execution = phase.config.model, phase.config.data, phase.config.execution
    optimizer = phase.config.optimizer
    parts = [each for each in step_ranges(config) if each.phase == phase]
    flops = train_flops_per_token(phase.config, data.sequence_length)
    tokens = sum(part.num_steps * part.batch_tokens for part in parts)
    # The last part of a phase has the full batch; all before it belong to the ramp.
    ramp = [f"{part.batch_tokens:,} for {part.num_steps:,} steps" for part in parts[:-1]]
    return {
        "steps": f"{phase.first_step + 1:,} to {phase.end:,}",
        # Four phases in 80 columns leave no space for all digits of 8T tokens.
        "tokens": f"{tokens:,}" if tokens < 10**10 else f"{tokens:.4e}",
        "tokens per step": f"{data.batch_size:,} x {data.sequence_length:,} = {data.batch_tokens:,}",
        "batch ramp": ", ".join(ramp) or "none",
        "RoPE base": f"{model.rope_theta:,.0f}",
        "data": data.mixture or data.corpus,
        "learning rate": _rates(phase),
        "weight decay": f"{optimizer.weight_decay:g}" + ", cautious" * optimizer.cautious_decay,
        "remat, microbatches": f"{execution.remat}, {execution.num_microbatches}",
        "training FLOPs per token": f"{flops:.4g}",
        "training FLOPs per step": f"{flops * data.batch_tokens:.4g}",
    }


def _rates(phase: Phase) -> str:
    """The name of the schedule, and the learning rate at its characteristic steps."""
    optimizer, schedule = phase.config.optimizer, learning_rate_schedule(phase.config)
    last = phase.config.train.num_steps
    # First step, end of warm-up, middle, start of the decay, last step.
    moments = sorted(
        {1, max(optimizer.warmup_steps, 1), (last + 1) // 2, last - optimizer.decay_steps, last} - {0}
    )
    # The schedule counts steps from 0, and the table from 1.
    rates = [f"{float(np.asarray(schedule(n - 1))):.2e} at {phase.first_step + n:,}" for n in moments]
    return f"{optimizer.schedule}: {', '.join(rates)}"


def _memory_table(estimate: dict[str, int], devices: int, phase: Phase, budget: MemoryBudget) -> Table:
    title = f"estimate for {devices:,} device{'s' * (devices != 1)}"
    title = f"phase {phase.name}: {title}" if phase.name else title
    return memory_table("memory per device", estimate, budget.size, title=title)
