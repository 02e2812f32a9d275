"""A run's folder: which folders are accepted, and what --overwrite removes. Nothing is trained."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
from small_runs import prepare_run_folder, small_config, write_committed_step

import zaya_jax
from zaya_jax.checkpoint import run_lock
from zaya_jax.config import Config, is_inside
from zaya_jax.plan.dry_run import print_dry_run
from zaya_jax.train.run_folder_checks import check_folder
from zaya_jax.train.trainer import train

# Files of 20 KB are too long, as they would be on a full disk; TensorBoard's grows fastest.
WRITING = """
import resource, sys
sys.dont_write_bytecode = True  # it would be cut off, and read by the next process
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from zaya_jax import cli
from zaya_jax.commands import train as train_command
from zaya_jax.train.metrics.files import MetricsWriter

def main(_):
    with MetricsWriter(sys.argv[1], first_step=0) as writer:
        for step in range(1000):
            writer.write(step, "train", {"a": 0.1, "b": 0.2})

train_command.main = main
cli.main(["train"])
"""


@pytest.fixture
def config(tmp_path) -> Config:
    return small_config(run_folder=tmp_path / "run", corpus=tmp_path / "corpus")


def starting_from(config: Config, folder: pathlib.Path) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=str(folder)))


def make_run(config: Config, *, step: int | None = None) -> pathlib.Path:
    """Creates a run folder with a minimal checkpoint."""
    folder = pathlib.Path(config.run_folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_text())
    if step is not None:
        write_committed_step(folder, step)
    return folder


def test_a_run_resumes_without_its_initial_weights(config, tmp_path):
    config = starting_from(config, tmp_path / "gone")
    folder = make_run(config, step=4)
    check_folder(config, overwrite=False)
    with pytest.raises(ValueError, match="gone is not a run folder"):
        check_folder(config, overwrite=True)
    (folder / "checkpoints/4").rename(folder / "checkpoints/.4.0.partial")
    with pytest.raises(ValueError, match="gone is not a run folder"):
        check_folder(config, overwrite=False)


def test_an_old_run_within_its_base_can_be_resumed(config, tmp_path):
    """It started when that was allowed, and a resume removes nothing."""
    config = starting_from(config, tmp_path)
    make_run(config, step=4)
    check_folder(config, overwrite=False)
    with pytest.raises(ValueError, match="they must be two folders"):
        check_folder(config, overwrite=True)


def test_a_run_starts_from_a_run_in_another_folder(config, tmp_path):
    base = make_run(dataclasses.replace(config, run_folder=str(tmp_path / "base")), step=0)
    config = starting_from(config, base)
    for overwrite in (False, True):
        check_folder(config, overwrite=overwrite)
        prepare_run_folder(config, overwrite=overwrite)
    assert Config.from_text((tmp_path / "run/config.json").read_text()) == config
    assert (base / "checkpoints/0/weights/_METADATA").is_file()


def test_overwrite_empties_the_target_of_a_link(config, tmp_path):
    place = make_run(dataclasses.replace(config, run_folder=str(tmp_path / "disk/run")), step=4)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("")
    (place / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "run").symlink_to(place)
    check_folder(config, overwrite=True)
    prepare_run_folder(config, overwrite=True)
    assert [path.name for path in place.iterdir()] == ["config.json"]
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "kept/file").is_file()


def test_an_unfinished_config_is_ignored(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json.partial").write_text(config.to_text()[:50])
    check_folder(config, overwrite=False)
    prepare_run_folder(config, overwrite=False)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    (tmp_path / "run/config.json").rename(tmp_path / "run/more.partial")
    with pytest.raises(ValueError, match="is not empty and not a run folder"):
        check_folder(config, overwrite=False)


def test_a_locked_run_folder_is_refused(config, capsys):
    """Refused before the missing corpus is opened; a dry run needs no lock."""
    folder = make_run(config, step=4)
    with run_lock(folder):
        before = {path: path.lstat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=r"another process writes to .*/run: process \d+ on "):
                train(config, overwrite=overwrite)
        print_dry_run(config, devices=1)
        assert {path: path.lstat().st_mtime_ns for path in (folder, *folder.rglob("*"))} == before
    assert "weights of" in capsys.readouterr().out
    with pytest.raises(ValueError, match="there is no corpus"):
        train(config, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.json"]


def test_the_lock_of_a_killed_process_is_ignored(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").touch()
    (tmp_path / "run/config.json.partial").touch()
    check_folder(config, overwrite=False)


def test_a_corpus_may_be_built_in_the_run_folder(config, tmp_path):
    """It exists before the config does; --overwrite is then refused."""
    data = dataclasses.replace(config.data, corpus=str(tmp_path / "run/corpus"))
    config = dataclasses.replace(config, data=data)
    check_folder(config, overwrite=False)
    (tmp_path / "run/corpus").mkdir(parents=True)
    prepare_run_folder(config, overwrite=False)
    check_folder(config, overwrite=False)
    with pytest.raises(ValueError, match=r"data\.corpus has .*run/corpus, which is in the run folder"):
        check_folder(config, overwrite=True)


def test_paths_inside_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("run/inner", "away/deep", "runs"):
        pathlib.Path(folder).mkdir(parents=True)
    links = {
        "to_run": "run",
        "to_inner": str(tmp_path / "run/inner"),
        "run/out": "../away",
        "to_out": "run/out",
        "away/to_deep": "../run/out/deep",
        "circle": "circle",
    }
    for name, place in links.items():
        pathlib.Path(name).symlink_to(place)
    inside = (
        "run",
        "./run/",
        "runs/../run",
        "run/not/there",
        "to_run",
        "to_run/x",
        "to_inner/..",
        "to_inner",
    )
    passing = ("run/out", "run/out/deep", "to_out", "to_out/deep/x", "away/to_deep")
    for path in (*inside, *passing, tmp_path / "run"):
        assert is_inside(path, "run")
        assert is_inside(path, "to_run")
    for path in (".", "runs", "away", "away/deep", "runs/run", "circle", "/"):
        assert not is_inside(path, "run")


def test_a_full_disk_is_a_user_error(tmp_path):
    """TensorBoard's own writer dies in a thread, and a run would wait for it for ever."""
    root = pathlib.Path(zaya_jax.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", WRITING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"zaya: train: {tmp_path}: File too large\n"
