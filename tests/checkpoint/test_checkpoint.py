"""Checkpoints on disk: the newest intact one, damage, and failing disks."""

import asyncio
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1 as orbax_v1
from small_runs import small_config

import zaya_jax
from zaya_jax import cli
from zaya_jax.checkpoint import Checkpoints, Retention, load_run, newest_step, run_lock, set_aside_later
from zaya_jax.checkpoint.steps import StepWriter, _remove_share
from zaya_jax.checkpoint.storage_errors import silence_threads
from zaya_jax.files import durable
from zaya_jax.model.weights import abstract_variables
from zaya_jax.parallel.processes import hosts

# Files of 20 KB are too long: Orbax and TensorStore see an error like that of a full disk.
SAVING = """
import resource, sys
sys.dont_write_bytecode = True  # it would be cut off, and read by the next process
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
import jax.numpy as jnp, numpy as np
from zaya_jax import cli
from zaya_jax.commands import train as train_command
from zaya_jax.checkpoint import Checkpoints, Retention

def main(_):
    with Checkpoints(sys.argv[1], retention=Retention(newest=1)) as checkpoints:
        weights = {str(i): jnp.asarray(np.random.default_rng(i).normal(size=10_000)) for i in range(20)}
        checkpoints.save(3, weights=weights, training={"step": np.int32(3)})

train_command.main = main
cli.main(["train"])
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """Writes a run with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    save_steps(folder)
    return folder


def save_steps(folder: pathlib.Path) -> None:
    """Saves zeros as steps 4 and 8 of a run."""
    config = small_config(run_folder=folder, corpus=folder)
    zeros = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), abstract_variables(config.model)
    )
    with Checkpoints(folder, retention=Retention(newest=2)) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, weights=zeros, training={"step": np.int32(step)})
    (folder / "config.json").write_text(config.to_text())


@pytest.fixture
def copy(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved, tmp_path / "run")


def in_its_own_process(*arguments: str) -> tuple[int, str, str]:
    """Returns exit code and both outputs of a Python process, including those of its threads."""
    root = pathlib.Path(zaya_jax.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout, done.stderr


def test_the_newest_step_is_a_committed_one(copy):
    assert newest_step(copy) == 8
    (copy / "checkpoints/8").rename(copy / "checkpoints/.8.0123.partial")
    (copy / "checkpoints/12").write_text("a file")
    for name in ("1e3", "-3", "099", "9" * 20, "١٢"):
        (copy / "checkpoints" / name).mkdir()
    assert newest_step(copy) == 4
    assert load_run(copy).step == 4
    shutil.rmtree(copy / "checkpoints")
    assert newest_step(copy) is None


@pytest.mark.parametrize("lost", ["weights/_METADATA", "weights", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(copy, lost, caplog):
    path = copy / "checkpoints/8" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert load_run(copy).step == 4
    assert f"{copy}/checkpoints/8 is damaged (" in caplog.text
    assert "is missing); using step 4" in caplog.text
    (copy / "checkpoints/4/weights/_METADATA").unlink()
    with pytest.raises(ValueError, match=r"8 is damaged: .*4 is damaged: .* is missing; no checkpoint is"):
        load_run(copy)


def test_damaged_steps_are_renamed(copy):
    """The run can then write those steps again, also if the new names already exist."""
    for _ in range(2):
        (copy / "checkpoints/8/weights/_METADATA").unlink()
        set_aside_later(copy, newest_step(copy))
        assert newest_step(copy) == 4
        shutil.copytree(copy / "checkpoints/4", copy / "checkpoints/8")
    names = {path.name for path in (copy / "checkpoints").iterdir()}
    assert names == {"4", "8", "8.damaged", "8.damaged.2"}


def test_a_notebook_with_a_running_event_loop_saves_and_reads(tmp_path):
    """Its cells run within asyncio."""

    async def cell():
        save_steps(tmp_path / "run")
        return load_run(tmp_path / "run")

    run = asyncio.run(cell())
    assert newest_step(tmp_path / "run") == 8
    assert not any(np.any(x) for x in jax.tree.leaves(run.variables))


def wait_until_failed(checkpoints):
    deadline = time.monotonic() + 10
    while not checkpoints.has_failed():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failed_save_is_reported_before_the_next(tmp_path, monkeypatch):
    """A later save succeeds."""

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    state = {"weights": {"a": jnp.ones(3)}, "training": {"step": np.int32(1)}}
    with Checkpoints(tmp_path, retention=Retention(newest=2)) as checkpoints:
        assert not checkpoints.has_failed()
        with monkeypatch.context() as patch:
            patch.setattr(durable, "publish", fail)
            checkpoints.save(1, **state)
            wait_until_failed(checkpoints)
            with pytest.raises(ValueError, match=r"could not be written: .*Input/output error"):
                checkpoints.wait()
        assert not checkpoints.has_failed()  # reported once
        checkpoints.save(2, **state)
    assert newest_step(tmp_path) == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


@pytest.mark.parametrize(("own", "others"), [(0.2, 0.0), (0.0, 1.0)])
def test_waits_for_other_processes_do_not_count_as_its_own(tmp_path, monkeypatch, own, others):
    """The wait for a save counts as far as the files of this process took it."""
    gather, finish = hosts.gather_to_first, StepWriter.finish
    monkeypatch.setattr(hosts, "gather_to_first", lambda *a, **k: (time.sleep(others), gather(*a, **k))[1])
    monkeypatch.setattr(StepWriter, "finish", lambda writer: (time.sleep(own), finish(writer))[1])
    with Checkpoints(tmp_path, retention=Retention(newest=1)) as checkpoints:
        start = time.monotonic()
        checkpoints.save(1, weights={"w": np.zeros(3)}, training={"step": np.int32(1)})
        copying = checkpoints.blocking_seconds
        assert 0 < copying < time.monotonic() - start
        checkpoints.wait()
        waited = checkpoints.blocking_seconds - copying
    assert time.monotonic() - start > own + others
    assert waited >= own if own else waited < others


def test_a_process_checks_only_its_own_files(tmp_path):
    """Other processes are still writing: a file of theirs that disappears is not a failure of this one."""
    writing = StepWriter(tmp_path / "aside", 1, None)
    arrays = {"weights": {"a": jnp.ones(3)}, "training": {"step": np.int32(1)}}
    writing.begin({item: ocp.args.StandardSave(values) for item, values in arrays.items()})
    os.mkfifo(tmp_path / "aside/training/of_another")  # reading it would block forever
    own = writing.finish()
    assert {name.split("/")[1] for name in own} == {"ocdbt.process_0", "array_metadatas"}
    assert "weights/array_metadatas/process_0" in own


def test_process_0_reads_and_syncs_no_folder_of_another_process(tmp_path, monkeypatch):
    """With thousands of processes, that would take it minutes on a shared file system."""
    folder = tmp_path / "aside/weights/ocdbt.process_1"
    writing = StepWriter(tmp_path / "aside", 1, None)
    writing.begin({"weights": ocp.args.StandardSave({"a": jnp.ones(3)})})
    described = [writing.finish(), {"weights/ocdbt.process_1/d": {"bytes": 1, "xxh3_128": "of process 1"}}]
    writing.merge(described)
    folder.mkdir()
    os.mkfifo(folder / "d")  # reading it would block forever
    synced = []
    monkeypatch.setattr(durable, "sync", lambda path: synced.append(pathlib.Path(path)))
    writing.commit(described)
    writing.publish(tmp_path / "1")
    listed = json.loads((tmp_path / "1/manifest.json").read_text())["files"]
    assert listed["weights/ocdbt.process_1/d"]["xxh3_128"] == "of process 1"
    assert tmp_path / "aside/weights" in synced
    assert not any("ocdbt.process_" in str(path) for path in synced)


def test_processes_share_the_removal_of_an_old_step(tmp_path, monkeypatch):
    """The step was written by more processes than there are now."""
    for item in ("weights", "training"):
        for process in range(5):
            (tmp_path / f"{item}/ocdbt.process_{process}/d").mkdir(parents=True)
        (tmp_path / item / "ocdbt.process_of_another_version").mkdir()
    monkeypatch.setattr(hosts, "num_processes", lambda: 2)
    left = []
    for process in (1, 0):
        monkeypatch.setattr(hosts, "process", lambda process=process: process)
        _remove_share(tmp_path)
        left.append(sorted(path.name[14:] for path in tmp_path.glob("training/*")))
    assert left == [["0", "2", "4", "of_another_version"], ["of_another_version"]]
    assert [*tmp_path.glob("weights/*")] == [tmp_path / "weights/ocdbt.process_of_another_version"]


# Orbax reads the arrays with their stored sharding, and warns about that.
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_reads_a_step(copy):
    """Orbax 1 reads it too, without our code."""
    with ocp.StandardCheckpointer() as checkpointer:
        weights = checkpointer.restore((copy / "checkpoints/8/weights").absolute())
    assert set(weights) == {"params", "router_bias"}
    read = orbax_v1.load_checkpointables((copy / "checkpoints/8").absolute())
    assert read["training"]["step"] == 8
    jax.tree.map(np.testing.assert_array_equal, read["weights"], weights)


def test_the_converted_step_is_printed(saved, tmp_path, capsys):
    cli.main(["convert", str(saved), str(tmp_path / "out")])
    assert "values of step 8 in" in capsys.readouterr().out


def test_readers_need_no_lock(copy, tmp_path, capsys):
    """Listing the folder works as well."""
    with run_lock(copy) as lock:
        before = (copy / "lock").stat().st_ino, (copy / "lock").read_text()
        assert load_run(copy).step == 8
        cli.main(["convert", str(copy), str(tmp_path / "out")])
        cli.main(["convert", "inspect", str(copy)])
        assert ((copy / "lock").stat().st_ino, (copy / "lock").read_text()) == before
        lock.check()
    assert "step 8" in capsys.readouterr().out
    cli.main(["convert", str(tmp_path / "out"), str(tmp_path / "converted")])
    with run_lock(tmp_path / "converted"):
        assert newest_step(tmp_path / "converted") == 0
        cli.main(["convert", "inspect", str(tmp_path / "converted")])


def test_lost_data_is_one_error_message(copy):
    """Orbax and TensorStore do not detect the loss; the manifest does, before the data are used."""
    for step in (4, 8):
        shutil.rmtree(copy / f"checkpoints/{step}/weights/d")
    code, out, err = in_its_own_process("-m", "zaya_jax.cli", "generate", str(copy))
    assert (code, out) == (65, "")
    assert err.startswith(f"zaya: generate: {copy}/checkpoints/8 is damaged: weights/d/")
    assert err.endswith("; no checkpoint is intact: restore one from a backup\n")
    assert err.count("\n") == 1


def test_a_full_disk_is_one_error_message(tmp_path):
    code, out, err = in_its_own_process("-c", SAVING, str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert err == (
        f"zaya: train: a checkpoint of {tmp_path}/run could not be written: File too large; there is no "
        "earlier one; fix the cause, then run the same command again to resume\n"
    )
    assert newest_step(tmp_path / "run") is None


def test_abandoned_coroutines_of_orbax_are_silent():
    """A coroutine that never started warns when it is collected; only warnings of others are shown."""

    async def write_fragment():
        pass

    async def another():
        pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_threads()
        write_fragment(), another()  # collected at once
    assert [str(each.message).rpartition(".")[2] for each in caught] == ["another' was never awaited"]


def test_a_bug_while_saving_keeps_its_traceback(tmp_path):
    """Only errors of the disk become a message."""
    with (
        Checkpoints(tmp_path / "run", retention=Retention(newest=1)) as checkpoints,
        pytest.raises((ValueError, TypeError)) as error,
    ):
        checkpoints.save(1, weights={"a": object()}, training={"step": np.int32(1)})
    assert "could not be written" not in str(error.value)
