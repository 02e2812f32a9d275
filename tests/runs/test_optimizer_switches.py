"""A run with NorMuon, hyperball and cautious decay: bitwise resume, norms, averages, checksums, a change."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest
from small_runs import build_small_corpus, small_values

from zaya_jax.checkpoint import StoredWeights
from zaya_jax.config import Config
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train

pytestmark = pytest.mark.campaign

STEPS, HALF = 6, 3
DOWN = "params.layers.experts.down_proj"
SWITCHES = {"normuon": True, "hyperball": True, "cautious_decay": True}


def config_of(folder: pathlib.Path, name: str, num_steps: int = STEPS, **optimizer) -> Config:
    values = small_values(run_folder=str(folder / name), corpus=str(folder / "corpus"))
    values["optimizer"] |= (
        {"schedule": "constant", "warmup_steps": 2, "matrix_rate": 5.0} | SWITCHES | optimizer
    )
    values["train"] |= {"num_steps": num_steps, "checkpoint_every": 1, "keep_checkpoints": STEPS}
    return Config.from_dict(values | {"ema": {"decay": 0.9}, "watch": {"checksums": True}})


def continue_from_half(folder: pathlib.Path, name: str) -> None:
    """Copies the run as it was after half of its steps."""
    shutil.copytree(folder / "whole", folder / name)
    for step in range(HALF + 1, STEPS + 1):
        shutil.rmtree(folder / name / f"checkpoints/{step}")
    (folder / name / "config.json").write_text(config_of(folder, name, HALF).to_text())


def weights(folder: pathlib.Path, step: int, kind: str = "raw") -> dict[str, np.ndarray]:
    stored = StoredWeights(folder, kind, step=step)
    return {name: stored.read(name, ()) for name in stored.shapes}


def losses(folder: pathlib.Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder, "train")]


def test_resume_and_change_of_a_run_with_all_switches(tmp_path):
    build_small_corpus(tmp_path / "corpus")
    train(config_of(tmp_path, "whole"))
    continue_from_half(tmp_path, "resumed")
    train(config_of(tmp_path, "resumed"))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    for kind in ("raw", "ema"):
        whole, resumed = (weights(tmp_path / name, STEPS, kind) for name in ("whole", "resumed"))
        for name, x in whole.items():
            np.testing.assert_array_equal(resumed[name], x, err_msg=name)
    first, last = (np.float64(weights(tmp_path / "whole", step)[DOWN]) for step in (1, STEPS))
    norms = [np.linalg.norm(x, axis=(2, 3)) for x in (first, last)]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-6)
    assert np.linalg.norm(last - first) > 1e-2 * np.linalg.norm(first)
    # All but the structure of the state may change.
    continue_from_half(tmp_path, "changed")
    other = config_of(tmp_path, "changed", hyperball=False, cautious_decay=False)
    train(other, change_course=True)
    assert losses(tmp_path / "changed")[:HALF] == losses(tmp_path / "whole")[:HALF]
    assert losses(tmp_path / "changed")[STEPS - 1] != losses(tmp_path / "whole")[STEPS - 1]
    with pytest.raises(ValueError, match=r"optimizer\.normuon is False and was True"):
        train(dataclasses.replace(config_of(tmp_path, "changed", normuon=False)), change_course=True)
