"""Files of earlier versions have old names of fields and values; users who type them get the new name."""

import dataclasses
import json
import pathlib

import pytest
from small_runs import prepare_run_folder, small_config, write_committed_step

from zaya_jax.checkpoint import StepDescription, read_config, read_description, step_folder
from zaya_jax.checkpoint.format.layout import DESCRIPTION
from zaya_jax.config import CONFIG_FILE, Config, differences, resume_errors, use_current_names
from zaya_jax.config.renamed_fields import RENAMED_FIELDS, RENAMED_VALUES
from zaya_jax.fields import field_paths
from zaya_jax.options import load_config
from zaya_jax.report.run_record import read_run
from zaya_jax.train.consistency.config_changes import read_changes
from zaya_jax.train.run_folder_checks import check_folder


def use_old_names(values: dict) -> dict:
    """The values as the version before the renames wrote them."""
    values = json.loads(json.dumps(values))
    for path, renamed in RENAMED_VALUES.items():
        section, field = path.split(".")
        (values[section][field],) = (old for old, new in renamed.items() if new == values[section][field])
    for old, new in RENAMED_FIELDS.items():
        (section, old_field), (_, new_field) = old.split("."), new.split(".")
        values[section][old_field] = values[section].pop(new_field)
    return values


@pytest.fixture
def config(tmp_path) -> Config:
    """A config in which all renamed fields differ from their defaults, and all renamed values occur."""
    config = small_config(run_folder=tmp_path / "run", corpus=tmp_path / "corpus")
    watch = dataclasses.replace(
        config.watch,
        max_rollbacks=2, min_seconds=7.0, timeout_factor=4.0, expert_alert_lines=3, replica_check_every=9,
        on_spike="warn",
    )  # fmt: skip
    train = dataclasses.replace(config.train, max_consecutive_skips=6, on_failed_save="continue")
    return dataclasses.replace(config, watch=watch, train=train)


@pytest.fixture
def old_run(config):
    """The folder of a run with one checkpoint, whose config and record have the old names."""
    prepare_run_folder(config, overwrite=False)
    folder = pathlib.Path(config.run_folder)
    write_committed_step(folder, 4)
    (folder / CONFIG_FILE).write_text(json.dumps(use_old_names(dataclasses.asdict(config))))
    return folder


def test_the_table_maps_unknown_names_to_fields():
    paths = set(field_paths(Config))
    assert set(RENAMED_FIELDS.values()) <= paths
    assert not set(RENAMED_FIELDS) & paths
    assert len(set(RENAMED_FIELDS.values())) == len(RENAMED_FIELDS)


def test_a_config_of_an_earlier_version_equals_the_current_one(config, old_run):
    text = (old_run / CONFIG_FILE).read_text()
    assert all(f'"{old.rpartition(".")[2]}"' in text for old in RENAMED_FIELDS)
    assert Config.from_text(text) == config
    assert read_config(old_run) == config
    assert differences(config, read_config(old_run)) == []


def test_a_run_of_an_earlier_version_resumes_without_changes(config, old_run):
    check_folder(config, overwrite=False)
    assert resume_errors(config, read_config(old_run), newest_step=4) == []
    assert prepare_run_folder(config, step=4, overwrite=False) == []
    assert read_changes(old_run) == []
    assert read_config(old_run) == config  # the file keeps its old names until a field changes


def test_the_record_of_a_checkpoint_has_current_names(config, old_run):
    about = StepDescription(
        step=4, phase="", config=use_old_names(json.loads(config.to_text())), corpora={}, versions={},
        num_processes=1, num_devices=1, written="2026-11-23T01:02:03+00:00",
    )  # fmt: skip
    (step_folder(old_run, 4) / DESCRIPTION).write_text(json.dumps(dataclasses.asdict(about)))
    record = read_description(old_run, 4)
    assert record is not None
    assert record.config == json.loads(config.to_text())


def test_the_config_of_an_earlier_run_can_start_another(config, old_run):
    """`--config=runs/old/config.json` reads a file that a program wrote, not one that a user typed."""
    assert load_config(str(old_run / CONFIG_FILE), []) == config


def test_a_report_compares_runs_of_both_versions(config, old_run):
    assert read_run(old_run).config == json.loads(config.to_text())


@pytest.mark.parametrize(("old", "new"), RENAMED_FIELDS.items())
def test_a_user_who_types_an_old_name_gets_the_new_one(old, new, tmp_path):
    message = rf"unknown field '{old}'; it is called {new} now"
    with pytest.raises(ValueError, match=message):
        load_config("configs/tiny.py", [f"--config.{old}=3"])
    section, field = old.split(".")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({section: {field: 3}}))
    with pytest.raises(ValueError, match=message):
        load_config(str(file), [])


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [(path, *pair) for path, pairs in RENAMED_VALUES.items() for pair in pairs.items()],
)
def test_a_user_who_types_an_old_value_gets_the_new_one(path, old, new, tmp_path):
    section, field = path.split(".")
    assert use_current_names({section: {field: old}}) == {section: {field: new}}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({section: {field: old}}))
    for source, options in ((str(file), []), ("configs/tiny.py", [f"--config.{path}={old}"])):
        with pytest.raises(ValueError, match=f"unknown value '{old}' of {path}; it is called '{new}' now"):
            load_config(source, options)
    assert load_config("configs/tiny.py", [f"--config.{path}={new}"])


def test_values_that_are_not_sections_are_left_for_validation():
    assert use_current_names({"run_folder": "x", "phases": [], "watch": None}) == {
        "run_folder": "x", "phases": [], "watch": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match="watch is None"):
        Config.from_text('{"watch": null}')
