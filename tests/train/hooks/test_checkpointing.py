"""When a run saves its state, and which checkpoints it keeps."""

import dataclasses
import json

import pytest
from small_runs import small_config, small_values

from zaya_jax.checkpoint import Retention
from zaya_jax.config import Config, TrainConfig
from zaya_jax.run_folder.names import METRICS_FILE
from zaya_jax.train.hooks.checkpointing import SaveSchedule, is_save_due, retention_of
from zaya_jax.train.metrics.files import held_out_losses


@pytest.mark.parametrize(
    ("minutes", "step", "seconds", "due"),
    [
        (None, 499, 1e9, False),
        (None, 500, 0.0, True),
        (10.0, 499, 599.0, False),
        (10.0, 499, 600.0, True),
        (10.0, 1000, 0.0, True),
    ],
)
def test_a_save_is_due_by_steps_or_minutes(minutes, step, seconds, due):
    config = TrainConfig(checkpoint_every=500, checkpoint_minutes=minutes)
    assert is_save_due(config, step, seconds=seconds) is due


def test_minutes_count_from_the_start_of_the_last_save(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = SaveSchedule(TrainConfig(checkpoint_minutes=1.0))
    now = 59.0
    assert not clock.is_due(3)
    now = 61.0
    assert clock.is_due(3)
    clock.restart()
    assert not clock.is_due(3)
    now = 122.0
    assert clock.is_due(3)


def test_retention_follows_the_config(tmp_path):
    config = small_config(run_folder=tmp_path, corpus=tmp_path)
    assert retention_of(config) == Retention(newest=2)
    train = dataclasses.replace(
        config.train, keep_checkpoints=3, keep_every=8, keep_best=True, min_free_gib=0.5
    )
    assert retention_of(dataclasses.replace(config, train=train)) == Retention(
        newest=3, every=8, best=True, min_free_bytes=2**29
    )


def test_the_ends_of_phases_are_kept():
    values = small_values(run_folder="unused", corpus="unused")
    del values["train"]["num_steps"]
    phases = [{"name": "a", "steps": 10}, {"name": "b", "steps": 7}]
    assert retention_of(Config.from_dict(values | {"phases": phases})).phase_ends == {10, 17}


def test_held_out_losses_are_read_from_the_metrics_file(tmp_path):
    assert held_out_losses(tmp_path) == {}
    rows = [
        {"step": step, "kind": kind, "loss": 5.0 - step}
        for step in (1, 2)
        for kind in ("train", "validation")
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + '\n{"step": 3, "kind": "valid')
    assert held_out_losses(tmp_path) == {1: 4.0, 2: 3.0}
