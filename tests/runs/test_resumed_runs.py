"""Config changes of resumed runs: execution, logging, retention, and more steps."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
from small_runs import (
    build_small_corpus,
    prepare_run_folder,
    small_config,
    small_values,
    write_committed_step,
)

from zaya_jax.config import RESUME_RULES, Config, MixtureConfig, ResumeRule, resume_errors, resume_rule
from zaya_jax.fields import field_paths
from zaya_jax.train.consistency.config_changes import read_changes
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.replay import find_replay
from zaya_jax.train.run_folder_checks import check_folder
from zaya_jax.train.trainer import train

OTHERWISE = {
    "execution": {
        "num_microbatches": 2,
        "remat": "layer",
        "scan_layers": False,
        "loss_chunk": 50,
    },
    "train": {"log_every": 3, "eval_every": 5, "eval_sequences": 2, "checkpoint_every": 7,
              "checkpoint_minutes": 1e-6, "keep_checkpoints": 3, "keep_every": 7, "keep_best": True,
              "min_free_gib": 0.001, "on_failed_save": "continue",
              "sample_tokens": 9, "max_consecutive_skips": 5, "update_norms": False},
}  # fmt: skip


UNLESS = "; --change-course allows it"


def with_values(config: Config, values: dict) -> Config:
    """Returns the config with some fields replaced."""
    sections = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in values.items()}
    return dataclasses.replace(config, **sections)


def of_length(config: Config, num_steps: int) -> Config:
    return with_values(config, {"train": {"num_steps": num_steps}})


def scheduled(config: Config, schedule: str, decay_steps: int = 0) -> Config:
    return with_values(config, {"optimizer": {"schedule": schedule, "decay_steps": decay_steps}})


@pytest.fixture
def config(tmp_path) -> Config:
    """Config of a run of 30 steps at a constant rate."""
    return scheduled(small_config(run_folder=tmp_path / "run", corpus=tmp_path / "corpus"), "constant")


def make_run(config: Config, *, step: int) -> pathlib.Path:
    """Creates a run folder with a minimal checkpoint."""
    folder = pathlib.Path(config.run_folder)
    write_committed_step(folder, step)
    (folder / "config.json").write_text(config.to_text())
    return folder


def losses(run_folder: str | pathlib.Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(run_folder, "train")}


@pytest.mark.campaign
@pytest.mark.slow
def test_a_run_resumed_with_other_execution_equals_an_uninterrupted_one(tmp_path, capsys):
    """Gradients differ by rounding of float32 sums, about 1e-7 of their norm, and a step changes no weight by
    more than the learning rate, 3e-3; after three steps a loss of 5 differs by far less than 1e-5 of it."""
    build_small_corpus(tmp_path / "corpus")
    whole = scheduled(small_config(run_folder=tmp_path / "whole", corpus=tmp_path / "corpus"), "constant")
    whole = with_values(whole, {
        "model": {"num_hidden_layers": 1, "layer_pattern": ("hybrid",)},
        "optimizer": {"name": "adamw", "warmup_steps": 2},
        "train": {"num_steps": 6, "checkpoint_every": 3, "eval_sequences": 1},
    })  # fmt: skip
    begun = of_length(dataclasses.replace(whole, run_folder=str(tmp_path / "run")), 4)
    resumed = of_length(with_values(begun, OTHERWISE), 6)
    resumed = with_values(resumed, {"train": {"log_every": 1}})
    train(whole)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    (tmp_path / "run/config.json").write_text(begun.to_text())
    capsys.readouterr()
    train(resumed)

    output = capsys.readouterr().out
    assert "resumes with changes: train.num_steps: 4 -> 6; " in output.splitlines()[0]
    assert "execution.remat: none -> layer" in output.splitlines()[0]
    assert "resuming at step 3" in output
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert list(ours) == list(theirs) == [1, 2, 3, 4, 5, 6]
    assert [ours[step] for step in (1, 2, 3)] == [theirs[step] for step in (1, 2, 3)]
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)
    assert len(set(theirs.values())) == 6
    # With so few minutes each step is saved; the newest three are kept.
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["4", "5", "6"]
    assert Config.from_text((tmp_path / "run/config.json").read_text()) == resumed


def test_changes_of_execution_logging_and_retention_are_printed_and_recorded(config):
    folder = make_run(config, step=4)
    ours = with_values(config, OTHERWISE)
    check_folder(ours, overwrite=False)
    changed = [str(each) for each in prepare_run_folder(ours, overwrite=False)]
    assert len(changed) == sum(map(len, OTHERWISE.values()))
    assert "execution.num_microbatches: 1 -> 2" in changed
    assert "train.eval_sequences: None -> 2" in changed
    assert Config.from_text((folder / "config.json").read_text()) == ours
    assert sorted(path.name for path in folder.iterdir()) == ["changes.jsonl", "checkpoints", "config.json"]
    assert prepare_run_folder(ours, overwrite=False) == []
    (recorded,) = read_changes(folder)  # the second time there was nothing to tell
    assert [f"{name}: {old} -> {new}" for name, (old, new) in recorded.fields.items()] == changed


def test_a_moved_run_can_be_resumed(config, tmp_path):
    folder = make_run(config, step=4)
    folder.rename(tmp_path / "moved")
    ours = dataclasses.replace(config, run_folder=str(tmp_path / "moved"))
    check_folder(ours, overwrite=False)
    prepare_run_folder(ours, overwrite=False)
    assert Config.from_text((tmp_path / "moved/config.json").read_text()) == ours


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"data": {"seed": 1}}, "data.seed is 1 and was 0: it changes what is learned"),
        ({"train": {"seed": 1}}, "train.seed is 1 and was 0: it changes what is learned"),
        ({"train": {"z_loss": 0.5}}, "train.z_loss is 0.5 and was 0.0: it changes what is learned" + UNLESS),
        (
            {"optimizer": {"beta2": 0.9}},
            "optimizer.beta2 is 0.9 and was 0.95: it changes what is learned" + UNLESS,
        ),
        (
            {"optimizer": {"name": "adamw"}},
            "optimizer.name is adamw and was muon: it changes what is learned",
        ),
        (
            {"execution": {"remat": "layer"}, "model": {"rope_theta": 9.0}},
            "model.rope_theta is 9.0 and was 5000000.0: it changes what is learned",
        ),
    ],
)
def test_changes_of_the_result_are_refused(config, values, sentence):
    before = make_run(config, step=4).joinpath("config.json").read_text()
    with pytest.raises(ValueError, match="holds a run of another config") as error:
        check_folder(with_values(config, values), overwrite=False)
    way_out = "; choose another --config.run_folder, or give --overwrite to remove the old run"
    assert str(error.value).endswith(f"config; {sentence}{way_out}")
    assert pathlib.Path(config.run_folder, "config.json").read_text() == before


@pytest.mark.parametrize(
    ("schedule", "decay_steps", "num_steps", "newest_step", "reason"),
    [
        ("constant", 0, 60, 20, None),
        ("constant", 0, 60, 30, None),
        ("constant", 0, 21, 20, None),
        ("constant", 0, 20, 20, "of step 20; num_steps must leave at least one step to do"),
        ("constant", 0, 10, 20, "of step 20; num_steps must leave at least one step to do"),
        ("cosine", 0, 60, 20, 'optimizer.schedule "cosine" depends on the number of steps'),
        ("linear", 0, 60, 20, 'optimizer.schedule "linear" depends on the number of steps'),
        ("cosine", 0, 60, None, 'optimizer.schedule "cosine" depends on the number of steps'),
        ("warmup_stable_decay", 10, 60, 20, None),
        ("warmup_stable_decay", 10, 25, 15, None),
        ("warmup_stable_decay", 10, 60, 21, "the newest checkpoint is of step 21, and the decay"),
        ("warmup_stable_decay", 10, 25, 16, "starts after step 15"),
    ],
)
def test_the_length_may_change_if_no_used_rate_does(
    config, schedule, decay_steps, num_steps, newest_step, reason
):
    """The run had 30 steps before."""
    theirs = scheduled(config, schedule, decay_steps)
    actual = resume_errors(of_length(theirs, num_steps), theirs, newest_step=newest_step)
    assert len(actual) == (reason is not None)
    if reason is not None:
        assert actual[0].startswith(f"train.num_steps is {num_steps} and was 30: ")
        assert reason in actual[0]


def changed_course(config: Config) -> Config:
    return with_values(config, {
        "optimizer": {"learning_rate": 1e-4, "schedule": "linear", "weight_decay": 0.3, "clip_norm": 0.5},
        "balancing": {"learning_rate": 1e-2},
        "train": {"num_steps": 40},
    })  # fmt: skip


def test_change_course_allows_rates_decays_and_lengths(config):
    ours = changed_course(config)
    assert len(resume_errors(ours, config, newest_step=20)) == 6
    assert resume_errors(ours, config, newest_step=20, change_course=True) == []
    # Changes that lose the position in the data, or the end of a phase, are still refused.
    others = with_values(ours, {"data": {"batch_size": 2}})
    (sentence,) = resume_errors(others, config, newest_step=20, change_course=True)
    assert sentence.startswith("data.batch_size is 2 and was ")
    (sentence,) = resume_errors(of_length(ours, 20), config, newest_step=20, change_course=True)
    assert sentence.endswith("num_steps must leave at least one step to do")


def test_a_changed_course_is_recorded_and_earlier_steps_are_not_replayed(config):
    folder = make_run(config, step=20)
    ours = changed_course(config)
    check_folder(ours, overwrite=False, change_course=True)
    prepare_run_folder(ours, step=20, overwrite=False)
    (recorded,) = read_changes(folder)
    assert (recorded.step, recorded.has_left_its_course) == (20, True)
    assert recorded.fields["optimizer.schedule"] == ["constant", "linear"]
    check_folder(ours, overwrite=False)  # from now on it is the run's own
    write_committed_step(folder, 16)
    rows = ({"step": step, "kind": "train", "loss": 2.0} for step in range(1, 31))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert find_replay(str(folder), 10).start.step == 20
    with pytest.raises(ValueError, match=r"has changed at step 20, .* 10 steps after it are rec"):
        find_replay(str(folder), 11)


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (("a", ("a", "b")), ("x", ("x", "y")), False),
        (("a", ("a", "b")), ("b", ("b", "a")), False),
        (("a", ("a", "b")), ("x", ("y", "z")), True),
        (("a", ("b", "c")), ("a", ("a", "c")), True),
    ],
)
def test_corpora_may_move_but_not_change_in_number(config, before, after, refused):
    """Opened corpora are compared with the record in the checkpoint."""

    def reading(corpus, corpora):
        mixture = MixtureConfig(name="m", corpora=corpora, weights=(1.0, 2.0))
        return with_values(config, {"data": {"corpus": corpus, "mixtures": (mixture,), "mixture": "m"}})

    actual = resume_errors(reading(*after), reading(*before), newest_step=4)
    assert bool(actual) == refused
    assert all(each.endswith("none may be added, removed, split or merged") for each in actual)


def phased(**second) -> Config:
    """Ten steps with a decaying rate, and ten more."""
    values = small_values(run_folder="unused", corpus="unused")
    del values["train"]["num_steps"]
    return Config.from_dict(values | {"phases": [{"name": "a", "steps": 10}, {"name": "b"} | second]})


CONSTANT = {"schedule": "constant"}


@pytest.mark.parametrize(
    ("values", "newest_step", "refused"),
    [
        ({"steps": 10, "execution": {"remat": "layer", "num_microbatches": 2}}, 15, None),
        ({"steps": 20}, 15, None),
        ({"tokens": 20 * 4 * 64}, 15, None),
        ({"steps": 20}, 5, None),
        ({"steps": 5}, 15, "phases.b.steps is 5 and was 10: in phase b, the newest checkpoint is of step 15"),
        ({"steps": 10, "data": {"batch_size": 2}}, 5, "phases.b.data.batch_size is 2 and was unset: it"),
        ({"steps": 10, "optimizer": CONSTANT | {"beta1": 0.5}}, 5, "phases.b.optimizer.beta1 is 0.5 and was"),
        ({"steps": 10, "name": "c"}, 5, "phases is ('a', 'c') and was ('a', 'b'): it changes what"),
    ],
)  # fmt: skip
def test_phases_follow_the_same_rules(values, newest_step, refused):
    theirs = phased(steps=10, optimizer=CONSTANT)
    actual = resume_errors(phased(**{"optimizer": CONSTANT} | values), theirs, newest_step=newest_step)
    assert len(actual) == (refused is not None)
    assert refused is None or actual[0].startswith(refused)


def test_a_finished_phase_keeps_its_steps():
    theirs = phased(steps=10)
    first, second = theirs.phases
    longer = dataclasses.replace(
        theirs,
        phases=(dataclasses.replace(first, steps=12), second),
        train=dataclasses.replace(theirs.train, num_steps=22),
    )
    (sentence,) = resume_errors(longer, theirs, newest_step=15)
    assert sentence.startswith('phases.a.steps is 12 and was 10: in phase a, optimizer.schedule "cosine"')
    both = [scheduled(each, "constant") for each in (longer, theirs)]
    (sentence,) = resume_errors(*both, newest_step=15)
    assert sentence.endswith("the newest checkpoint is of step 15, and the phase ended at step 10")
    assert resume_errors(*both, newest_step=10) == []


def test_every_field_is_of_one_kind():
    """A new field in a section of several kinds needs an explicit kind."""
    paths = set(field_paths(Config))
    for path in paths:
        assert resume_rule(path) in ResumeRule
    sections = {path.partition(".")[0] for path in paths}
    in_lists = {"phases.tokens", "phases.steps", "data.mixtures.corpora"}
    assert set(RESUME_RULES) <= paths | sections | in_lists
    assert resume_rule("phases.a.execution.remat") is ResumeRule.FREE
    assert resume_rule("phases.a.data.batch_size") is ResumeRule.FIXED
    assert resume_rule("phases.a.steps") is ResumeRule.NUM_STEPS
    assert resume_rule("data.mixtures.web.weights") is ResumeRule.FIXED
    assert resume_rule("data.mixtures.web.corpora") is ResumeRule.PATH
    assert resume_rule("phases.a.data.mixtures.web.corpora") is ResumeRule.PATH
    assert resume_rule("phases.a.optimizer.learning_rate") is ResumeRule.SCHEDULE
