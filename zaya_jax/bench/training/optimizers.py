"""`zaya bench optimizers`: the loss curve of Muon with AdamW, next to that of AdamW alone."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from zaya_jax.config import Config
from zaya_jax.options import DEFAULT_CONFIG, Parser, load_config
from zaya_jax.text_tables import number_column
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train

ADAMW_RATES = (3e-3, 6e-3, 1.2e-2)
"""Learning rates of AdamW alone, of which the best counts; Muon uses the rate of its config."""
NUM_POINTS = 12


NUM_STEPS, BATCH_SIZE = 120, 8
"""Steps of each run, a multiple of `NUM_POINTS`, and sequences per step."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench optimizers`, which has no options but `--help`."""
    parser = Parser(
        "bench optimizers",
        f"Train configs/tiny.py for {NUM_STEPS} steps with Muon, and with AdamW alone at rates of "
        f"{', '.join(map(str, ADAMW_RATES))}; print their held-out bits per byte.",
        ("zaya bench optimizers",),
    )
    parser.parse_args(argv)
    run()


def run() -> None:
    """Trains a shorter configs/tiny.py with each optimizer, and prints held-out bits per byte."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = _shortened(load_config(DEFAULT_CONFIG, []))
        muon = _curve(tiny, pathlib.Path(folder, "muon"))
        adamw = {
            rate: _curve(_by_adamw(tiny, rate), pathlib.Path(folder, f"adamw_{rate}")) for rate in ADAMW_RATES
        }
    # AdamW gets the best of several rates, so that a badly chosen one does not favor Muon.
    best = min(adamw, key=lambda rate: adamw[rate][NUM_STEPS])
    columns = ("step", "Muon and AdamW", *(f"AdamW,\nrate {rate:g}" for rate in adamw))
    table = Table(*map(number_column, columns))
    for step, value in muon.items():
        table.add_row(f"{step}", f"{value:.4f}", *(f"{curve[step]:.4f}" for curve in adamw.values()))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    goal = adamw[best][NUM_STEPS]
    # The first evaluation at which Muon is at least as good as AdamW at its end.
    reached = next((step for step, value in muon.items() if value <= goal), None)
    console.print(
        f"AdamW at its best rate, {best:g}, reaches {goal:.4f} bits/byte after {NUM_STEPS} steps; Muon with "
        + (f"AdamW after {reached}, {NUM_STEPS - reached} fewer" if reached else "AdamW does not reach it")
    )


def _shortened(config: Config) -> Config:
    every = NUM_STEPS // NUM_POINTS
    train_config = dataclasses.replace(
        config.train,
        num_steps=NUM_STEPS,
        eval_every=every,
        eval_sequences=64,
        sample_tokens=0,
        log_every=every,
    )
    data = dataclasses.replace(config.data, batch_size=BATCH_SIZE)
    return dataclasses.replace(config, train=train_config, data=data)


def _by_adamw(config: Config, rate: float) -> Config:
    # The schedule decays by the same factor at every rate.
    optimizer = dataclasses.replace(
        config.optimizer, name="adamw", learning_rate=rate, final_learning_rate=rate / 20
    )
    return dataclasses.replace(config, optimizer=optimizer)


def _curve(config: Config, folder: pathlib.Path) -> dict[int, float]:
    """Held-out bits per byte by step."""
    train(dataclasses.replace(config, run_folder=str(folder)))
    return {int(row["step"]): row["bits_per_byte"] for row in read_metrics(folder, "validation")}
