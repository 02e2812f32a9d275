"""`--help-config` shows every field with its type, value and description, in 80 columns."""

import shlex

import pytest
from test_command_line import run

from zaya_jax.config import Config
from zaya_jax.config_help import field_helps
from zaya_jax.fields import field_paths
from zaya_jax.options import load_config


def test_every_field_has_a_description():
    helps = list(field_helps())
    assert {field.path for field in helps} == set(field_paths(Config))
    assert [field.path for field in helps if len(field.text.split()) < 2] == []


@pytest.mark.parametrize("command", ["train", "plan --config=configs/zaya1_8b.py", "data inspect"])
def test_all_fields_fit_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(f"{command} --help-config")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    shown = {line.strip().partition("=")[0] for line in out.splitlines()}
    assert {f"--config.{path}" for path in field_paths(Config)} <= shown


@pytest.mark.parametrize("words", ["--help-config=clip_norm", "--help-config clip-norm"])
def test_a_part_of_the_fields_is_shown(words):
    """The values are those of the arguments before and after it."""
    code, out, err = run(f"train {words} --config.optimizer.clip_norm=0.125")
    assert (code, err) == (0, "")
    assert "  --config.optimizer.clip_norm=0.125\n" in out
    assert out.count("--config.") == 1
    assert run("train --help-config --config.optimizer.clip_norm=0.125")[1].count("--config.") > 100


def test_shown_options_can_be_passed_back(monkeypatch):
    """The shown options can be pasted into a shell, wherever they are wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
    options = []
    for line in run("train --help-config")[1].splitlines():
        if line.startswith("  --config."):
            options.append(line.strip())
        elif line.startswith("    ") and line[4] != " ":  # an option continues on this line
            options[-1] += f" {line.strip()}"
    arguments = [word for option in options for word in shlex.split(option)]
    # Lists of sections are shown by the names of their items.
    lists = ("--config.phases=", "--config.data.mixtures=")
    arguments = [word for word in arguments if not word.startswith(lists)]
    assert len(arguments) > 100
    assert load_config("configs/tiny.py", arguments) == load_config("configs/tiny.py", [])
