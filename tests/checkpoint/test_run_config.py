"""Runs without their config file, or with damage in a part of a checkpoint that the reader does not need."""

import dataclasses
import json
import logging
import pathlib
import shutil

import jax
import numpy as np
import pytest
from small_runs import prepare_run_folder, small_config

from zaya_jax import cli
from zaya_jax.checkpoint import (
    Checkpoints,
    Retention,
    StepDescription,
    load_run,
    newest_step,
    read_config,
    require_step,
    run_config,
)
from zaya_jax.config import CONFIG_FILE, Config
from zaya_jax.convert.pytorch.in_memory import load_pytorch
from zaya_jax.convert.weight_folder import open_weight_folder
from zaya_jax.errors import UserError
from zaya_jax.model.weights import abstract_variables
from zaya_jax.train.derived_config import find_run_config


def weights_of(step: int, config: Config) -> dict:
    numbers = np.random.default_rng(step)
    return jax.tree.map(
        lambda x: jax.device_put(numbers.normal(size=x.shape).astype(x.dtype)),
        abstract_variables(config.model),
    )


def about_of(step: int, config: Config) -> StepDescription:
    values = json.loads(config.to_text())
    return StepDescription(
        step=step, phase="", config=values, corpora={}, versions={}, num_processes=1, num_devices=1,
        written="2026-11-23T01:02:03+00:00",
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = small_config(run_folder=folder, corpus=folder)
    with Checkpoints(folder, retention=Retention(newest=2)) as checkpoints:
        for step in (4, 8):
            training = {
                "step": np.int32(step),
                "moments": jax.device_put(np.full((64, 64), step, np.float32)),
            }
            weights = weights_of(step, config)
            checkpoints.save(step, weights=weights, training=training, about=about_of(step, config))
    (folder / CONFIG_FILE).write_text(config.to_text())
    return folder


@pytest.fixture
def run(saved, tmp_path) -> pathlib.Path:
    run_config.warn_once.cache_clear()
    return shutil.copytree(saved, tmp_path / "run")


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero(path: pathlib.Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "a flipped bit": lambda training: flip(largest(training)),
    "a zeroed file": lambda training: zero(largest(training)),
    "a truncated file": lambda training: truncate(largest(training)),
    "a missing file": lambda training: largest(training).unlink(),
    "a file too many": lambda training: (training / "more").write_text("x"),
    "no metadata": lambda training: (training / "_METADATA").unlink(),
    "nothing left": lambda training: shutil.rmtree(training),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_of_the_optimizer_state_alone_keeps_the_newest_weights(name, run, caplog):
    DAMAGES[name](run / "checkpoints/8/training")
    assert newest_step(run) == 4  # from which training resumes
    caplog.clear()
    loaded = load_run(run)
    assert loaded.step == require_step(run, weights_only=True) == 8
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, weights_of(8, loaded.config))
    with open_weight_folder(run) as opened:
        assert opened.step == 8
    assert not caplog.records


@pytest.mark.parametrize(
    "what", ["weights", "run.json", "manifest.json", "committed", "_CHECKPOINT_METADATA"]
)
def test_damage_of_the_weights_or_their_hashes_is_reported_and_older_weights_are_used(what, run, caplog):
    path = run / "checkpoints/8" / what
    flip(largest(path) if path.is_dir() else path)
    assert load_run(run).step == 4
    assert f"{run / 'checkpoints/8'} is damaged (" in caplog.text
    assert "using step 4" in caplog.text


LOSSES = {
    "deleted": lambda path: path.unlink(),
    "zeroed": zero,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "other bytes": lambda path: path.write_bytes(bytes(range(256))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_config_is_that_of_the_newest_checkpoint(name, run, caplog):
    path = run / CONFIG_FILE
    expected = Config.from_text(path.read_text())
    LOSSES[name](path)
    assert read_config(run) == load_run(run).config == find_run_config(run) == expected
    with open_weight_folder(run) as opened:
        assert opened.run == expected
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    assert f"using its copy in {run / 'checkpoints/8/run.json'}" in record.getMessage()


@pytest.mark.parametrize("name", LOSSES)
def test_a_resumed_run_writes_its_config_again(name, run):
    path = run / CONFIG_FILE
    config = dataclasses.replace(Config.from_text(path.read_text()), run_folder=str(run))
    LOSSES[name](path)
    prepare_run_folder(config, step=8, overwrite=False)
    assert path.read_text() == config.to_text()
    assert newest_step(run) == 8


def test_an_overwritten_run_is_removed_also_without_its_config(run):
    path = run / CONFIG_FILE
    config = dataclasses.replace(Config.from_text(path.read_text()), run_folder=str(run))
    path.unlink()
    prepare_run_folder(config, overwrite=True)
    assert newest_step(run) is None


def test_a_damaged_record_is_skipped(run, caplog):
    (run / CONFIG_FILE).unlink()
    flip(run / "checkpoints/8/run.json")
    read_config(run)
    assert "checkpoints/4/run.json" in caplog.text


@pytest.mark.parametrize("content", [b"{}x", b'{"model_type": "llama"}'])
def test_a_config_without_any_record_is_an_error(content, run):
    (run / CONFIG_FILE).write_bytes(content)
    for step in (4, 8):
        (run / f"checkpoints/{step}/run.json").unlink()
    with pytest.raises(UserError, match="is not the config of a run"):
        read_config(run)


def test_an_invalid_config_is_not_replaced_by_a_record(run):
    (run / CONFIG_FILE).write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="is not the config of a run"):
        read_config(run)


def test_convert_reads_the_newest_weights_of_a_run_without_config_and_optimizer_state(run, tmp_path):
    shutil.rmtree(run / "checkpoints/8/training")
    (run / CONFIG_FILE).unlink()
    cli.main(["convert", str(run), str(tmp_path / "out"), "--dtype=float32"])
    config = small_config(run_folder=run, corpus=run)
    _, variables = load_pytorch(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, variables, weights_of(8, config))
