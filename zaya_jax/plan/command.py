"""`zaya plan`: resources that a run needs, by arithmetic or by compiling its step for a cluster."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import dump_json
from zaya_jax.options import Parser, add_config_options, check_at_least, check_positive, load_config
from zaya_jax.plan import reliability_command
from zaya_jax.plan.cases import PUBLISHED
from zaya_jax.plan.compiled.kernel_execution import EXECUTED_SIZES
from zaya_jax.plan.compiled.kernel_report import plan_kernels
from zaya_jax.plan.compiled.search import search
from zaya_jax.plan.devices import Cluster, cluster_as_measured, find_device
from zaya_jax.plan.gpus import DEVICES, PLANNED_GPU
from zaya_jax.plan.measured import read_measured
from zaya_jax.plan.output.picture import check_outputs, draw
from zaya_jax.plan.output.plan import CompiledStep, make_plan, read_compilation, to_json, train_step_job
from zaya_jax.plan.output.plan_tables import compiled_tables, found_table, kernels_table, plan_tables
from zaya_jax.plan.output.time_tables import (
    devices_table,
    effects_table,
    milliseconds,
    summary,
    verdict,
    verdict_by_arithmetic,
)
from zaya_jax.plan.rocm.compiler import TIME_LIMIT, compile_program, lay_out_program
from zaya_jax.plan.rocm.wheels import find_plugin, install
from zaya_jax.plan.shares import for_platform, num_groups, own_tokens, with_execution
from zaya_jax.text_tables import format_bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya plan` with the given command-line arguments.

    Raises:
      UserError: if the run cannot be planned, or a kernel has problems.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["failures"]:  # has no config options
        reliability_command.main(words[1:])
        return
    parser = _parser()
    options, overrides = parser.parse_with_fields(words)
    if options.what == "run":
        plan_run(options, overrides)
    elif overrides:
        raise UserError(f'"{overrides[0]}" is not an option of {options.what}; zaya plan --help shows them')
    else:
        OTHERS[options.what](options)


def plan_run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Plans a run by arithmetic, and with --compile or --search by compiling its step."""
    check_at_least(options, nodes=1, gpus_per_node=1, micro_batch=1)
    cluster, measured = cluster_as_measured(
        find_device(options.device),
        options.nodes,
        options.gpus_per_node,
        [read_measured(pathlib.Path(file)) for file in options.measured],
    )
    config = config_of_phase(load_config(options.config, overrides), options.phase)
    config = _with_micro_batch(config, options.micro_batch, cluster)
    _check(options)
    plan = make_plan(config, cluster, measured=measured)
    # Without soft wrapping rich would break lines at 80 columns if the output is not a terminal.
    console = Console(soft_wrap=True, highlight=False)
    for table in plan_tables(plan):
        console.print(table)
    compiler, step, more = _StepCompiler(cluster, console, options.time_limit), None, {}
    if not options.compile:
        console.print(effects_table(plan.in_turn))
        console.print(verdict_by_arithmetic(plan))
    else:
        step = compiler.step(config)
        for table in compiled_tables(step, plan):
            console.print(table)
        console.print(verdict(step, plan))
    if options.kernels:
        # Operations whose implementation the config names explicitly are the same in both steps.
        steps = {
            name: compiler.step(with_execution(config, implementation=name)) for name in ("xla", "pallas")
        }
        console.print(kernels_table(steps, plan))
        more["kernels"] = {name: dataclasses.asdict(result) for name, result in steps.items()}
    if options.search:
        result = search(
            for_platform(config, cluster.device.platform),
            cluster.num_gpus,
            gpus_per_node=cluster.gpus_per_node,
            limit=cluster.device.memory_bytes,
            measure=compiler.num_bytes,
            model_time=compiler.seconds,
        )
        console.print(found_table(result, plan))
        more["search"] = dataclasses.asdict(result)
    if options.json:
        text = dump_json(to_json(plan, step, **more), indent=2)
        pathlib.Path(options.json).write_text(text + "\n")
    if options.picture:
        draw(pathlib.Path(options.picture), plan, step)
    # The last line is the one to quote.
    console.print(summary(plan, step))


def install_wheels(_: argparse.Namespace) -> None:
    """Installs the compiler for AMD GPUs."""
    print(f"the compiler for AMD GPUs is in {install()}")


def list_devices(_: argparse.Namespace) -> None:
    """Lists the figures of each GPU with their sources."""
    Console(highlight=False).print(devices_table())


OTHERS: dict[str, Callable[[argparse.Namespace], None]] = {
    "kernels": plan_kernels,
    "devices": list_devices,
    "rocm-wheels": install_wheels,
}
"""What can be planned instead of a run, without config fields."""


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Estimate what a run needs on a cluster, without a GPU. It calculates FLOPs, memory, communication, "
        "step time, sizes of matrix products and the amount of data, which takes seconds; --compile also "
        "compiles the real step for the cluster.\n\n"
        "what to plan:\n"
        "  run          a run of the config (default)\n"
        "  kernels      compile each Pallas kernel for the GPU\n"
        "  devices      list the known GPUs, and the sources of their figures\n"
        "  rocm-wheels  install the compiler for AMD GPUs\n"
        "  failures     estimate the cost of failures; see `zaya plan failures --help`",
        (
            "zaya plan --config=configs/zaya1_8b.py --nodes=128 --gpus-per-node=8 --device=mi300x",
            "zaya plan --config=configs/zaya1_8b.py --nodes=128 --micro-batch=4 --compile --picture=plan.png",
            "zaya plan --config=configs/zaya1_8b.py --nodes=128 --search --json=plan.json",
            "zaya plan --config=configs/zaya1_8b.py --nodes=128 --measured=collectives.json "
            "--measured=gemm.json",
            "zaya plan --config=configs/zaya1_8b.py --micro-batch=4 --kernels --time-limit=1800",
            "zaya plan kernels --device=mi300x",
            "zaya plan kernels --execute",
            "zaya plan devices",
            "zaya plan failures --gpus=1024",
            "zaya plan rocm-wheels",
        ),
    )
    parser.add_argument("what", nargs="?", default="run", choices=["run", *OTHERS], help="what to plan")
    add_config_options(parser)
    _add_cluster_options(parser)
    _add_compiling_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draw memory and time, as PNG, SVG or PDF")
    return parser


def _add_cluster_options(parser: Parser) -> None:
    """Adds the options of the cluster and of the phase to plan."""
    parser.add_argument("--nodes", default=1, help="number of nodes")
    parser.add_argument("--gpus-per-node", default=8, help="GPUs per node")
    parser.add_argument("--device", default=PLANNED_GPU, help=f"the GPU: {', '.join(DEVICES)}")
    parser.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="FILE",
        help="JSON file of zaya bench collectives, gemm or hbm, instead of published and data-sheet figures; "
        "repeatable",
    )
    parser.add_argument(
        "--phase", metavar="NAME", help="phase to plan, at its full batch (default: the first)"
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="ROWS",
        help="sequences that a GPU processes at a time; sets execution.num_microbatches",
    )


def _add_compiling_options(parser: Parser) -> None:
    """Adds the options of the compilation."""
    parser.add_argument("--compile", action="store_true", help="compile the step for the cluster")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="compile the step without and with all Pallas kernels, and compare memory and traffic",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="compile several steps to find the largest micro-batch, the fastest remat policy and the fewest "
        "GPUs per sequence that fit",
    )
    parser.add_argument(
        "--execute",
        action="store_true",
        help="with kernels: execute the machine code of each kernel on an emulator of the GPU instead, and "
        "compare its results with the reference",
    )
    parser.add_argument(
        "--size",
        default=EXECUTED_SIZES[0],
        choices=EXECUTED_SIZES,
        help="sizes of the executed kernels: toy takes two minutes; wide has ZAYA1-8B's widths and few "
        "tokens, and takes half an hour",
    )
    parser.add_argument(
        "--time-limit", default=TIME_LIMIT, metavar="SECONDS", help="limit of one compilation"
    )


def config_of_phase(config: Config, name: str | None = None) -> Config:
    """Returns the config of a phase without its batch ramp: nearly all of its steps have the full batch.

    Raises:
      UserError: if the run has no such phase.
    """
    phases = {phase.name: phase.config for phase in config.resolved_phases}
    if name is not None and name not in phases:
        known = ", ".join(filter(None, phases)) or "none"
        raise UserError(f'--phase is "{name}"; the phases of the run are: {known}')
    chosen = next(iter(phases.values())) if name is None else phases[name]
    return dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, batch_ramp=()))


def _with_micro_batch(config: Config, rows: int | None, cluster: Cluster) -> Config:
    if rows is None:
        return config
    # Sequences of one microbatch, on all groups of GPUs together.
    parts = rows * num_groups(config, cluster.num_gpus)
    if config.data.batch_size % parts:
        raise UserError(
            f"data.batch_size is {config.data.batch_size}; it must be a multiple of {parts}: "
            f"--micro-batch={rows} on {cluster.num_gpus} GPUs"
        )
    return with_execution(config, num_microbatches=config.data.batch_size // parts)


@dataclasses.dataclass(frozen=True)
class _StepCompiler:
    """Compiles steps for a cluster, and shows on a console what takes so long."""

    cluster: Cluster
    console: Console
    time_limit: float

    def step(self, config: Config) -> CompiledStep:
        """Compiles the whole training step, and reads its memory and work from the program."""
        cluster = self.cluster
        what = f"compiling the step for {cluster.nodes:,} x {cluster.gpus_per_node} {cluster.device.name}"
        return read_compilation(self._run(compile_program, config, what), cluster)

    def num_bytes(self, config: Config) -> int:
        """Compiles until the memory is known, and prints it."""
        rows = config.data.batch_size // num_groups(config, self.cluster.num_gpus)
        what = f'remat "{config.execution.remat}", {rows:,} x {own_tokens(config):,} tokens per GPU'
        num_bytes = self._run(lay_out_program, config, what)
        self.console.print(f"{what}: {format_bytes(num_bytes)}")
        return num_bytes

    def seconds(self, config: Config) -> float:
        """Models the time of a step, and prints it."""
        seconds = self.step(config).times[PUBLISHED.name].seconds
        self.console.print(f'remat "{config.execution.remat}": {milliseconds(seconds)} ms by the model')
        return seconds

    def _run(self, function: Callable[..., Any], config: Config, what: str) -> Any:
        with self.console.status(what) as status:
            return function(
                train_step_job(config, self.cluster),
                time_limit=self.time_limit,
                progress=lambda seconds: status.update(f"{what}: {seconds:.0f} s"),
            )


def _check(options: argparse.Namespace) -> None:
    """Checks the options before tables are printed and minutes are spent on compiling."""
    if options.execute:
        raise UserError("--execute is for kernels, not for a run: zaya plan kernels --execute")
    check_positive(options, "time_limit")
    check_outputs(json_file=options.json, picture=options.picture)
    if options.compile or options.kernels or options.search:
        # Fail early if the compiler does not support the GPU or is not installed.
        find_device(options.device).need_core()
        find_plugin()
