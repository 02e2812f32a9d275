"""All that the folder of a run tells: its metrics, config, texts, lives, and what its time went into."""

import contextlib
import dataclasses
import datetime
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.aegis.goodput import Goodput, find_attempts, measure
from zaya_jax.aegis.journal import (
    BEGAN,
    EVENTS_FILE,
    FINISHED,
    METRICS_FILE,
    SAMPLES_FILE,
    events_of,
    lines_of,
    parse_line,
)
from zaya_jax.aegis.timeline import Mark, marks_of
from zaya_jax.config import CONFIG_FILE
from zaya_jax.json_files import read_json
from zaya_jax.report.metrics_file import LARGEST_STEP, RunMetrics, read_metrics
from zaya_jax.train.changes import RecordedChange, read_changes

MARKS_OF_A_RUN = CONFIG_FILE, METRICS_FILE, EVENTS_FILE
"""A folder that has none of these files is none of a run."""
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class KeptText:
    """A text that a run has made.

    Attributes:
      step: of the weights that made it.
      text: as the run wrote it.
    """

    step: int
    text: str


@dataclasses.dataclass(frozen=True)
class Origin:
    """Who began a life of a run, where, and with what.

    Attributes:
      began: Unix time.
      step: from which it went on.
      who: user and host.
      devices: how many, of what kind, in how many processes.
      versions: of packages, by name.
    """

    began: float
    step: int
    who: str
    devices: str
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What is known of a run.

    Attributes:
      name: its folder, as it was given.
      metrics: of its steps.
      config: as its file has it; empty where that is not there or damaged.
      changes: of the config, on the way.
      goodput: None before it has begun its steps.
      end: how its last life ended.
      origins: of its lives; several in a row that are alike are one.
      marks: what befell it on the way, with the step.
      texts: that it has made, by step.
      notes: what is missing or damaged, in sentences that name the file.
    """

    name: str
    metrics: RunMetrics
    config: Mapping[str, Any]
    changes: Sequence[RecordedChange]
    goodput: Goodput | None
    end: str
    origins: Sequence[Origin]
    marks: Sequence[Mark]
    texts: Sequence[KeptText]
    notes: Sequence[str]


def read_run(folder: pathlib.Path) -> RunRecord:
    """Reads what there is of a run; a part that is damaged is left out, and named.

    Raises:
      ValueError: for a folder that is no run's.
    """
    if not any((folder / name).is_file() for name in MARKS_OF_A_RUN):
        there = "it has none of" if folder.is_dir() else "there is no such folder with"
        raise ValueError(f"{folder} is not the folder of a run: {there} {', '.join(MARKS_OF_A_RUN)}")
    notes: list[str] = []
    config, changes, goodput = {}, [], None
    with _noting(notes):
        config = read_json(folder / CONFIG_FILE)
    with _noting(notes):
        changes = read_changes(folder)
    events = events_of(folder)
    lives = find_attempts(events)
    if lives:
        goodput = measure(events)
    metrics = read_metrics(folder)
    notes += _notes_on(metrics, folder / METRICS_FILE)
    return RunRecord(
        name=str(folder),
        metrics=metrics,
        config=config,
        changes=changes,
        goodput=goodput,
        end=(lives[-1].end or "going on, or killed") if lives else "not begun",
        origins=_origins_of(events) or _origins_of_checkpoints(folder),
        marks=[mark for mark in marks_of(events, ()) if mark.step and mark.kind != FINISHED],
        texts=_texts_of(folder),
        notes=notes,
    )


@contextlib.contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Goes on without a part that says what is wrong with it: the others are worth a page."""
    try:
        yield
    except ValueError as error:
        notes.append(str(error))


def _notes_on(metrics: RunMetrics, path: pathlib.Path) -> Iterator[str]:
    if not len(metrics.train.steps):
        yield f"{path} has no row of a step yet; a run writes one each train.log_every steps"
    elif metrics.router is None:
        yield f"{path} has no rows of routers; an earlier version began the run"
    if metrics.num_damaged:
        yield f"{path} has {metrics.num_damaged:,} damaged lines, which are left out"


def _origins_of(events: Sequence[Mapping[str, Any]]) -> list[Origin]:
    found: list[Origin] = []
    for event in events:
        if event["event"] == BEGAN and isinstance(event.get("versions"), dict):
            origin = _origin_of(event)
            if not found or _without_time(found[-1]) != _without_time(origin):
                found.append(origin)
    return found


def _origin_of(event: Mapping[str, Any]) -> Origin:
    devices = f"{event.get('devices')} x {event.get('device')}, processes: {event.get('processes')}"
    return Origin(
        began=event["time"],
        step=event["step"] if isinstance(event.get("step"), int) else 0,
        who=f"{event.get('user')} on {event.get('host')}",
        devices=devices,
        versions={str(name): str(version) for name, version in event["versions"].items()},
    )


def _without_time(origin: Origin) -> Origin:
    return dataclasses.replace(origin, began=0.0, step=0)


def _origins_of_checkpoints(folder: pathlib.Path) -> list[Origin]:
    """Of a run that was begun before its events said it: what its oldest checkpoint knows."""
    from zaya_jax.checkpoint import all_steps, read_about  # a second of imports, for old runs alone

    for step in all_steps(folder):
        with contextlib.suppress(ValueError):
            about = read_about(folder, step)
            if about is not None:
                devices = f"devices: {about.num_devices}, processes: {about.num_processes}"
                written = datetime.datetime.fromisoformat(about.written).timestamp()
                return [Origin(written, step, UNKNOWN, devices, about.versions)]
    return []


def _texts_of(folder: pathlib.Path) -> list[KeptText]:
    """The last text of each step."""
    found: dict[int, KeptText] = {}
    for line in lines_of(folder / SAMPLES_FILE):
        values = parse_line(line)
        step, text = values.get("step"), values.get("text")
        if isinstance(step, int) and 0 <= step <= LARGEST_STEP and isinstance(text, str):
            found[step] = KeptText(step, text)
    return [found[step] for step in sorted(found)]
