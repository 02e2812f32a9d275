"""`zaya aegis`: status, history and goodput of a run, and the commands that watch nodes and inject faults."""

import dataclasses
import datetime
import functools
import importlib
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.aegis.agent.classify_command import (
    STANDARD_INPUT,
    read_lines,
    summaries_json,
    summaries_text,
    summarize_lines,
)
from zaya_jax.aegis.agent.log_rules import RULES_FILE, load_rules
from zaya_jax.aegis.views.goodput import BUCKETS, MEANINGS, count_attempts, find_attempts, measure
from zaya_jax.files.json_files import dump_json
from zaya_jax.options import Parser, run_subcommand
from zaya_jax.run_folder.events import describe_event, read_events
from zaya_jax.run_folder.names import AT, BEGAN, ENDS, FINISHED
from zaya_jax.run_folder.stragglers import active_stragglers
from zaya_jax.text_tables import name_column, number_column

QUIET_SECONDS = 60.0
"""Time without an event after which the status says that a run may be stalled or killed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya aegis` with its arguments.

    Raises:
      UserError: for a folder that is not a run's, or an invalid file of rules.
    """
    parser = Parser(
        "aegis",
        "Show the history of a run, and watch its nodes. `zaya aegis COMMAND --help` shows the options of "
        "each command.",
        (
            "zaya aegis status runs/tiny       # current state in one sentence",
            "zaya aegis events runs/tiny       # run history",
            "zaya aegis goodput runs/tiny      # time by cause",
            "zaya aegis timeline runs/tiny --output=tiny.html     # history as an HTML page",
            "zaya aegis metrics runs/tiny      # metrics for Prometheus",
            "zaya aegis classify slurm-1.out   # failures in a log, and what to do about them",
            "zaya aegis verify runs/tiny       # repeat the last step of a running run, and compare all bits",
            "zaya aegis agent runs/tiny        # watch this node while the run trains",
            "zaya aegis drill                  # inject faults into a small run, and score their handling",
        ),
    )
    run_subcommand(parser, SUBCOMMANDS, argv)


def _show(name: str, argv: Sequence[str]) -> None:
    """Runs a subcommand that shows something computed from a run's events."""
    summary, to_text, to_json = _VIEWS[name]
    parser = Parser(f"aegis {name}", summary, (f"zaya aegis {name} runs/tiny",))
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="folder of the run")
    _add_json(parser)
    options = parser.parse_args(argv)
    _print(to_text, to_json, read_events(options.run), as_json=options.json)


def classify_logs(argv: Sequence[str]) -> None:
    """Prints the classes of failures in log files."""
    parser = Parser(
        "aegis classify",
        "Classify the lines of logs by the agent's rules, and show the action of each class.",
        ("zaya aegis classify slurm-1.out", "zaya aegis classify - < slurm-1.out"),
    )
    parser.add_argument(
        "logs", nargs="+", metavar="FILE", help=f'log files; "{STANDARD_INPUT}" is standard input'
    )
    parser.add_argument("--rules", default=RULES_FILE, metavar="FILE", help="TOML file of log rules")
    _add_json(parser)
    options = parser.parse_args(argv)
    summaries = summarize_lines(load_rules(options.rules), read_lines(options.logs))
    _print(summaries_text, summaries_json, summaries, as_json=options.json)


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _print(
    to_text: Callable[[Any], Any], to_json: Callable[[Any], Any], values: Any, *, as_json: bool
) -> None:
    if as_json:
        print(dump_json(to_json(values), indent=2))
    else:
        # Without markup: lines of logs may contain brackets.
        Console(soft_wrap=True, highlight=False, markup=False).print(to_text(values))


def describe_status(events: Sequence[Mapping[str, Any]], *, now: float) -> str:
    """Returns the state of a run as a sentence.

    Args:
      events: events of the run, at least one.
      now: current Unix time in seconds.
    """
    # Other events, such as skipped steps, do not show whether the run is still going.
    last = next((e for e in reversed(events) if e["event"] in (BEGAN, AT, *ENDS)), events[-1])
    attempts = len(find_attempts(events))
    age = f"{now - last['time']:,.0f} s ago"
    step = f"step {last.get('step', 0):,}"
    where = f"{step}, after {count_attempts(attempts)}" if attempts != 1 else step
    if last["event"] == FINISHED:
        return f"finished {age} at {where}"
    if last["event"] in ENDS:
        reasons = "; ".join(last[name] for name in ("reason", "late") if name in last)
        return f"{last['event']} {age} at {where}" + (f": {reasons}" if reasons else "")
    slow = "".join(f"; straggler: {describe_event(event)}" for event in active_stragglers(events))
    if now - last["time"] > QUIET_SECONDS:
        return f"at {where}, last event {age}: killed, stalled, or making very long steps{slow}"
    return f"running at {where}, last event {age}{slow}"


def _status(events: Sequence[Mapping[str, Any]]) -> str:
    return describe_status(events, now=time.time())


def _events_table(events: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        name_column("time (UTC)"), name_column("event"), number_column("step"), name_column("description")
    )
    for event in events:
        # Progress reports are omitted: there are thousands, and the end of an attempt has the last step.
        if event["event"] != AT:
            when = datetime.datetime.fromtimestamp(event["time"], datetime.UTC)
            step = f"{event['step']:,}" if "step" in event else ""
            table.add_row(f"{when:%Y-%m-%d %H:%M:%S}", str(event["event"]), step, describe_event(event))
    return table


def _goodput_table(events: Sequence[Mapping[str, Any]]) -> Table:
    goodput = measure(events)
    columns = number_column("seconds"), number_column("share"), name_column("meaning")
    table = Table(name_column("bucket"), *columns, title=f"goodput {goodput.summary}")
    for bucket in BUCKETS:
        value = goodput.seconds[bucket]
        table.add_row(bucket, f"{value:,.1f}", f"{value / max(goodput.total, 1e-9):.1%}", MEANINGS[bucket])
    return table


def _goodput_json(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    goodput = measure(events)
    return {"goodput": goodput.share, "total_seconds": goodput.total} | dataclasses.asdict(goodput)


def _run_module(name: str, argv: Sequence[str]) -> None:
    """Runs a subcommand in its own module, whose imports the other subcommands do not need."""
    importlib.import_module(name).main(argv)


# Summaries of subcommands, with functions that convert events to text and to JSON.
_VIEWS: dict[str, tuple[str, Callable[[Sequence[Mapping[str, Any]]], Any], Callable[..., Any]]] = {
    "status": (
        "Show the current state of a run in one sentence.",
        _status,
        lambda events: {
            "status": _status(events),
            "last": events[-1],
            "stragglers": active_stragglers(events),
        },
    ),
    "events": ("List the events of a run.", _events_table, list),
    "goodput": (
        "Show how much of a run's time was spent on training, and the rest by cause.",
        _goodput_table,
        _goodput_json,
    ),
}
SUBCOMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    **{name: functools.partial(_show, name) for name in _VIEWS},
    "classify": classify_logs,
    "agent": functools.partial(_run_module, "zaya_jax.aegis.agent.agent"),
    "drill": functools.partial(_run_module, "zaya_jax.aegis.drill.command"),
    "metrics": functools.partial(_run_module, "zaya_jax.aegis.views.exporter"),
    "timeline": functools.partial(_run_module, "zaya_jax.aegis.views.timeline_page"),
    "verify": functools.partial(_run_module, "zaya_jax.aegis.watch.verify_command"),
}
