"""Synthetic run folders: events, rows of metrics, and a checkpoint."""

import json
import pathlib

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from zaya_jax.aegis.views.exporter import make_registry
from zaya_jax.run_folder.names import AT, BEGAN, EVENTS_FILE, FINISHED, METRICS_FILE, STALLED
from zaya_jax.train.heartbeats import COMPILE, DISPATCH, READ, RESTORE, SAVE, START, STEP


def event(time, kind, step, **values):
    return {"time": float(time), "event": kind, "step": step} | values


KILLED = [
    event(1010, BEGAN, 0, seconds={START: 10}, processes=4, devices=8),
    event(1030, AT, 1, seconds={START: 10, COMPILE: 20}),
    event(1130, AT, 101, seconds={START: 10, COMPILE: 20, STEP: 95, DISPATCH: 5}),
]
"""From 1000 to 1130; 101 steps in 100 seconds."""
STALLED_ATTEMPT = [
    event(1160, BEGAN, 50, seconds={START: 2, RESTORE: 3}, processes=4, devices=8),
    event(
        1260,
        STALLED,
        90,
        seconds={START: 2, RESTORE: 3, COMPILE: 10, STEP: 84, READ: 6},
        section=STEP,
        still=44,
        reason="process 0 is stalled",
        late="late: process 3",
    ),
]
"""From 1155 to 1260; 40 steps in 40 seconds."""
FINAL = [
    event(1300, BEGAN, 80, seconds={START: 5}, processes=4, devices=8),
    event(1350, FINISHED, 100, seconds={START: 5, COMPILE: 10, STEP: 20, SAVE: 18}),
]
"""From 1295 to 1350, of which 2 seconds are in no section."""
DISTURBED = KILLED + STALLED_ATTEMPT + FINAL
ROW = {
    "step": 100,
    "kind": "train",
    "loss": 2.5,
    "bits_per_byte": 1.25,
    "learning_rate": 3e-4,
    "tokens": 819200,
    "tokens_per_second": 12422.2,
    "model_flops_utilisation": 0.41,
    "gradient_norm": 0.11,
    "skipped_steps": 2.0,
    "dead_experts": 1.0,
    "largest_load": 2.7,
    "smallest_load": 0.0,
    "epochs//data/c": 0.8,
}
"""Of a step, as a run writes it."""
HELD_OUT = {"step": 80, "kind": "validation", "loss": 2.75, "bits_per_byte": 1.375}


def write_lines(path: pathlib.Path, rows) -> None:
    """Appends objects as lines of JSON to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_events(folder: pathlib.Path, events=DISTURBED) -> None:
    """Writes events with given times."""
    write_lines(folder / EVENTS_FILE, events)


def write_rows(folder: pathlib.Path, rows=(HELD_OUT, ROW)) -> None:
    """Writes rows of metrics."""
    write_lines(folder / METRICS_FILE, rows)


def parse(text):
    """Returns samples by name and labels, without the label of the run."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "run")): sample.value
        for family in families
        for sample in family.samples
    }


def exported(*folders):
    """Returns the metrics of runs, parsed by Prometheus' own parser."""
    return parse(generate_latest(make_registry(folders)).decode())
