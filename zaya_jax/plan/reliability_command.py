"""`zaya plan failures`: productive share of a cluster's time under failures, and the best checkpoint
interval.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.aegis.views.goodput import Goodput, measure
from zaya_jax.checkpoint import read_config
from zaya_jax.files.json_files import dump_json
from zaya_jax.options import Parser, check_positive
from zaya_jax.plan.reliability import (
    GPU_HOURS,
    Expected,
    Failures,
    best_interval,
    expect,
    failures_of_run,
    mean_seconds_between_failures,
)
from zaya_jax.run_folder.events import read_events
from zaya_jax.text_tables import name_column, number_column

PARTS = {
    "productive": "steps that are part of the run",
    "stall": "waiting for checkpoints",
    "lost": "steps that are repeated",
    "restart": "from failures to the first new steps",
}


def main(argv: Sequence[str]) -> None:
    """Prints the expected cost of failures by the model, and for a run also the measured cost.

    Raises:
      UserError: if a number is out of range, or the run has not failed.
    """
    options = _parser().parse_args(argv)
    check_positive(options, "gpus", "mttf_hours", "checkpoint_minutes", "stall_seconds", "restart_seconds")
    goodput = None
    if options.run is None:
        failures, source = _of_options(options)
    else:
        goodput = measure(read_events(options.run))
        every = read_config(options.run).train.checkpoint_every
        failures, source = failures_of_run(goodput, checkpoint_every=every), f"measured in {options.run}"
    if options.json:
        print(dump_json(_values(failures, goodput), indent=2))
    else:
        _print(failures, source, goodput)


def _parser() -> Parser:
    parser = Parser(
        "plan failures",
        "Estimate the cost of failures to a run on a cluster, and the best checkpoint interval, by a model "
        "with published failure rates as defaults. For a run that was restarted, report the measured cost.",
        (
            "zaya plan failures --gpus=1024",
            "zaya plan failures --mttf-hours=7.9 --checkpoint-minutes=10 --restart-seconds=300",
            "zaya plan failures --run=runs/drill/run",
        ),
    )
    parser.add_argument("--gpus", default=1024, help="GPUs of the cluster")
    parser.add_argument(
        "--mttf-hours", type=float, help="mean hours between failures of the cluster (default: from --gpus)"
    )
    parser.add_argument(
        "--checkpoint-minutes", type=float, help="minutes between checkpoints (default: the best)"
    )
    parser.add_argument(
        "--stall-seconds", default=1.0, help="seconds that training waits for each checkpoint"
    )
    parser.add_argument(
        "--restart-seconds",
        default=60.0,
        help="seconds from a failure to the first new step (default: %(default)s, a target, not measured)",
    )
    parser.add_argument("--run", type=pathlib.Path, metavar="RUN", help="the folder of a run that has failed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _of_options(options: Any) -> tuple[Failures, str]:
    if options.mttf_hours:
        mean, source = 3600 * options.mttf_hours, "from --mttf-hours"
    else:
        worst = min(GPU_HOURS, key=lambda name: GPU_HOURS[name])
        mean = mean_seconds_between_failures(options.gpus)
        source = f"{options.gpus:,} GPUs of {GPU_HOURS[worst]:,.0f} hours each: {worst}"
    # The placeholder of one minute is replaced below by the best interval.
    interval = 60 * (options.checkpoint_minutes or 1.0)
    failures = Failures(mean, interval, options.stall_seconds, options.restart_seconds)
    if options.checkpoint_minutes is None:
        failures = dataclasses.replace(failures, interval=best_interval(failures))
    return failures, source


def _print(failures: Failures, source: str, goodput: Goodput | None) -> None:
    # The source may contain the name of a folder, whose brackets rich would take for markup.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"a failure every {_time(failures.mean_seconds)} of work ({source}); a checkpoint every "
        f"{_time(failures.interval)} of steps, which wait {failures.stall:.2f} s for it; "
        f"{failures.restart:.0f} s from a failure to the first new step"
    )
    columns = [number_column("expected"), *([number_column("measured")] if goodput else [])]
    table = Table(
        name_column("time"), *columns, name_column("meaning"), title="a model, not measured on hardware"
    )
    measured = dataclasses.asdict(_measured(goodput)) if goodput else {}
    for name, share in dataclasses.asdict(expect(failures)).items():
        values = [f"{measured[name]:.1%}"] if goodput else []
        table.add_row(name, f"{share:.1%}", *values, PARTS[name])
    console.print(table)
    best = best_interval(failures)
    share = expect(dataclasses.replace(failures, interval=best)).productive
    console.print(f"the best interval by this model: {_time(best)}, {share:.1%} productive")


def _measured(goodput: Goodput) -> Expected:
    """The run's measured shares of the model's parts; other time, such as evaluation, is excluded."""
    # The checkpoint interval does not affect the restart time, which is all that is used here.
    own = failures_of_run(goodput, checkpoint_every=1)
    restarts = own.restart * (goodput.attempts - 1)
    # In the order of the fields of `Expected`: productive, stall and lost.
    parts = [goodput.seconds[name] for name in ("productive", "save", "lost progress")]
    total = sum(parts) + restarts
    return Expected(*(part / total for part in (*parts, restarts)))


def _values(failures: Failures, goodput: Goodput | None) -> dict[str, Any]:
    values = {"given": dataclasses.asdict(failures), "expected": dataclasses.asdict(expect(failures))}
    measured = {"measured": dataclasses.asdict(_measured(goodput))} if goodput else {}
    return values | measured | {"best_interval_seconds": best_interval(failures)}


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
