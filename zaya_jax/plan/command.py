"""`zaya plan`: what a run needs, by arithmetic or by compiling its step for a cluster."""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from zaya_jax.config import Config
from zaya_jax.options import Parser, add_config_options, load_config
from zaya_jax.plan import failures_command
from zaya_jax.plan.devices import Cluster, cluster_as_measured, find_device
from zaya_jax.plan.gpus import DEVICES
from zaya_jax.plan.kernel_report import plan_kernels
from zaya_jax.plan.measured import read_measured
from zaya_jax.plan.picture import check_format, draw
from zaya_jax.plan.report import CompiledStep, make_plan, read_compilation, to_json, train_step_job
from zaya_jax.plan.rocm.compiler import TIME_LIMIT, Compilation, compile_program, lay_out_program
from zaya_jax.plan.rocm.wheels import find_plugin, install
from zaya_jax.plan.search import search
from zaya_jax.plan.shares import num_groups, own_tokens
from zaya_jax.plan.tables import compiled_tables, found_table, kernels_table, plan_tables
from zaya_jax.plan.time_tables import devices_table, milliseconds, verdict, verdict_by_arithmetic
from zaya_jax.tables import format_bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya plan` with the words behind it.

    Raises:
      ValueError: for a run that cannot be planned, or a kernel that is not sound.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["failures"]:  # which knows no config
        failures_command.main(words[1:])
        return
    parser = _parser()
    options, overrides = parser.parse_with_fields(words)
    VERBS[options.what](options, overrides)


def plan_run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """The arithmetic of a run, and with --compile and --search what the compiler says."""
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
    console = Console(soft_wrap=True, highlight=False)
    for table in plan_tables(plan):
        console.print(table)
    step, more = None, {}
    if not options.compile:
        console.print(verdict_by_arithmetic(plan))
    else:
        step = read_compilation(_compile(config, cluster, console, options.time_limit), cluster)
        for table in compiled_tables(step, plan):
            console.print(table)
        console.print(verdict(step, plan))
    if options.kernels:
        steps = _compile_both(config, cluster, console, options.time_limit)
        console.print(kernels_table(steps, plan))
        more["kernels"] = {name: dataclasses.asdict(found) for name, found in steps.items()}
    if options.search:
        asked = {"cluster": cluster, "console": console, "time_limit": options.time_limit}
        found = search(
            config,
            cluster.num_gpus,
            gpus_per_node=cluster.gpus_per_node,
            limit=cluster.device.memory_bytes,
            measure=functools.partial(_measure, **asked),
            model_time=functools.partial(_model_time, **asked),
        )
        console.print(found_table(found, plan))
        more["search"] = dataclasses.asdict(found)
    if options.json:
        text = json.dumps(to_json(plan, step, **more), indent=2)
        pathlib.Path(options.json).write_text(text + "\n")
    if options.picture:
        draw(pathlib.Path(options.picture), plan, step)


def install_wheels(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Gets the compiler for AMD GPUs."""
    del options
    if overrides:
        raise ValueError(f'"{overrides[0]}" is not an option of rocm-wheels; it has none')
    print(f"the compiler for AMD GPUs is in {install()}")


def list_devices(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """What is known of each GPU, and from where."""
    del options
    if overrides:
        raise ValueError(f'"{overrides[0]}" is not an option of devices; it has none')
    Console(highlight=False).print(devices_table())


VERBS: dict[str, Callable[[argparse.Namespace, Sequence[str]], None]] = {
    "run": plan_run,
    "kernels": plan_kernels,
    "devices": list_devices,
    "rocm-wheels": install_wheels,
}


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Says what a run needs on a cluster. By arithmetic, in seconds: operations, memory, links, time, "
        "sizes of products, data. With --compile the real step is compiled for the cluster, without a GPU; "
        "kernels does so for each Pallas kernel, devices lists GPUs and where their figures are from, "
        "rocm-wheels gets the compiler. `zaya plan failures --help` has what failures cost.",
        (
            "zaya plan --config=configs/zaya1_8b.py --nodes=128 --gpus-per-node=8 --device=mi300x",
            "zaya plan --config=configs/zaya1_8b.py --nodes=128 --micro-batch=4 --compile --picture=plan.png",
            "zaya plan --config=configs/zaya1_8b.py --nodes=128 --search --json=plan.json",
            "zaya plan --config=configs/zaya1_8b.py --nodes=128 --measured=collectives.json "
            "--measured=gemm.json",
            "zaya plan --config=configs/zaya1_8b.py --micro-batch=4 --kernels --time-limit=1800",
            "zaya plan kernels --device=mi300x",
            "zaya plan devices",
            "zaya plan failures --gpus=1024",
            "zaya plan rocm-wheels",
        ),
    )
    parser.add_argument(
        "what", nargs="?", default="run", choices=list(VERBS), help="what to plan (default: %(default)s)"
    )
    add_config_options(parser)
    _add_cluster_options(parser)
    _add_compiling_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--picture", metavar="FILE", help="draw memory and time, as PNG, SVG or PDF")
    return parser


def _add_cluster_options(parser: Parser) -> None:
    """On what the run is planned, and which part of it."""
    parser.add_argument("--nodes", type=int, default=1, help="of the cluster (default: %(default)s)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="in each (default: %(default)s)")
    parser.add_argument(
        "--device", default="mi300x", help=f"the GPU: {', '.join(DEVICES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="FILE",
        help="of zaya bench collectives, gemm or hbm --json, in place of figures on paper; several times",
    )
    parser.add_argument("--phase", metavar="NAME", help="of the run, at its full batch (default: the first)")
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="ROWS",
        help="sequences that a GPU has under way; sets execution.num_microbatches",
    )


def _add_compiling_options(parser: Parser) -> None:
    """What is asked of the compiler."""
    parser.add_argument("--compile", action="store_true", help="compile the step for the cluster")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="compile the step without and with all Pallas kernels, and compare memory and traffic",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="compile several steps, for the largest micro-batch, the fastest remat policy and the fewest "
        "GPUs a sequence that fit",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT,
        metavar="SECONDS",
        help="of one compilation (default: %(default)s)",
    )


def config_of_phase(config: Config, name: str | None = None) -> Config:
    """The config of a phase without its ramp: nearly all of its steps are of the full batch.

    Raises:
      ValueError: if the run has no such phase.
    """
    phases = {phase.name: phase.config for phase in config.resolved_phases}
    if name is not None and name not in phases:
        known = ", ".join(filter(None, phases)) or "none"
        raise ValueError(f'--phase is "{name}"; the phases of the run are: {known}')
    chosen = next(iter(phases.values())) if name is None else phases[name]
    return dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, batch_ramp=()))


def _with_micro_batch(config: Config, rows: int | None, cluster: Cluster) -> Config:
    if rows is None:
        return config
    if rows < 1:
        raise ValueError(f"--micro-batch is {rows}; it must be at least 1")
    parts = rows * num_groups(config, cluster.num_gpus)
    if config.data.batch_size % parts:
        raise ValueError(
            f"data.batch_size is {config.data.batch_size}; it must be a multiple of {parts}: "
            f"--micro-batch={rows} on {cluster.num_gpus} GPUs"
        )
    execution = dataclasses.replace(config.execution, num_microbatches=config.data.batch_size // parts)
    return dataclasses.replace(config, execution=execution)


def _compile(config: Config, cluster: Cluster, console: Console, time_limit: float) -> Compilation:
    what = f"compiling the step for {cluster.nodes:,} x {cluster.gpus_per_node} {cluster.device.name}"
    with console.status(what) as status:
        return compile_program(
            train_step_job(config, cluster),
            time_limit=time_limit,
            progress=lambda seconds: status.update(f"{what}: {seconds:.0f} s"),
        )


def _compile_both(
    config: Config, cluster: Cluster, console: Console, time_limit: float
) -> dict[str, CompiledStep]:
    """The step by each value of `ExecutionConfig.implementation`; operations named in the config stay so."""
    steps = {}
    for name in ("xla", "pallas"):
        execution = dataclasses.replace(config.execution, implementation=name)
        compilation = _compile(dataclasses.replace(config, execution=execution), cluster, console, time_limit)
        steps[name] = read_compilation(compilation, cluster)
    return steps


def _measure(config: Config, *, cluster: Cluster, console: Console, time_limit: float) -> int:
    rows = config.data.batch_size // num_groups(config, cluster.num_gpus)
    what = f'remat "{config.execution.remat}", {rows:,} x {own_tokens(config):,} tokens a GPU'
    with console.status(what) as status:
        num_bytes = lay_out_program(
            train_step_job(config, cluster),
            time_limit=time_limit,
            progress=lambda seconds: status.update(f"{what}: {seconds:.0f} s"),
        )
    console.print(f"{what}: {format_bytes(num_bytes)}")
    return num_bytes


def _model_time(config: Config, *, cluster: Cluster, console: Console, time_limit: float) -> float:
    step = read_compilation(_compile(config, cluster, console, time_limit), cluster)
    seconds = step.times[0].seconds
    console.print(f'remat "{config.execution.remat}": {milliseconds(seconds)} ms by the model')
    return seconds


def _check(options: argparse.Namespace) -> None:
    """Finds now what would otherwise be found after pages of tables and minutes of compiling."""
    if options.time_limit <= 0:
        raise ValueError(f"--time-limit is {options.time_limit}; it must be above 0")
    for name in ("json", "picture"):
        file = getattr(options, name) and pathlib.Path(getattr(options, name))
        if file and not file.parent.is_dir():
            raise ValueError(f"--{name} is {file}, and there is no folder {file.parent}")
        if file and file.is_dir():
            raise ValueError(f"--{name} is {file}, which is a folder; it must be a file")
    if options.picture:
        check_format(pathlib.Path(options.picture))
    if options.compile or options.kernels or options.search:
        find_device(options.device).need_core()
        find_plugin()
