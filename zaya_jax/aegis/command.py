"""`zaya aegis`: what befell a run, where it is, and what its time went into."""

import datetime
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.aegis.goodput import BUCKETS, MEANINGS, Goodput, find_attempts, measure
from zaya_jax.aegis.journal import AT, BEGAN, ENDS, FINISHED, read_events
from zaya_jax.options import Parser
from zaya_jax.tables import name_column, number_column

QUIET_SECONDS = 60.0
"""Without an event of a run that has not ended: it stands, was killed, or makes very long steps."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya aegis` with the words behind it.

    Raises:
      ValueError: for a folder that is no run's.
    """
    options = _parser().parse_args(argv)
    events = read_events(options.run)
    if options.json:
        print(json.dumps(TOLD[options.what](events), indent=2))
        return
    Console(soft_wrap=True, highlight=False).print(SHOWN[options.what](events))


def _parser() -> Parser:
    parser = Parser(
        "aegis",
        "Says what befell a run: status where it is, events all that was written down, goodput what its time "
        "went into.",
        (
            "zaya aegis status runs/tiny",
            "zaya aegis events runs/tiny",
            "zaya aegis goodput runs/tiny --json",
        ),
    )
    parser.add_argument("what", choices=list(SHOWN), help="what to say")
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    return parser


def describe_status(events: Sequence[Mapping[str, Any]], *, now: float) -> str:
    """Where a run is, in a sentence.

    Args:
      events: of the run, at least one.
      now: Unix time.
    """
    last, lives = events[-1], len(find_attempts(events))
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
            table.add_row(f"{when:%Y-%m-%d %H:%M:%S}", str(event["event"]), step, _what(event))
    return table


def _what(event: Mapping[str, Any]) -> str:
    if event["event"] == BEGAN:
        return f"{event['processes']} processes, {event['devices']} devices"
    return "; ".join(str(event[name]) for name in ("reason", "late") if name in event)


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


SHOWN: dict[str, Callable[[Sequence[Mapping[str, Any]]], Any]] = {
    "status": _status,
    "events": _events_table,
    "goodput": _goodput_table,
}
TOLD: dict[str, Callable[[Sequence[Mapping[str, Any]]], Any]] = {
    "status": lambda events: {"status": _status(events), "last": events[-1]},
    "events": list,
    "goodput": _goodput_values,
}
"""The same, for programs."""
