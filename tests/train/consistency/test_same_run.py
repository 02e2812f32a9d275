"""Fields, code and packages that all processes of a run must share."""

import dataclasses
import importlib.metadata
import shutil

import pytest
from small_runs import small_values

from zaya_jax.config import Config
from zaya_jax.train.consistency import same_run


def values_of(section: str = "train", **fields) -> dict[str, str]:
    values = small_values(run_folder="run", corpus="corpus")
    values[section] |= fields
    return same_run.config_values(Config.from_dict(values))


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("optimizer", "learning_rate", 1e-2),
        ("data", "seed", 1),
        ("data", "batch_size", 8),
        ("model", "rms_norm_eps", 1e-6),
        ("train", "checkpoint_every", 5),
        ("train", "init_from", "other"),
        ("execution", "remat", "layer"),
    ],
)
def test_a_different_field_is_named(section, field, value):
    ours, theirs = values_of(), values_of(section, **{field: value})
    assert {key for key in ours if ours[key] != theirs[key]} == {f"{section}.{field}"}


@pytest.mark.parametrize(
    ("field", "value"), [("corpus", "elsewhere"), ("tokenizer", "elsewhere/tokenizer.json")]
)
def test_data_may_be_in_different_places(field, value):
    assert values_of("data", **{field: value}) == values_of()


def test_the_run_folder_may_have_different_names():
    config = Config.from_dict(small_values(run_folder="run", corpus="corpus"))
    moved = dataclasses.replace(config, run_folder="elsewhere")
    assert same_run.config_values(moved) == same_run.config_values(config)


def test_a_different_source_file_is_named(tmp_path, monkeypatch):
    before = same_run.code_hashes()
    assert {"zaya_jax/train/step/train_step.py", "pallas_kernels/backend.py"} <= before.keys()
    copy = tmp_path / "zaya_jax"
    root, kernels = same_run._ROOTS
    shutil.copytree(root, copy)
    monkeypatch.setattr(same_run, "_ROOTS", (copy, kernels))
    assert same_run.code_hashes() == before
    file = copy / "optim" / "muon.py"
    file.write_bytes(file.read_bytes()[:-1] + b" ")
    after = same_run.code_hashes()
    assert {name for name in before if after[name] != before[name]} == {"zaya_jax/optim/muon.py"}


@pytest.mark.parametrize("package", ["jax", "optax", "numpy", "jaxlib"])
def test_a_different_version_is_named(package, tmp_path, monkeypatch):
    before = same_run.package_versions()
    assert before[package] == importlib.metadata.version(package)
    folder = tmp_path / f"{package}-99.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert same_run.package_versions()[package] == "99.9"
