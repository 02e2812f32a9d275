"""Made-up folders of long runs, with rows as a run writes them."""

import json
import pathlib
import random

from zaya_jax.run_folder.names import BEGAN, EVENTS_FILE, FINISHED, METRICS_FILE, ROUTERS_FILE, SAMPLES_FILE
from zaya_jax.train.heartbeats import COMPILE, START, STEP

GROUPS = ("embedding", "attention", "router", "experts", "scales")
NAMES = (
    "bits_per_byte", "gradient_norm", "load_entropy", "router_entropy", "router_probability", "skipped",
    "learning_rate", "largest_load", "smallest_load", "dead_experts", "logit_bound", "skipped_steps",
    "tokens_per_second", "model_flops_utilisation",
    *(f"{kind}_norm/{group}" for kind in ("gradient", "update") for group in GROUPS),
)  # fmt: skip
"""Metrics in addition to loss and tokens."""


def write_long_run(
    folder: pathlib.Path, *, num_rows: int, num_layers: int, num_experts: int, seed: int = 0
) -> None:
    """Writes a row every ten steps; the loss is between 2 and 4, except for 9 in the middle of the run."""
    numbers = random.Random(seed)
    folder.mkdir(parents=True)
    # Only a few hundred different rows: tests time the reading, not the writing.
    tails = [json.dumps({name: numbers.random() for name in NAMES})[1:] for _ in range(300)]
    routers = [_router_tail(numbers, num_layers, num_experts) for _ in range(30)]
    with (folder / METRICS_FILE).open("w") as file, (folder / ROUTERS_FILE).open("w") as of_routers:
        for n in range(num_rows):
            step, loss = 10 * (n + 1), 9.0 if n == num_rows // 2 else 2 + 2 * numbers.random()
            phase = "late" if 2 * n > num_rows else "early"
            start = f'{{"step": {step}, "kind": "train", "phase": "{phase}", '
            file.write(f'{start}"loss": {loss}, "tokens": {4096 * step}, {tails[n % 300]}\n')
            if n % max(num_rows // 1000, 1) == 0:  # about as many as a run writes
                of_routers.write(f'{{"step":{step},"kind":"router",{routers[n % 30]}\n')
            if n % 100 == 99:
                values = {"step": step, "kind": "validation", "loss": loss, "bits_per_byte": loss / 3}
                file.write(json.dumps(values) + "\n")
    write_end(folder, 10 * num_rows)


def _router_tail(numbers: random.Random, num_layers: int, num_experts: int) -> str:
    counts = [[numbers.randrange(100_000) for _ in range(num_experts + 1)] for _ in range(num_layers)]
    entropy = [round(numbers.random(), 4) for _ in range(num_layers)]
    return json.dumps({"counts": counts, "entropy": entropy}, separators=(",", ":"))[1:]


def write_end(folder: pathlib.Path, step: int) -> None:
    """Writes the events of a finished run, and a sample."""
    began = {
        "time": 1e9, "event": BEGAN, "step": 0, "seconds": {START: 10.0}, "processes": 2, "devices": 16,
        "user": "ada", "host": "n1", "device": "MI300X", "versions": {"jax": "0.10.2"},
    }  # fmt: skip
    ended = {
        "time": 1e9 + 990, "event": FINISHED, "step": step,
        "seconds": {START: 10.0, COMPILE: 40.0, STEP: 900.0},
    }  # fmt: skip
    (folder / EVENTS_FILE).write_text(f"{json.dumps(began)}\n{json.dumps(ended)}\n")
    (folder / SAMPLES_FILE).write_text(json.dumps({"step": step, "text": "def main(): pass"}) + "\n")
