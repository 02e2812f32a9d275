"""`zaya bench step`: time, memory and result of a train step on this machine, by implementation.

The step is that of `zaya train`, compiled once for each set of implementations. Times and memory are printed
next to this device's limits and the estimates of `zaya plan`.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.kernels.kernel_times import Ceilings, measure_ceilings
from zaya_jax.bench.results import this_machine, write_json
from zaya_jax.bench.training.step_runs import FORMS, StepTimes, check_agreement, default_forms, measure
from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.options import Parser, add_config_options, check_at_least, load_config
from zaya_jax.parallel.mesh import check_batch_size
from zaya_jax.plan.arithmetic import memory_traffic, seconds_in_turn, step_flops, step_seconds
from zaya_jax.plan.cases import PUBLISHED
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import device_of_kind
from zaya_jax.plan.output.picture import check_outputs
from zaya_jax.plan.shares import with_execution
from zaya_jax.text_tables import dense_table, name_column

ROUNDS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a step takes at least, and what `zaya plan` estimates.

    Attributes:
      flops: FLOPs of a device's products, with recomputation and the optimizer.
      num_bytes: least bytes that a device moves to and from its memory.
      ceilings: rates that this device reaches in this run.
      estimate: seconds by the arithmetic of `zaya plan` in the published case; None for an unknown device.
    """

    flops: float
    num_bytes: int
    ceilings: Ceilings
    estimate: float | None

    @property
    def seconds(self) -> float:
        """The longer of the times of products and of memory, at the rates of this run."""
        return max(self.flops / self.ceilings.flops, self.num_bytes / self.ceilings.bandwidth)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench step` with the given command-line arguments.

    Raises:
      UserError: if an option is invalid, or results of implementations differ.
    """
    options, overrides = _parser().parse_with_fields(argv)
    check_at_least(options, rounds=1)
    # Before minutes of compiling.
    check_outputs(json_file=options.json)
    config = prepare(config_of_phase(load_config(options.config, overrides)), options)
    forms = options.implementations or default_forms(config)
    # Soft-wrapped, so that a file with the output has one line per sentence.
    console = Console(soft_wrap=True, highlight=False)
    with console.status("measuring the limits of this device") as status:
        # First, while the device's memory is empty: the passes over memory need large arrays.
        bounds = step_bounds(config)
        times = measure(config, forms, rounds=options.rounds, progress=status.update)
    # Written and printed before the results are compared, so that nothing is lost if they differ.
    machine = this_machine()
    values = {"machine": dataclasses.asdict(machine), "bounds": dataclasses.asdict(bounds)}
    write_json(options.json, values | {"steps": [dataclasses.asdict(each) for each in times]})
    console.print(f"{describe(config)} on {jax.device_count()} x {machine.device} with jax {machine.jax}")
    limits = bounds.ceilings
    console.print(
        f"median of rounds: {options.rounds}; limits of this run: {limits.flops / 1e12:.3g} TFLOP/s, "
        f"{limits.bandwidth / 1e12:.3g} TB/s"
    )
    console.print(table(times, bounds, config.data.batch_size * config.data.sequence_length))
    for sentence in sentences(times, bounds):
        console.print(f"- {sentence}")
    check_agreement(times)


def describe(config: Config) -> str:
    """Returns what decides the work of a step, in one line."""
    model, data = config.model, config.data
    return (
        f"{model.num_hidden_layers} layers of width {model.hidden_size:,}, {data.batch_size} x "
        f"{data.sequence_length:,} tokens, {config.optimizer.name}, {config.execution.dtype}, remat "
        f"{config.execution.remat},"
    )


def prepare(config: Config, options: argparse.Namespace) -> Config:
    """Returns the config with the batch of this machine.

    Raises:
      UserError: if the run has another loss than that of the next token, or checksums of its batches, or the
        batch cannot be divided.
    """
    check_at_least(options, micro_batch=1)
    if config.dpo.beta or config.distillation.teacher is not None:
        raise UserError(
            "zaya bench step trains on the next token; set neither dpo.beta nor distillation.teacher"
        )
    if config.watch.checksums:
        # The same batch is used again and again, and the step would find its rows in the wrong place.
        raise UserError("watch.checksums is True; zaya bench step repeats one batch, so set it to False")
    devices, ranks = jax.device_count(), config.execution.context_devices
    if options.micro_batch is not None:
        # The number of microbatches is the config's.
        rows = options.micro_batch * config.execution.num_microbatches * devices // ranks
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=rows))
    # A preset for nodes of eight GPUs also runs on one.
    if config.execution.node_devices > devices:
        config = with_execution(config, node_devices=devices)
    check_batch_size(config.data.batch_size, config.execution.num_microbatches, devices, ranks)
    return config


def step_bounds(config: Config) -> Bounds:
    """Returns the work of a step, the rates of this device, and the estimate of `zaya plan`."""
    kind, devices = jax.devices()[0].device_kind, jax.device_count()
    device = device_of_kind(kind)
    # The arithmetic of a step does not know implementations: all have the same useful work.
    # Other devices have limits that are measured here, but no data sheet.
    estimate = None
    if device is not None:
        cluster = Cluster(device=device, nodes=1, gpus_per_node=devices)
        estimate = sum(seconds_in_turn(step_seconds(config, cluster), PUBLISHED.product_share).values())
    return Bounds(
        flops=step_flops(config, devices),
        num_bytes=memory_traffic(config, devices),
        ceilings=_ceilings(config.execution.dtype),
        estimate=estimate,
    )


def _ceilings(dtype: str) -> Ceilings:
    """Returns the limits of this device for a step with products of a dtype."""
    if jax.default_backend() != "cpu":
        return measure_ceilings(False, dtype)
    # On a CPU, products of float32 are faster than those of bfloat16, and every step has some.
    return max((measure_ceilings(True, each) for each in (dtype, "float32")), key=lambda each: each.flops)


def table(times: Sequence[StepTimes], bounds: Bounds, tokens: int) -> Table:
    """Returns a table of the measured steps; tokens is their number in a step."""
    columns = ("ms", "tokens/s", "TFLOP/s", "of bound", "memory", "by plan", "loss", "norm")
    rows = dense_table(name_column("by"), *columns)
    for each in times:
        rows.add_row(
            each.name,
            f"{each.median * 1e3:,.1f}",
            f"{tokens / each.median:,.0f}",
            f"{bounds.flops / each.median / 1e12:.3g}",
            f"{bounds.seconds / each.median:.1%}",
            f"{each.num_bytes / 2**30:.2f} GiB",
            f"{each.estimated_bytes / each.num_bytes:.2f}",
            f"{each.loss:.4f}",
            f"{each.gradient_norm:.4f}",
        )
    return rows


def sentences(times: Sequence[StepTimes], bounds: Bounds) -> list[str]:
    """Returns what the figures mean, one sentence each."""
    # Ratios are of the same round, a second or less apart.
    first, *others = times
    lines = [
        f"the bound is {bounds.seconds * 1e3:,.1f} ms: all products, or all memory traffic, at the limits"
    ]
    for other in others:
        ratios = [a / b for a, b in zip(first.seconds, other.seconds, strict=True)]
        lines.append(
            f"{other.name}: {statistics.median(ratios):.2f} times as fast as {first.name} (median of rounds; "
            f"{min(ratios):.2f} to {max(ratios):.2f})"
        )
    if bounds.estimate is not None:
        lines.append(
            f"zaya plan estimates {bounds.estimate * 1e3:,.1f} ms with products at "
            f"{PUBLISHED.product_share:.0%} of the peak, {bounds.estimate / first.median:.2f} times what "
            f"{first.name} takes"
        )
    return lines


def _parser() -> Parser:
    parser = Parser(
        "bench step",
        "Measure the train step of a config on the devices of this machine, with XLA's implementations and "
        "with the Pallas kernels, on random tokens. Compares time and memory with this device's limits and "
        "with the arithmetic of zaya plan.",
        (
            "zaya bench step",
            "zaya bench step --config=configs/zaya1_8b.py --micro-batch=4 --config.model.num_hidden_layers=8",
            "zaya bench step --implementations xla pallas --rounds=3 --json=step.json",
        ),
    )
    add_config_options(parser)
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=FORMS,
        metavar="SET",
        help=f"sets to compare, of {', '.join(FORMS)}; the first is the base of ratios (default: those that "
        "differ here)",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="ROWS",
        help="sequences that a device processes at a time, instead of the config's batch",
    )
    parser.add_argument("--rounds", default=ROUNDS, help="timed steps of each set, whose median counts")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser
