"""Contents of a run folder: metrics, config, samples, starts, and time accounting."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.aegis.views.goodput import Goodput, find_attempts, measure
from zaya_jax.aegis.views.timeline import Mark, marks_of
from zaya_jax.config import CONFIG_FILE, use_current_names
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json
from zaya_jax.report.metrics_file import LARGEST_STEP, RunMetrics, read_metrics
from zaya_jax.run_folder.events import events_of, lines_of, parse_line
from zaya_jax.run_folder.names import BEGAN, EVENTS_FILE, FINISHED, METRICS_FILE, SAMPLES_FILE
from zaya_jax.train.consistency.config_changes import RecordedChange, read_changes

RUN_FILES = CONFIG_FILE, METRICS_FILE, EVENTS_FILE
"""A run folder contains at least one of these files."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample of text that a run has generated.

    Attributes:
      step: step of the weights.
      text: generated text.
    """

    step: int
    text: str


@dataclasses.dataclass(frozen=True)
class Origin:
    """A start of a run.

    Attributes:
      began: Unix time in seconds.
      step: step from which training continued.
      who: user and host.
      devices: number and kind of devices, and number of processes.
      versions: versions of packages by name.
    """

    began: float = dataclasses.field(compare=False)
    step: int = dataclasses.field(compare=False)
    who: str
    devices: str
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Contents of a run folder.

    Attributes:
      name: path of the folder as given by the user.
      metrics: metrics of the run.
      config: values of the config file; empty if the file is missing or damaged.
      changes: changes of the config during the run.
      goodput: time accounting; None before the first step.
      end: how the last start ended.
      origins: starts of the run; consecutive identical ones are merged.
      marks: events with their steps.
      texts: samples by step.
      notes: sentences on missing or damaged files.
    """

    name: str
    metrics: RunMetrics
    config: Mapping[str, Any]
    changes: Sequence[RecordedChange]
    goodput: Goodput | None
    end: str
    origins: Sequence[Origin]
    marks: Sequence[Mark]
    texts: Sequence[Sample]
    notes: Sequence[str]


def read_run(folder: pathlib.Path) -> RunRecord:
    """Reads a run folder; damaged parts are omitted and reported in `notes`.

    Raises:
      UserError: if the folder is not a run folder.
    """
    if not any((folder / name).is_file() for name in RUN_FILES):
        reason = "it has none of" if folder.is_dir() else "the folder does not exist; it must contain one of"
        raise UserError(f"{folder} is not a run folder: {reason} {', '.join(RUN_FILES)}")
    notes: list[str] = []
    config, changes, goodput = {}, [], None
    with _noting(notes):
        config = use_current_names(read_json(folder / CONFIG_FILE))
    with _noting(notes):
        # In its own block: a damaged config must not hide the changes.
        changes = read_changes(folder)
    events = events_of(folder)
    attempts = find_attempts(events)
    if attempts:
        goodput = measure(events)
    # Metrics are read even if the config is damaged.
    metrics = read_metrics(folder)
    notes += _notes_on(metrics, folder / METRICS_FILE)
    return RunRecord(
        name=str(folder),
        metrics=metrics,
        config=config,
        changes=changes,
        goodput=goodput,
        # A process that was killed has written no end: its history looks like that of a running one.
        end=(attempts[-1].end or "running or killed") if attempts else "not started",
        origins=_origins_of(events),
        # Events before the first step have no place on the axis of the curves.
        marks=[mark for mark in marks_of(events, ()) if mark.step and mark.kind != FINISHED],
        texts=_texts_of(folder),
        notes=notes,
    )


@contextlib.contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Turns a `UserError` of one part into a note, so that the other parts are still shown."""
    try:
        yield
    except UserError as error:
        notes.append(str(error))


def _notes_on(metrics: RunMetrics, path: pathlib.Path) -> Iterator[str]:
    if not len(metrics.train.steps):
        yield f"{path} has no training row yet; a run writes one every train.log_every steps"
    elif metrics.router is None:
        yield f"{path} has no router rows; the run was started by an earlier version"
    if metrics.num_damaged:
        yield f"{path} has {metrics.num_damaged:,} damaged lines, which are ignored"


def _origins_of(events: Sequence[Mapping[str, Any]]) -> list[Origin]:
    records: list[Origin] = []
    for event in events:
        if event["event"] == BEGAN and isinstance(event.get("versions"), dict):
            origin = _origin_of(event)
            # Restarts on the same hosts with the same versions are one entry.
            if not records or records[-1] != origin:
                records.append(origin)
    return records


def _origin_of(event: Mapping[str, Any]) -> Origin:
    devices = f"{event.get('devices')} x {event.get('device')}, processes: {event.get('processes')}"
    return Origin(
        began=event["time"],
        # Events of other versions, or of a damaged file, may lack the step.
        step=event["step"] if isinstance(event.get("step"), int) else 0,
        who=f"{event.get('user')} on {event.get('host')}",
        devices=devices,
        versions={str(name): str(version) for name, version in event["versions"].items()},
    )


def _texts_of(folder: pathlib.Path) -> list[Sample]:
    """The last sample of each step."""
    records: dict[int, Sample] = {}
    for line in lines_of(folder / SAMPLES_FILE):
        values = parse_line(line)
        step, text = values.get("step"), values.get("text")
        if isinstance(step, int) and 0 <= step <= LARGEST_STEP and isinstance(text, str):
            records[step] = Sample(step, text)
    return [records[step] for step in sorted(records)]
