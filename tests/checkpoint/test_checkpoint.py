"""What lies on the disk of a run: the newest checkpoint, whole or said to be damaged, and disks that fail."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from small_runs import small_config

import zaya_jax
from zaya_jax import cli
from zaya_jax.checkpoint import Checkpoints, load_run, newest_step
from zaya_jax.model.weights import abstract_variables

# Files of 20 KB are too long: Orbax and TensorStore see an error as that of a full disk.
SAVING = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
import jax.numpy as jnp, numpy as np
from zaya_jax import cli, train_command
from zaya_jax.checkpoint import Checkpoints

def main(_):
    with Checkpoints(sys.argv[1], keep=1) as checkpoints:
        weights = {str(i): jnp.asarray(np.random.default_rng(i).normal(size=10_000)) for i in range(20)}
        checkpoints.save(3, weights=weights, training={"step": np.int32(3)})

train_command.main = main
cli.main(["train"])
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A run with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    config = small_config(run_folder=folder, corpus=folder)
    zeros = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), abstract_variables(config.model)
    )
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, weights=zeros, training={"step": np.int32(step)})
    (folder / "config.json").write_text(config.to_text())
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved, tmp_path / "run")


def in_its_own_process(*arguments: str) -> tuple[int, str, str]:
    """Exit code and both outputs of Python; threads have then said what they have to say."""
    root = pathlib.Path(zaya_jax.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout, done.stderr


def test_the_newest_step_is_what_orbax_finished(copy):
    assert newest_step(copy) == 8
    (copy / "checkpoints/8").rename(copy / "checkpoints/8.orbax-checkpoint-tmp-0")
    (copy / "checkpoints/12").write_text("a file")
    assert newest_step(copy) == 4
    assert load_run(copy).step == 4
    shutil.rmtree(copy / "checkpoints")
    assert newest_step(copy) is None


@pytest.mark.parametrize("lost", ["8/weights/_METADATA", "8/weights", "8/training/_METADATA"])
def test_a_damaged_checkpoint_is_not_passed_over(copy, lost, capsys):
    """Neither by a conversion nor by `generate` nor by a run that would go on from it."""
    path = copy / "checkpoints" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    sentence = f"{copy}/checkpoints/8 is damaged: it has no {'/'.join(lost.split('/')[1:])}"
    sentence = (
        sentence.removesuffix("/_METADATA")
        + "/_METADATA; restore it from a copy, or remove it to take step 4"
    )
    if "weights" in lost:
        for command in (f"convert {copy} {copy}-out", f"convert inspect {copy}", f"generate {copy}"):
            with pytest.raises(SystemExit, match="2"):
                cli.main(command.split())
            assert capsys.readouterr().err == f"zaya: {command.split()[0]}: {sentence}\n"
    else:
        with Checkpoints(copy, keep=2) as checkpoints, pytest.raises(ValueError, match="is damaged") as error:
            checkpoints.has_training(8)
        assert str(error.value) == sentence
    shutil.rmtree(copy / "checkpoints/8")
    assert load_run(copy).step == 4
    shutil.copytree(copy / "checkpoints/4", copy / "checkpoints/8")
    shutil.rmtree(copy / "checkpoints/4")
    (copy / "checkpoints/8/weights/_METADATA").unlink()
    with pytest.raises(ValueError, match="restore it from a copy, there is no older one"):
        load_run(copy)


def test_the_step_that_is_converted_is_said(saved, tmp_path, capsys):
    cli.main(["convert", str(saved), str(tmp_path / "out")])
    assert "values of step 8 in" in capsys.readouterr().out


def test_lost_data_is_one_sentence(copy):
    """TensorStore and Orbax's threads would say it with a hundred lines of tracebacks."""
    shutil.rmtree(copy / "checkpoints/8/weights/d")
    code, out, err = in_its_own_process("-m", "zaya_jax.cli", "generate", str(copy))
    assert (code, out) == (2, "")
    assert err.startswith(f"zaya: generate: {copy}/checkpoints/8 is damaged: ")
    assert err.endswith("; restore it from a copy, or remove it to take step 4\n")
    assert err.count("\n") == 1


def test_a_full_disk_is_one_sentence(tmp_path):
    code, out, err = in_its_own_process("-c", SAVING, str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert err == (
        f"zaya: train: a checkpoint of {tmp_path}/run could not be written: File too large; mend that, and "
        "the same command goes on from the one before\n"
    )
    assert newest_step(tmp_path / "run") is None


def test_a_bug_of_saving_is_no_sentence(tmp_path):
    """What is not of the disk shows where it comes from."""
    with (
        Checkpoints(tmp_path / "run", keep=1) as checkpoints,
        pytest.raises((ValueError, TypeError)) as error,
    ):
        checkpoints.save(1, weights={"a": object()}, training={"step": np.int32(1)})
    assert "could not be written" not in str(error.value)
