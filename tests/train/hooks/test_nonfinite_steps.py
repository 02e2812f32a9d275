"""Skipped steps do not shift the schedule, and too many of them in a row end a run.

In batches without targets only weight decay changes a weight, by rate x decay x weight, so the logged update
norms show which rate was applied.
"""

import contextlib
import dataclasses
import itertools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import build_small_corpus, small_values

from zaya_jax.checkpoint import Checkpoints
from zaya_jax.checkpoint import newest_step as newest_checkpoint
from zaya_jax.config import Config, OptimizerConfig
from zaya_jax.model.weights import declare
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.partition import make_partition
from zaya_jax.train import setup, trainer
from zaya_jax.train.hooks.nonfinite_steps import SkipCounter
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.step.norms import GROUPS
from zaya_jax.train.step.state import init_state, make_setup
from zaya_jax.train.step.train_step import Metrics

# Of the run, of which the newest jax has others.
pytestmark = pytest.mark.slow

PEAK, FINAL, DECAY = 0.1, 0.02, 0.5
SKIPPED = (3, 4, 12, 13, 20, 21)
"""Two steps of the warm-up, two around the border of the phases, two of the decay."""
RATES = [
    *(PEAK * n / 5 for n in range(1, 6)),  # warm-up
    *([PEAK] * 7),
    *([PEAK] * 6),  # the second phase
    *(PEAK + (FINAL - PEAK) * n / 6 for n in range(1, 7)),
]
"""Of all 24 steps, by hand."""


def config_of(folder, **train):
    values = small_values(run_folder=str(folder / "run"), corpus=str(folder / "corpus"))
    values["train"] |= train
    del values["train"]["num_steps"]
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    values["optimizer"] = {
        "name": "adamw", "learning_rate": PEAK, "final_learning_rate": FINAL, "weight_decay": DECAY,
        "schedule": "constant", "warmup_steps": 5,
    }  # fmt: skip
    values["phases"] = (
        {"name": "first", "steps": 12},
        {
            "name": "second",
            "steps": 12,
            "optimizer": {"schedule": "warmup_stable_decay", "decay_steps": 6, "warmup_steps": 0},
        },
    )
    return Config.from_dict(values)


@contextlib.contextmanager
def skipping(steps):
    """Replaces the batches of these steps by batches with NaN weights."""
    given, counted = setup.training_batches, itertools.count(1)

    def batches(*arguments, **values):
        for batch in given(*arguments, **values):
            weights_BT = np.zeros_like(batch.weights_BT)
            if next(counted) in steps:
                weights_BT[1, 2] = math.nan
            yield dataclasses.replace(batch, weights_BT=weights_BT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "training_batches", batches)
        yield


@contextlib.contextmanager
def watching_the_disk(run_folder):
    """Yields a list of saves: step, and bytes of the metric files in total and on disk."""
    synced, actual = {}, []
    fsync, save = os.fsync, Checkpoints.save

    def note_fsync(descriptor):
        fsync(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def note_save(self, step, **items):
        files = [run_folder / "metrics.jsonl", *(run_folder / "tensorboard").iterdir()]
        written = {str(file): file.stat().st_size for file in files}
        actual.append((step, written, {name: synced.get(name) for name in written}))
        save(self, step, **items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note_fsync)
        patch.setattr(Checkpoints, "save", note_save)
        yield actual


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of the corpus and the run."""
    folder = tmp_path_factory.mktemp("skipped")
    build_small_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """Returns the run's config, its metrics, and the files at its saves."""
    config = config_of(folder)
    with skipping(SKIPPED), watching_the_disk(folder.resolve() / "run") as saves:
        trainer.train(config)
    return config, read_metrics(config.run_folder, "train"), saves


def test_the_steps_were_skipped(run):
    _, rows, _ = run
    assert np.diff([row["skipped_steps"] for row in rows], prepend=0).nonzero()[0].tolist() == [
        step - 1 for step in SKIPPED
    ]


def test_the_applied_rate_is_the_logged_one_in_every_step(run):
    config, rows, _ = run
    table = init_state(config, make_setup(config.phase_at(1).config)).params["embedding"]["table"]
    norm = float(jnp.linalg.norm(table))
    for step, (row, rate) in enumerate(zip(rows, RATES, strict=True), start=1):
        assert row["learning_rate"] == pytest.approx(rate, rel=1e-6)
        applied = row["update_norm/embedding"] / (DECAY * norm)
        assert applied == pytest.approx(0 if step in SKIPPED else rate, rel=1e-4)
        norm *= 1 - DECAY * applied
    assert rows[-1]["learning_rate"] == pytest.approx(FINAL, rel=1e-6)


def test_metrics_are_on_the_disk_before_a_step_is_saved(run):
    _, _, saves = run
    assert [step for step, *_ in saves] == [4, 8, 12, 16, 20, 24]
    for _, written, synced in saves:
        assert len(written) == 2
        assert synced == written


@pytest.mark.parametrize(
    ("skipped", "log_every", "steps", "newest_step"),
    [
        # Two in a row are allowed. Step 12 is not skipped, but checked because its phase ends.
        ((2, 6, 7, 9, 10, 11), 5, "9 to 11", 8),
        ((5, 6, 7), 100, "5 to 7", 4),  # seen before step 8 is saved
        ((1, 2, 3), 3, "1 to 3", None),
    ],
)
def test_too_many_in_a_row_end_a_run(folder, tmp_path, skipped, log_every, steps, newest_step):
    config = config_of(folder, log_every=log_every, max_consecutive_skips=3)
    config = dataclasses.replace(config, run_folder=str(tmp_path / "run"))
    with skipping(skipped), pytest.raises(ValueError, match="in a row") as error:
        trainer.train(config)
    output, _, way_out = str(error.value).partition("; ")
    assert output == (
        f"steps {steps}, 3 in a row, were skipped, the last because the loss and the gradient of "
        f"{', '.join(sorted(GROUPS))} were NaN or infinite"
    )
    if newest_step is None:
        assert way_out.startswith(
            "the run has no checkpoint yet: start from scratch (--overwrite) with a smaller"
        )
    else:
        assert way_out.startswith(f"the newest checkpoint is of step {newest_step}: start a run from its")
        assert f"--config.train.init_from={config.run_folder} " in way_out
    assert newest_checkpoint(config.run_folder) == newest_step


def test_a_streak_is_detected_across_checks():
    """Two steps before the first check and one after it; the last has one non-finite gradient group."""
    counter = SkipCounter(3, 7)
    for step, count in ((11, 8), (12, 9)):
        assert counter.add(step, metrics_of(count), count) is None
    streak = counter.add(13, metrics_of(10, router=math.inf), 10)
    assert (streak.first, streak.last, streak.not_finite) == (11, 13, "the gradient of router was")
    assert counter.add(14, metrics_of(10), 10) is None


def test_a_finite_step_resets_the_count():
    counter = SkipCounter(2, 0)
    for step, count in enumerate((1, 1, 2, 2, 3, 3), start=1):
        assert counter.add(step, metrics_of(count), count) is None


def test_a_step_that_a_rollback_skips_does_not_count():
    counter = SkipCounter(2, 0)
    assert counter.add(1, metrics_of(1), 1) is None
    assert counter.add(2, metrics_of(2), 2, is_ordered=True) is None
    assert counter.add(3, metrics_of(3), 3).first == 2


def metrics_of(skipped_steps, **norms):
    """Metrics of ones, except for the count and some norms."""
    one = jnp.ones(())
    fields = {field.name: one for field in dataclasses.fields(Metrics)} | {
        "gradient_norms": {"embedding": one, "router": one} | jax.tree.map(jnp.asarray, norms),
        "update_norms": {},
        "preferences": {},
        "router_counts_LX": jnp.ones((1, 1), jnp.int32),
        "router_entropy_L": jnp.ones(1),
        "router_probability_L": jnp.ones(1),
        "skipped_steps": jnp.asarray(skipped_steps),
        "mismatches": None,
        "data_checksum": None,
    }
    return Metrics(**fields)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_bias_corrections_follow_the_updates_that_were_made(name):
    """At a constant rate, updates at steps 1 and 9 of a run equal those at steps 1 and 2."""
    config = config_of_model()
    partition = make_partition(declare(config), 1, by_matrix=name == "muon")
    optimizer = make_optimizer(
        OptimizerConfig(name=name, newton_schulz_steps=1), partition, lambda step: 1e-3 + 0 * step
    )
    buckets = {bucket.name: jnp.ones(bucket.shape) for bucket in partition.buckets}
    gradients = {bucket.name: jnp.full(bucket.shape, 1e-3) for bucket in partition.buckets}
    seconds, update = [], jax.jit(optimizer.update)
    for step in (1, 8):
        _, state = update(gradients, optimizer.init(buckets), buckets, step=0)
        updates, _ = update(gradients, state, buckets, step=step)
        seconds.append(updates)
    for bucket in partition.buckets:
        np.testing.assert_array_equal(seconds[0][bucket.name], seconds[1][bucket.name])


def config_of_model():
    return Config.from_dict(small_values(run_folder="unused", corpus="unused")).model
