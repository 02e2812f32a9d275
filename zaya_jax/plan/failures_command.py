"""`zaya plan failures`: how much of a cluster's time a run has, and how often it should save."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.aegis.goodput import Goodput, measure
from zaya_jax.aegis.journal import read_events
from zaya_jax.checkpoint import read_config
from zaya_jax.options import Parser
from zaya_jax.plan.failures import (
    GPU_HOURS,
    Expected,
    Failures,
    best_interval,
    expect,
    mean_seconds_between_failures,
    seen,
)
from zaya_jax.tables import name_column, number_column

PARTS = {
    "productive": "steps that are part of the run",
    "stall": "waiting for checkpoints",
    "lost": "steps that are made again",
    "restart": "from failures to the first new steps",
}


def main(argv: Sequence[str]) -> None:
    """Prints what failures cost, by the model, and of a run also what they did cost.

    Raises:
      ValueError: for numbers that cannot be, or a run that has not failed.
    """
    options = _parser().parse_args(argv)
    for name in ("gpus", "mttf_hours", "checkpoint_minutes", "stall_seconds", "restart_seconds"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    goodput = None
    if options.run is None:
        given, source = _of_options(options)
    else:
        goodput = measure(read_events(options.run))
        every = read_config(options.run).train.checkpoint_every
        given, source = seen(goodput, checkpoint_every=every), f"as {options.run} went through them"
    if options.json:
        print(json.dumps(_values(given, goodput), indent=2))
    else:
        _print(given, source, goodput)


def _parser() -> Parser:
    parser = Parser(
        "plan failures",
        "Says what failures cost a run on a cluster, and which checkpoint interval costs least: a model, "
        "with figures of others where none are given. Of a run that was begun anew, what they did cost too.",
        (
            "zaya plan failures --gpus=1024",
            "zaya plan failures --mttf-hours=7.9 --checkpoint-minutes=10 --restart-seconds=300",
            "zaya plan failures --run=runs/drill/run",
        ),
    )
    parser.add_argument("--gpus", type=int, default=1024, help="of the cluster (default: %(default)s)")
    parser.add_argument(
        "--mttf-hours", type=float, help="between two failures of the cluster (default: by its GPUs)"
    )
    parser.add_argument("--checkpoint-minutes", type=float, help="between two (default: the best)")
    parser.add_argument(
        "--stall-seconds", type=float, default=1.0, help="that steps wait for one (default: %(default)s)"
    )
    parser.add_argument(
        "--restart-seconds",
        type=float,
        default=60.0,
        help="from a failure to the first new step (default: %(default)s, our aim and no measurement)",
    )
    parser.add_argument("--run", type=pathlib.Path, metavar="RUN", help="the folder of a run that has failed")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    return parser


def _of_options(options: Any) -> tuple[Failures, str]:
    if options.mttf_hours:
        mean, source = 3600 * options.mttf_hours, "as given"
    else:
        worst = min(GPU_HOURS, key=lambda name: GPU_HOURS[name])
        mean = mean_seconds_between_failures(options.gpus)
        source = f"{options.gpus:,} GPUs of {GPU_HOURS[worst]:,.0f} hours each: {worst}"
    interval = 60 * (options.checkpoint_minutes or 1.0)
    given = Failures(mean, interval, options.stall_seconds, options.restart_seconds)
    if options.checkpoint_minutes is None:
        given = dataclasses.replace(given, interval=best_interval(given))
    return given, source


def _print(given: Failures, source: str, goodput: Goodput | None) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"a failure each {_time(given.mean_seconds)} of work ({source}); {_time(given.interval)} of steps "
        f"between two checkpoints, for each of which they wait {given.stall:.2f} s; {given.restart:.0f} s "
        "from a failure to the first new step"
    )
    columns = [number_column("expected"), *([number_column("measured")] if goodput else [])]
    table = Table(name_column("time"), *columns, name_column("what it is"), title="a model, no hardware run")
    measured = dataclasses.asdict(_measured(goodput)) if goodput else {}
    for name, share in dataclasses.asdict(expect(given)).items():
        found = [f"{measured[name]:.1%}"] if goodput else []
        table.add_row(name, f"{share:.1%}", *found, PARTS[name])
    console.print(table)
    best = best_interval(given)
    share = expect(dataclasses.replace(given, interval=best)).productive
    console.print(f"the best interval by this model: {_time(best)}, {share:.1%} productive")


def _measured(goodput: Goodput) -> Expected:
    """The run's own shares, by the same parts; what is none of them, as evaluation, is left out."""
    own = seen(goodput, checkpoint_every=1)
    restarts = own.restart * (goodput.attempts - 1)
    parts = [goodput.seconds[name] for name in ("productive", "save", "lost progress")]
    total = sum(parts) + restarts
    return Expected(*(part / total for part in (*parts, restarts)))


def _values(given: Failures, goodput: Goodput | None) -> dict[str, Any]:
    found = {"given": dataclasses.asdict(given), "expected": dataclasses.asdict(expect(given))}
    measured = {"measured": dataclasses.asdict(_measured(goodput))} if goodput else {}
    return found | measured | {"best_interval_seconds": best_interval(given)}


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
