# ruff: noqa: E501 (the tables of run folders have a line each)
"""Hostile run folders: each reader reports one message, at once."""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from small_runs import commit_folder, small_config

from zaya_jax import cli
from zaya_jax.checkpoint import Checkpoints, Retention, StoredWeights, check_init_from, load_run, newest_step
from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.model.weights import abstract_variables

pytestmark = pytest.mark.timeout(60)  # reading a pipe would block forever
WEIGHTS = "checkpoints/8/weights"
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = small_config(run_folder=folder, corpus=folder)
    zeros = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), abstract_variables(config.model)
    )
    with Checkpoints(folder, retention=Retention(newest=1)) as checkpoints:
        checkpoints.save(8, weights=zeros, training={"step": np.int32(8)})
    (folder / "config.json").write_text(config.to_text())
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved, tmp_path / "run")


@dataclasses.dataclass(frozen=True)
class Hostile:
    """A change of a run folder, and the expected message."""

    name: str
    change: Callable[[pathlib.Path], Any]
    says: str


def text(file: str, content: str | bytes) -> Callable[[pathlib.Path], Any]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda run: (run / file).write_bytes(raw)


def pipe(file: str) -> Callable[[pathlib.Path], None]:
    def change(run: pathlib.Path) -> None:
        (run / file).unlink()
        os.mkfifo(run / file)

    return change


def model(**values: Any) -> Callable[[pathlib.Path], None]:
    def change(run: pathlib.Path) -> None:
        config = json.loads((run / "config.json").read_text())
        config["model"] |= values
        (run / "config.json").write_text(json.dumps(config))

    return change


def forged(change: Callable[[pathlib.Path], Any]) -> Callable[[pathlib.Path], None]:
    """Recomputes the hashes, which must not be the only protection."""

    def edit(run: pathlib.Path) -> None:
        change(run)
        commit_folder(run / "checkpoints/8", 8)

    return edit


CONFIGS = (
    Hostile("a list", text("config.json", "[1]"), "it holds a list; it must be a JSON object"),
    Hostile("a number", text("config.json", "3"), "it holds a int; it must be a JSON object"),
    Hostile("nested", text("config.json", DEEP), "it is nested too deeply"),
    Hostile("binary", text("config.json", b"\xff\0"), "'utf-8' codec can't decode"),
    Hostile("long", lambda run: os.truncate(run / "config.json", 2**40), "config.json has 1,099,511,627,776 bytes"),
    Hostile("a pipe", pipe("config.json"), "is not a run folder: it has no config.json"),
)  # fmt: skip
STEPS = (
    Hostile("another width", model(hidden_size=64), "by the run's config.json, and the checkpoint has shape ("),
    Hostile("no end of layers", model(num_hidden_layers=10**9), "has shape (1000000000, "),
    Hostile("metadata a list", forged(text(f"{WEIGHTS}/_METADATA", "[1]")), "_METADATA holds a list; it must be a JSON object"),
    Hostile("metadata nested", forged(text(f"{WEIGHTS}/_METADATA", DEEP)), "nested too deeply"),
    Hostile("metadata without keys", forged(text(f"{WEIGHTS}/_METADATA", '{"tree_metadata": {"x": 3}}')), "_METADATA has no valid tree_metadata; it was not written by Orbax"),
    Hostile("no index of arrays", forged(text(f"{WEIGHTS}/manifest.ocdbt", b"\xff" * 300)), "cannot be opened"),
    Hostile("a pipe for data", pipe(f"{WEIGHTS}/_METADATA"), "weights/_METADATA is neither a file nor a folder; no checkpoint is"),
    Hostile("a pipe for a manifest", pipe("checkpoints/8/manifest.json"), "manifest.json is neither a file nor a folder"),
)  # fmt: skip


@pytest.mark.parametrize("hostile", CONFIGS + STEPS, ids=lambda hostile: hostile.name.replace(" ", "_"))
def test_generating_reports_one_message(hostile, copy):
    hostile.change(copy)
    with pytest.raises(ValueError, match="run") as error:
        load_run(copy)
    assert hostile.says in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert isinstance(error.value, UserError)


@pytest.mark.parametrize("hostile", CONFIGS, ids=lambda hostile: hostile.name.replace(" ", "_"))
def test_starting_from_its_weights_reports_one_message(hostile, copy, tmp_path):
    hostile.change(copy)
    with pytest.raises(ValueError, match="run") as error:
        check_init_from(str(copy), small_config(run_folder=tmp_path, corpus=tmp_path).model)
    assert hostile.says in str(error.value)
    assert isinstance(error.value, UserError)


@pytest.mark.parametrize(
    "tree", ['{"x": 3}', '{"x": {"key_metadata": 5}}', "[]", '{"x": {"key_metadata": [7]}}']
)
def test_metadata_that_names_no_weights(copy, tree):
    forged(text(f"{WEIGHTS}/_METADATA", f'{{"tree_metadata": {tree}}}'))(copy)
    with pytest.raises(ValueError, match="_METADATA has no valid tree_metadata; it was not written by Orbax"):
        StoredWeights(copy)


def test_a_run_config_given_as_config_file_is_not_trusted(copy, capsys):
    (copy / "config.json").write_text(DEEP)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["train", f"--config={copy}/config.json", "--dry-run"])
    assert leaving.value.code == 2
    assert "config.json is not the config of a run: it is nested too deeply" in capsys.readouterr().err


def test_names_that_are_not_steps_are_ignored(copy):
    for name in ("9" * 20, str(2**31), "²"):
        (copy / "checkpoints" / name).mkdir()
    assert newest_step(copy) == 8


def test_the_unchanged_run_is_read(copy):
    """Otherwise the tables above would prove nothing."""
    assert load_run(copy).step == 8
    assert Config.from_text((copy / "config.json").read_text()) == load_run(copy).config
