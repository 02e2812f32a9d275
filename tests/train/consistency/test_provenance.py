"""Provenance in checkpoints, and the check that a resumed run reads the same corpora."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from small_runs import build_small_corpus, small_config, write_committed_step

from zaya_jax.checkpoint import Checkpoints, Retention, SavedStep, damage_of, read_description, run_lock
from zaya_jax.config import Config
from zaya_jax.data.corpora.shards import Corpus, fingerprint, open_corpus
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.consistency.config_changes import read_changes
from zaya_jax.train.consistency.provenance import Provenance, check_same_corpora, fingerprints
from zaya_jax.train.heartbeats import Heartbeats
from zaya_jax.train.setup import PreparedRun, prepare_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return build_small_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def run(corpus, tmp_path) -> Config:
    """A run folder with a tiny checkpoint of step 4 that has a real provenance record."""
    config = small_config(
        run_folder=tmp_path / "run", corpus=shutil.copytree(corpus.folder, tmp_path / "corpus")
    )
    corpora = {config.data.corpus: open_corpus(config.data.corpus)}
    about = Provenance(config, fingerprints(corpora), 8).of_step(4)
    with Checkpoints(config.run_folder, retention=Retention(newest=1)) as checkpoints:
        zeros = {"a": jax.device_put(np.zeros(3))}
        checkpoints.save(4, weights=zeros, training={"step": np.int32(4)}, about=about)
    pathlib.Path(config.run_folder, "config.json").write_text(config.to_text())
    return config


def test_a_checkpoint_records_its_provenance(run, corpus):
    about = read_description(run.run_folder, 4)
    assert about is not None
    assert (about.step, about.phase, about.num_processes, about.num_devices) == (4, "", 1, 8)
    assert Config.from_text(json.dumps(about.config)) == run
    assert about.corpora == {run.data.corpus: fingerprint(corpus)}
    assert about.versions["jax"] == jax.__version__
    assert about.written.endswith("+00:00")


def test_the_record_is_in_the_manifest(run):
    assert damage_of(run.run_folder, 4) is None
    path = pathlib.Path(run.run_folder, "checkpoints/4/run.json")
    path.write_text(path.read_text().replace('"num_devices": 8', '"num_devices": 9'))
    assert damage_of(run.run_folder, 4) == "run.json is not as it was written"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"run\.json cannot be read: .* has no step"):
        read_description(run.run_folder, 4)


def change(corpus: pathlib.Path) -> None:
    """Replaces the corpus by one with a file less."""
    shutil.rmtree(corpus)
    build_small_corpus(corpus, num_files=23)


def _open(config: Config, *, overwrite: bool = False) -> PreparedRun:
    with run_lock(config.run_folder) as lock:
        return prepare_run(config, data_mesh(), lock, heartbeats=Heartbeats(), overwrite=overwrite)


def test_a_run_resumes_with_the_corpus_that_it_has_read_only(run):
    opened = _open(run)
    assert opened.provenance.corpora == {run.data.corpus: fingerprint(opened.corpus)}
    change(pathlib.Path(run.data.corpus))
    write_committed_step(pathlib.Path(run.run_folder), 8)
    pathlib.Path(run.run_folder, "checkpoints/8/committed").unlink()
    with pytest.raises(ValueError, match=r"corpus is not the one that .*run read up to step 4: its text"):
        _open(run)
    # A refusal does not change the run, including its damaged step.
    assert pathlib.Path(run.run_folder, "checkpoints/8").is_dir()
    _open(run, overwrite=True)


def test_a_step_without_a_record_of_corpora_can_be_resumed(run, tmp_path):
    """It was converted, or written by an older version, or the run reads another corpus by now."""
    corpora = {run.data.corpus: open_corpus(run.data.corpus)}
    write_committed_step(pathlib.Path(run.run_folder), 8)
    assert read_description(run.run_folder, 8) is None
    change(pathlib.Path(run.data.corpus))
    check_same_corpora(SavedStep(run.run_folder, 8), run, corpora)


def test_the_same_corpus_may_be_in_another_folder(run, tmp_path):
    _open(run)
    folder = pathlib.Path(run.data.corpus)
    folder.rename(tmp_path / "moved")
    moved = dataclasses.replace(
        run, data=dataclasses.replace(run.data, corpus=str(tmp_path / "moved"), source=None)
    )
    assert _open(moved).corpus.folder == (tmp_path / "moved").resolve()
    (recorded,) = read_changes(run.run_folder)
    assert recorded.fields == {"data.corpus": [str(folder), str(tmp_path / "moved")]}
    assert (recorded.step, recorded.has_left_its_course) == (4, False)
    change(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"moved is not the one that .*run read up to step 4: its text"):
        _open(moved)


def test_the_phase_is_that_of_the_step(run):
    values = dataclasses.asdict(run)
    del values["train"]["num_steps"]
    phases = [{"name": "a", "steps": 10}, {"name": "b", "steps": 7}]
    provenance = Provenance(Config.from_dict(values | {"phases": phases}), {}, 1)
    assert [provenance.of_step(step).phase for step in (10, 11)] == ["a", "b"]
