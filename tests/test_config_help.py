"""`--help-config` shows every field with its value, its type and its docstring, on lines that fit."""

import dataclasses
import re

import pytest
from small_runs import small_values
from test_command_line import run

from zaya_jax.config import Config
from zaya_jax.config_help import describe_fields, field_helps
from zaya_jax.fields import field_paths

WIDTHS = [80, 60]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("pattern", ["", "execution"])
def test_every_field_is_there_and_fits(width, pattern, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = describe_fields(Config(), pattern)
    shown = re.findall(r"^  --config\.([\w.]+)=", text, re.MULTILINE)
    assert sorted(shown) == sorted(path for path in field_paths(Config) if pattern in path)
    # An option is never cut: one that is longer than the line stands alone on it.
    assert not [line for line in text.splitlines() if len(line) > width and " " in line.strip()]


def test_no_field_is_without_a_word():
    assert not [field.path for field in field_helps() if not field.text]


def test_values_are_those_of_the_file_and_of_the_line(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    values = small_values(run_folder="runs/x", corpus="corpus")
    config = Config.from_dict(values | {"run_folder": "runs/two words"})
    (tmp_path / "config.json").write_text(config.to_text())
    words = f"train --help-config=warmup --config {tmp_path}/config.json --config.optimizer.name=adamw"
    code, out, err = run(words)
    assert (code, err) == (0, "")
    assert out.splitlines()[1].strip() == "--config.optimizer.warmup_steps=4"
    default = Config().optimizer.warmup_steps
    assert f"(a whole number; default {default})" in out
    _, out, _ = run(
        f"plan --config={tmp_path}/config.json --config.optimizer.name=adamw --help-config=optimizer.na"
    )
    assert '--config.optimizer.name=adamw\n      ("muon" or "adamw"; default muon)' in out
    _, out, _ = run(f"train --config={tmp_path}/config.json --help-config=run_folder")
    assert "--config.run_folder='runs/two words'" in out


def test_a_pattern_shows_all_that_is_said_and_none_the_first_sentence():
    short, long = describe_fields(Config()), describe_fields(Config(), "remat")
    assert "Each keeps less" not in " ".join(short.split())
    assert "Each keeps less than the one before and computes more." in " ".join(long.split())


@pytest.mark.parametrize(
    ("pattern", "hint"), [("optimiser", 'did you mean "optimizer"?'), ("qqq", "sections are model, data")]
)
def test_a_pattern_of_nothing_is_one_sentence(pattern, hint):
    code, out, err = run(f"train --help-config={pattern}")
    assert (code, out) == (2, "")
    assert f'no config field has "{pattern}" in its name; {hint}' in err


def test_choices_are_those_of_types():
    known = {field.path: field.choices for field in field_helps()}
    assert known["optimizer.name"] == ("muon", "adamw")
    assert known["train.keep_best"] == ("True", "False")
    assert known["execution.implementation"] == ("xla", "pallas", "None")
    assert known["train.num_steps"] == known["train.keep_every"] == known["run_folder"] == ()
    assert dataclasses.asdict(Config())["log"]["wandb"] in known["log.wandb"]
