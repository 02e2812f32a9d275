"""Replay checks: losses that are equal, nearly equal, different or missing."""

import json
import math
import pathlib
import shutil

import pytest
from small_runs import build_small_corpus, small_values

from zaya_jax.config import Config
from zaya_jax.run_folder.names import METRICS_FILE
from zaya_jax.train import compiled_programs
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.replay import MAX_RELATIVE_DIFFERENCE, find_replay, relative_difference
from zaya_jax.train.trainer import train

# Whole runs: the newest jax has its own list of them.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A finished run of two phases, 5 and 3 steps: losses of 1, 2, 4, 5, 6, 8; checkpoints of 3, 5, 6, 8."""
    folder = tmp_path_factory.mktemp("replayed")
    build_small_corpus(folder / "corpus")
    values = small_values(run_folder=str(folder / "run"), corpus=str(folder / "corpus"))
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    values["optimizer"] |= {"name": "adamw", "warmup_steps": 0}
    values["train"] |= {"log_every": 2, "checkpoint_every": 3, "keep_checkpoints": 4, "eval_sequences": 1}
    del values["train"]["num_steps"]
    longer = {"sequence_length": 128, "batch_size": 2}
    values["phases"] = ({"name": "first", "steps": 5}, {"name": "second", "steps": 3, "data": longer})
    train(Config.from_dict(values))
    return values


@pytest.fixture
def config(original, tmp_path):
    """Config of a copy of the run."""
    shutil.copytree(original["run_folder"], tmp_path / "run")
    config = Config.from_dict(original | {"run_folder": str(tmp_path / "run")})
    (tmp_path / "run/config.json").write_text(config.to_text())
    return config


def losses(run_folder):
    return {row["step"]: row["loss"] for row in read_metrics(run_folder, "train")}


def contents(folder):
    return {str(path): path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}


def scale_loss(run_folder, step, factor):
    path = pathlib.Path(run_folder) / METRICS_FILE
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if (row["step"], row["kind"]) == (step, "train"):
            row["loss"] *= factor
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_replay_changes_neither_the_run_nor_its_compilations(original, config, capsys, monkeypatch):
    """Killed after step 8 with the newest checkpoint of step 6: steps 4 to 8 are repeated, in two phases."""
    shutil.rmtree(pathlib.Path(config.run_folder) / "checkpoints/8")
    compiled_programs._make_programs.cache_clear()  # the original's run has compiled them
    made, make_programs = [], compiled_programs.make_programs
    monkeypatch.setattr(
        compiled_programs,
        "make_programs",
        lambda *args, **kw: made.append(make_programs(*args, **kw)) or made[-1],
    )
    train(config, replay_check=5)
    output = capsys.readouterr().out
    assert f"replaying steps 4 to 8 from checkpoint 3 of {config.run_folder}\n" in output
    assert "replayed steps 4 to 8, 4 of them recorded: losses equal\n" in output
    assert "resuming at step 6" in output
    assert losses(config.run_folder) == losses(original["run_folder"])
    (program,) = {each.step for each in made}  # of both phases, for what they learn with is the same
    assert program._cache_size() == 2, "one for each shape of a batch"


def test_a_replay_changes_nothing(config, capsys):
    before = contents(config.run_folder)
    train(config, replay_check=2)
    output = capsys.readouterr().out
    assert "replayed steps 7 to 8, 1 of them recorded: losses equal\n" in output
    assert "is finished" in output
    assert contents(config.run_folder) == before


def test_rounding_is_allowed_and_reported(config, capsys):
    scale_loss(config.run_folder, 8, 1 + MAX_RELATIVE_DIFFERENCE / 2)
    train(config, replay_check=2)
    output = capsys.readouterr().out
    assert "replayed steps 7 to 8, 1 of them recorded: losses differ by 5.0e-04 at most\n" in output


def test_another_loss_stops_the_run(config):
    found, factor = losses(config.run_folder)[8], 1 - 2 * MAX_RELATIVE_DIFFERENCE
    scale_loss(config.run_folder, 8, factor)
    before = contents(config.run_folder)
    with pytest.raises(ValueError, match="differ by") as error:
        train(config, replay_check=2)
    assert str(error.value).startswith(
        f"step 8 has a loss of {found:.9g} when it is repeated from checkpoint 6 of {config.run_folder}, and "
        f"{found * factor:.9g} is recorded: "
    )
    assert contents(config.run_folder) == before


@pytest.mark.parametrize(
    ("recorded", "found", "expected"),
    [
        (math.nan, math.nan, 0.0),  # a skipped step is skipped again
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (0.0, 0.0, 0.0),
        (0.0, 1.0, math.inf),
        (4.0, 3.0, 0.25),
    ],
)
def test_differences_are_relative_and_a_number_never_equals_nan(recorded, found, expected):
    assert relative_difference(recorded, found) == expected


@pytest.mark.parametrize(
    ("num_steps", "sentence"),
    [
        (0, "--replay-check is 0; it must be above 0"),
        (6, "is of step 3 and the last recorded loss of step 8, so that at most 5 steps can be repeated; a"),
        (1, r"checkpoint 6 of .*, 8 is the first with a recorded loss; use at least --replay-check=2$"),
    ],
)
def test_steps_that_cannot_be_repeated_are_a_user_error(original, num_steps, sentence):
    with pytest.raises(ValueError, match=sentence):
        find_replay(original["run_folder"], num_steps)


def test_a_damaged_checkpoint_is_skipped(config):
    """So is an incomplete last line."""
    folder = pathlib.Path(config.run_folder)
    (folder / "checkpoints/6/manifest.json").unlink()
    with (folder / METRICS_FILE).open("a") as file:
        file.write('{"step": 10, "ki')
    assert find_replay(config.run_folder, 1).start.step == 5
    (folder / "checkpoints/3/manifest.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint of step 4 or before is intact"):
        find_replay(config.run_folder, 4)


def test_a_new_run_has_nothing_to_repeat(config, tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint, and --replay-check repeats steps after one"):
        find_replay(str(tmp_path / "none"), 5)
    with pytest.raises(ValueError, match="the run that --overwrite removes; give only one of them"):
        train(config, overwrite=True, replay_check=2)
