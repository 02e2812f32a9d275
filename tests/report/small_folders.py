"""A small made-up run folder whose numbers are all known."""

import json
import pathlib

from zaya_jax.run_folder.names import BEGAN, EVENTS_FILE, FINISHED, METRICS_FILE, ROUTERS_FILE, SAMPLES_FILE
from zaya_jax.train.heartbeats import START, STEP


def train_row(step, loss, phase="early", **values):
    row = {"step": step, "kind": "train", "phase": phase, "loss": loss, "tokens": 100 * step}
    return json.dumps(row | values)


def router_row(step, counts, entropy):
    row = {"step": step, "kind": "router", "counts": counts, "entropy": entropy}
    return json.dumps(row, separators=(",", ":"))


LINES = [
    train_row(10, 4.0, learning_rate=0.5),
    router_row(10, [[30, 10, 0], [0, 20, 20]], [1.0, 0.5]),
    train_row(20, 3.0, learning_rate=0.25),
    '{"step": 20, "kind": "validation", "loss": 3.5, "bits_per_byte": 1.75}',
    train_row(30, 9.0, learning_rate=0.125),  # made again below
    train_row(40, 8.0, learning_rate=0.125),
    train_row(30, 2.5, learning_rate=0.125),
    '{"step": 35, "kind": "tra\ufffd"',
    train_row(40, float("nan"), "late", gradient_norm="1", learning_rate=0.0625),
    router_row(40, [[10, 10, 20], [0, 0, 40]], [0.25, 0.125]),
    train_row(50, 2.0, "late", gradient_norm=7, learning_rate=0.0625),
    '{"step": 50, "kind": "validation", "loss": 2.5, "bits_per_byte": 1.25}',
]
"""Six training rows, of which two are replaced by later ones and one is not a number, and a damaged line."""
CONFIG = {"run_folder": "here", "optimizer": {"learning_rate": 0.5, "name": "muon"}, "phases": []}
BEGIN = {
    "time": 1_000_000_010.0, "event": BEGAN, "step": 0, "seconds": {START: 10.0}, "processes": 4,
    "devices": 32, "user": "ada", "host": "n1", "device": "MI300X",
    "versions": {"jax": "0.10.2", "jaxlib": "0.10.1"},
}  # fmt: skip
END = {"time": 1_000_000_100.0, "event": FINISHED, "step": 50, "seconds": {START: 10.0, STEP: 90.0}}


def write_run(
    folder: pathlib.Path, *, lines=LINES, config=CONFIG, events=(BEGIN, END), texts=()
) -> pathlib.Path:
    """Writes a run folder; parts that are None are missing."""
    folder.mkdir()
    if lines is not None:
        # The last line is incomplete, as while a run is writing it.
        for name, is_router in ((METRICS_FILE, False), (ROUTERS_FILE, True)):
            own = (f"{line}\n" for line in lines if ('"kind":"router"' in line) == is_router)
            (folder / name).write_text("".join(own) + '{"step": 60, "ki')
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder / EVENTS_FILE, events)
    write_lines(folder / SAMPLES_FILE, texts)
    return folder


def write_lines(path: pathlib.Path, rows) -> None:
    """Writes objects as lines of JSON; no file without objects."""
    if rows:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
