"""`--help-config` has every field with its type, its value and what its docstring says, in 80 columns."""

import shlex

import pytest
from test_command_line import run

from zaya_jax.config import Config
from zaya_jax.config_help import field_helps
from zaya_jax.fields import field_paths
from zaya_jax.options import load_config


def test_every_field_has_its_text():
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
    """With the value that the words before and behind give it."""
    code, out, err = run(f"train {words} --config.optimizer.clip_norm=0.125")
    assert (code, err) == (0, "")
    assert "  --config.optimizer.clip_norm=0.125\n" in out
    assert out.count("--config.") == 1
    assert run("train --help-config --config.optimizer.clip_norm=0.125")[1].count("--config.") > 100


def test_what_is_shown_can_be_given_back(monkeypatch):
    """The words of the list are options of a shell, wherever they are wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
    options = []
    for line in run("train --help-config")[1].splitlines():
        if line.startswith("  --config."):
            options.append(line.strip())
        elif line.startswith("    ") and line[4] != " ":  # an option that goes on
            options[-1] += f" {line.strip()}"
    given = [word for option in options for word in shlex.split(option)]
    given = [word for word in given if not word.startswith(("--config.phases=", "--config.data.mixtures="))]
    assert len(given) > 100
    assert load_config("configs/tiny.py", given) == load_config("configs/tiny.py", [])
