"""A run of one process that restarts from copies in the memory of its node.

pytest -n 0 -m campaign tests/train/peer_copies
"""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from small_runs import build_small_corpus, small_values

from zaya_jax.checkpoint import all_steps, load_run
from zaya_jax.config import Config
from zaya_jax.run_folder.events import events_of
from zaya_jax.run_folder.names import DAMAGED, RESTORED
from zaya_jax.train.hooks.hook import Hook
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train

pytestmark = pytest.mark.campaign
TIMES = ("tokens_per_second", "model_flops_utilisation")


class Fails(Hook):
    """Ends an attempt at a step, as a bug would."""

    def __init__(self, step: int):
        self._step = step

    def on_step_begin(self, context) -> None:
        if context.step == self._step:
            raise RuntimeError("injected")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    return pathlib.Path(build_small_corpus(tmp_path_factory.mktemp("data") / "corpus").folder)


def config_of(folder: pathlib.Path, corpus: pathlib.Path, **fields) -> Config:
    values = small_values(run_folder=str(folder), corpus=str(corpus))
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    values["ema"], values["watch"] = {"decay": 0.9}, {"checksums": True}
    values["train"] |= {
        "num_steps": 12, "checkpoint_every": 5, "eval_every": 6, "peer_copies_every": 3,
        "peer_copies_folder": str(folder.with_name("memory")),
    } | fields  # fmt: skip
    return Config.from_dict(values)


def attempt(config: Config, step: int) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        train(config, hooks=[Fails(step)])


def rows(folder: pathlib.Path) -> list[dict]:
    both = [*read_metrics(folder, "train"), *read_metrics(folder, "validation")]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in both]


def copies(config: Config) -> list[pathlib.Path]:
    return sorted(pathlib.Path(config.train.peer_copies_folder or "").glob("*/*.copy"))


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(config_of(folder, corpus, peer_copies_every=None))
    return folder


def assert_equal_to(undisturbed: pathlib.Path, folder: pathlib.Path) -> None:
    assert rows(folder) == rows(undisturbed)
    for weights in ("raw", "ema"):
        ours, theirs = (load_run(each, weights=weights).variables for each in (folder, undisturbed))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def restarts(folder: pathlib.Path) -> list[int]:
    return [event["step"] for event in events_of(folder) if event["event"] == RESTORED]


def test_a_restart_reads_the_newest_copies_and_ends_as_if_undisturbed(corpus, undisturbed, tmp_path):
    """Copies of steps 3 and 6 exist; the checkpoint of step 5 is older than the latter."""
    config = config_of(tmp_path / "run", corpus)
    attempt(config, 8)
    assert all_steps(tmp_path / "run") == [5]
    assert len(copies(config)) == 2
    shutil.rmtree(tmp_path / "run/checkpoints")  # nothing could be read there
    train(config)
    assert restarts(tmp_path / "run") == [6]
    (event,) = (each for each in events_of(tmp_path / "run") if each["event"] == RESTORED)
    assert event["bytes_from_storage"] == 0 < event["bytes_from_own_node"]
    assert_equal_to(undisturbed, tmp_path / "run")
    # A run that has ended with its checkpoint frees the memory.
    assert copies(config) == []


def test_damage_falls_back_to_older_copies_and_then_to_the_checkpoint(corpus, undisturbed, tmp_path, capsys):
    folder = tmp_path / "run"
    config = config_of(folder, corpus, checkpoint_every=2)
    attempt(config, 8)
    for checkpoint in (4, 6):
        shutil.rmtree(folder / f"checkpoints/{checkpoint}", ignore_errors=True)
    *_, newest = sorted(copies(config), key=lambda path: int(path.name.split("-")[1]))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    attempt(config, 5)
    assert restarts(folder) == [3]
    assert "step 6, kept by process 0: its checksum differs" in capsys.readouterr().err
    assert [event["step"] for event in events_of(folder) if event["event"] == DAMAGED] == [6]
    for path in copies(config):
        path.write_bytes(path.read_bytes()[:-9])
    shutil.rmtree(folder / "checkpoints/4")
    train(config)
    assert restarts(folder) == [3]
    assert "resuming from the storage" in capsys.readouterr().out
    assert_equal_to(undisturbed, folder)


def test_newer_checkpoints_and_other_runs_are_preferred_to_copies(corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    config = config_of(folder, corpus)
    attempt(config, 5)
    attempt(config_of(folder, corpus, peer_copies_every=None), 8)  # resumes from nothing, and saves step 5
    capsys.readouterr()
    attempt(config, 7)
    assert "checkpoint 5 is newer than the peer copies, which are of 3" in capsys.readouterr().out
    # A changed course makes another state of the same steps.
    changed = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-3))
    with pytest.raises(RuntimeError, match="injected"):
        train(changed, hooks=[Fails(7)], change_course=True)
    assert "they were made with another value of: config" in capsys.readouterr().out
    assert restarts(folder) == []
    # A run that is started again has another name in memory, although its folder is the same.
    name = json.loads((folder / "peer_copies.json").read_text())
    with pytest.raises(RuntimeError, match="injected"):
        train(config, hooks=[Fails(2)], overwrite=True)
    assert json.loads((folder / "peer_copies.json").read_text()) != name
    assert restarts(folder) == []
