"""The loss curve of a shortened configs/tiny.py, compared with a recorded one.

`python tests/test_golden_loss.py --regenerate` rewrites tests/golden/tiny_loss.json.

A change that computes the same has the same curve. The tolerance allows for another CPU or jax, which sum
float32 numbers in another order, a relative 1e-7 per operation; twenty steps of training amplify that by some
hundreds. A real change of model, data or optimizer moves the curve by percents. In the first steps the curve
is nearly that of an untrained model, so the last losses are the most sensitive.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile

import pytest
from small_runs import build_small_corpus

from zaya_jax.config import Config
from zaya_jax.options import load_config
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden" / "tiny_loss.json"
NUM_STEPS = 20
BATCH_SIZE = 2
RELATIVE_TOLERANCE = 1e-3


def _short_config(folder: pathlib.Path) -> Config:
    """The preset on bytes, with a smaller batch, fewer steps and a schedule that ends with them."""
    tiny = load_config("configs/tiny.py", [])
    return dataclasses.replace(
        tiny,
        run_folder=str(folder / "run"),
        data=dataclasses.replace(
            tiny.data,
            corpus=str(folder / "corpus"),
            source=None,
            tokenizer="byte",
            tokenizer_vocab_size=None,
            batch_size=BATCH_SIZE,
        ),
        optimizer=dataclasses.replace(
            tiny.optimizer, warmup_steps=min(tiny.optimizer.warmup_steps, NUM_STEPS // 2)
        ),
        train=dataclasses.replace(tiny.train, num_steps=NUM_STEPS, log_every=1, eval_sequences=BATCH_SIZE),
        execution=dataclasses.replace(tiny.execution, num_microbatches=1),
    )


def loss_curve(folder: pathlib.Path) -> list[float]:
    """Training losses of all steps, and the held-out loss at the end."""
    build_small_corpus(folder / "corpus")
    config = _short_config(folder)
    train(config)
    rows = read_metrics(config.run_folder, "train") + read_metrics(config.run_folder, "validation")
    return [row["loss"] for row in rows]


@pytest.mark.slow
def test_the_loss_curve_is_the_recorded_one(tmp_path):
    recorded = json.loads(GOLDEN.read_text())
    assert len(recorded) == NUM_STEPS + 1
    assert loss_curve(tmp_path) == pytest.approx(recorded, rel=RELATIVE_TOLERANCE), (
        "if this is meant: python tests/test_golden_loss.py --regenerate"
    )


def regenerate() -> None:
    """Writes the curve of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        curve = loss_curve(pathlib.Path(folder))
    GOLDEN.write_text(json.dumps([round(loss, 6) for loss in curve], indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--regenerate"]:
        sys.exit("usage: python tests/test_golden_loss.py --regenerate")
    regenerate()
