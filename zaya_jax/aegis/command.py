"""`zaya aegis`: what befell a run, where it is, and what its time went into."""

import datetime
import functools
import importlib
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.aegis.goodput import BUCKETS, MEANINGS, Goodput, find_attempts, measure
from zaya_jax.aegis.journal import AT, BEGAN, ENDS, FINISHED, describe_event, read_events
from zaya_jax.aegis.reading_logs import STANDARD_INPUT, classes_table, find_classes, read_lines, values_of
from zaya_jax.aegis.rules import RULES_FILE, load_rules
from zaya_jax.options import Parser
from zaya_jax.tables import name_column, number_column

QUIET_SECONDS = 60.0
"""Without an event of a run that has not ended: it stands, was killed, or makes very long steps."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya aegis` with the words behind it.

    Raises:
      ValueError: for a folder that is no run's, or a file that has no rules.
    """
    arguments = list(argv or ())
    if arguments and arguments[0] in VERBS:
        VERBS[arguments[0]](arguments[1:])
    else:
        _parser().parse_args(arguments)


def _parser() -> Parser:
    parser = Parser(
        "aegis",
        "Says what befell a run. `zaya aegis VERB --help` has the options of each verb.",
        (
            "zaya aegis status runs/tiny       # where it is",
            "zaya aegis events runs/tiny       # all that was written down",
            "zaya aegis goodput runs/tiny      # what its time went into",
            "zaya aegis timeline runs/tiny --output=tiny.html     # all of it in a picture",
            "zaya aegis metrics runs/tiny      # the same for Prometheus, and the numbers of its steps",
            "zaya aegis classify slurm-1.out   # what a log says, and what is to be done",
        ),
    )
    parser.add_argument("verb", metavar="VERB", choices=list(VERBS), help=", ".join(VERBS))
    return parser


def _show(verb: str, argv: Sequence[str]) -> None:
    """Reads a run's events, and shows what a verb makes of them."""
    summary, shown, told = OF_RUNS[verb]
    parser = Parser(f"aegis {verb}", summary, (f"zaya aegis {verb} runs/tiny",))
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="the folder of the run")
    _add_json(parser)
    options = parser.parse_args(argv)
    _print(shown, told, read_events(options.run), as_json=options.json)


def classify_logs(argv: Sequence[str]) -> None:
    """Prints what some logs say."""
    parser = Parser(
        "aegis classify",
        "Says which classes of trouble the lines of logs are of, and what a rule would do about each.",
        ("zaya aegis classify slurm-1.out", "zaya aegis classify - < slurm-1.out"),
    )
    parser.add_argument(
        "logs", nargs="+", metavar="FILE", help=f'of lines; "{STANDARD_INPUT}" reads its input'
    )
    parser.add_argument("--rules", default=RULES_FILE, metavar="FILE", help="TOML (default: %(default)s)")
    _add_json(parser)
    options = parser.parse_args(argv)
    found = find_classes(load_rules(options.rules), read_lines(options.logs))
    _print(classes_table, values_of, found, as_json=options.json)


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def _print(shown: Callable[[Any], Any], told: Callable[[Any], Any], what: Any, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(told(what), indent=2))
    else:
        # Lines of others may hold brackets, which are no markup.
        Console(soft_wrap=True, highlight=False, markup=False).print(shown(what))


def describe_status(events: Sequence[Mapping[str, Any]], *, now: float) -> str:
    """Where a run is, in a sentence.

    Args:
      events: of the run, at least one.
      now: Unix time.
    """
    last = next((e for e in reversed(events) if e["event"] in (BEGAN, AT, *ENDS)), events[-1])
    lives = len(find_attempts(events))
    ago = f"{now - last['time']:,.0f} s ago"
    where = f"step {last.get('step', 0):,}, begun {lives} times" if lives != 1 else f"step {last['step']:,}"
    if last["event"] == FINISHED:
        return f"finished {ago} at {where}"
    if last["event"] in ENDS:
        reasons = "; ".join(last[name] for name in ("reason", "late") if name in last)
        return f"{last['event']} {ago} at {where}" + (f": {reasons}" if reasons else "")
    if now - last["time"] > QUIET_SECONDS:
        return f"at {where}, and silent since {ago}: it was killed, or its steps are that long"
    return f"running at {where}, heard of {ago}"


def _status(events: Sequence[Mapping[str, Any]]) -> str:
    return describe_status(events, now=time.time())


def _events_table(events: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(name_column("time, UTC"), name_column("event"), number_column("step"), name_column("what"))
    for event in events:
        if event["event"] != AT:  # where a run was now and then, which its end tells too
            when = datetime.datetime.fromtimestamp(event["time"], datetime.UTC)
            step = f"{event['step']:,}" if "step" in event else ""
            table.add_row(f"{when:%Y-%m-%d %H:%M:%S}", str(event["event"]), step, describe_event(event))
    return table


def _goodput_table(events: Sequence[Mapping[str, Any]]) -> Table:
    found = measure(events)
    title = (
        f"goodput {found.share:.1%}: {found.steps:,} steps in {found.total:,.0f} s, begun {found.attempts} "
        f"times, {found.lost_steps:,} steps made again"
    )
    columns = number_column("seconds"), number_column("share"), name_column("what it is")
    table = Table(name_column("time"), *columns, title=title)
    for bucket in BUCKETS:
        value = found.seconds[bucket]
        table.add_row(bucket, f"{value:,.1f}", f"{value / max(found.total, 1e-9):.1%}", MEANINGS[bucket])
    return table


def _goodput_values(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: Goodput = measure(events)
    return {
        "goodput": found.share,
        "total_seconds": found.total,
        "seconds": dict(found.seconds),
        "attempts": found.attempts,
        "steps": found.steps,
        "lost_steps": found.lost_steps,
    }


def _of_module(name: str, argv: Sequence[str]) -> None:
    """Runs a verb of a file of its own, whose imports the other verbs need not wait for."""
    importlib.import_module(name).main(argv)


OF_RUNS: dict[str, tuple[str, Callable[[Sequence[Mapping[str, Any]]], Any], Callable[..., Any]]] = {
    "status": (
        "Says where a run is, in a sentence.",
        _status,
        lambda events: {"status": _status(events), "last": events[-1]},
    ),
    "events": ("Lists what befell a run.", _events_table, list),
    "goodput": ("Says what the time of a run went into.", _goodput_table, _goodput_values),
}
"""What each does, what it makes of a run's events for people, and for programs."""
VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    **{verb: functools.partial(_show, verb) for verb in OF_RUNS},
    "classify": classify_logs,
    "agent": functools.partial(_of_module, "zaya_jax.aegis.agent"),
    "drill": functools.partial(_of_module, "zaya_jax.aegis.drill_command"),
    "metrics": functools.partial(_of_module, "zaya_jax.aegis.exporter"),
    "timeline": functools.partial(_of_module, "zaya_jax.aegis.timeline_page"),
}
