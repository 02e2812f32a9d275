"""Phases and batch ramps: the position of each step, by hand and compared with a counting loop."""

import json

import pytest

from zaya_jax.config import Config, step_ranges
from zaya_jax.options import load_config
from zaya_jax.train.phase_summary import check_devices

VALUES = {
    "data": {
        "sequence_length": 32,
        "batch_size": 8,
        "mixtures": [{"name": "web", "corpora": ["w"], "weights": [1]}],
    },
    "optimizer": {"warmup_steps": 0},
    "phases": [
        {"name": "begin", "steps": 10, "data": {"batch_ramp": [[3, 64], [4, 128]]}},
        {"name": "same", "tokens": 513, "model": {"rope_theta": 1e6}},
        {"name": "long", "steps": 5, "data": {"sequence_length": 128, "batch_size": 2}},
        {"name": "other", "steps": 2, "data": {"mixture": "web"}},
        {"name": "again", "steps": 1, "data": {"batch_size": 4}},
    ],
}
CONFIG = Config.from_dict(VALUES)


def test_step_ranges_by_hand():
    actual = [
        (s.phase.name, s.first_step, s.num_steps, s.batch_size, s.first_token) for s in step_ranges(CONFIG)
    ]
    assert actual == [
        ("begin", 0, 3, 2, 0),
        ("begin", 3, 4, 4, 3 * 64),
        ("begin", 7, 3, 8, 3 * 64 + 4 * 128),
        ("same", 10, 3, 8, 1472),
        ("long", 13, 5, 2, 2240),
        ("other", 18, 2, 8, 3520),
        ("again", 20, 1, 4, 4032),
    ]
    assert CONFIG.train.num_steps == 21


def trace(first_step):
    """Returns the range of each step from `first_step` on."""
    return [
        (
            step,
            step_range.phase.name,
            step_range.batch_size,
            step_range.phase.config.model.rope_theta,
            step_range.tokens_until(step),
        )
        for step_range in (each.after(first_step) for each in step_ranges(CONFIG))
        for step in range(step_range.first_step, step_range.end)
    ]


@pytest.mark.parametrize("first_step", range(22))
def test_a_resume_at_any_step_equals_an_uninterrupted_run(first_step):
    assert trace(first_step) == trace(0)[first_step:]


def test_tokens_do_not_overflow():
    """8T + 4T + 1.2T + 0.66T tokens, as published; a phase ends with the first step that reaches its own."""
    config = load_config("configs/zaya1_8b.py", [])
    parts = list(step_ranges(config))
    last = parts[-1]
    assert 13.86e12 <= last.tokens_until(last.end) < 13.86e12 + 4 * 2**24
    assert last.end == config.train.num_steps
    phases = [(p.config.data.sequence_length, p.config.model.rope_theta) for p in config.resolved_phases]
    assert phases == [(4096, 1e4), (4096, 1e4), (32_768, 1e6), (131_072, 5e6)]
    assert all(phase.config.data.batch_tokens == 2**24 for phase in config.resolved_phases)


def test_a_run_without_phases_is_one():
    config = Config.from_dict({"train": {"num_steps": 50}, "optimizer": {"warmup_steps": 0}})
    (whole,) = step_ranges(config)
    step_range = whole.after(20)
    assert (step_range.first_step, step_range.num_steps, step_range.first_token) == (20, 30, 20 * 4096 * 4096)
    assert step_range.phase.config == config


@pytest.mark.parametrize(
    ("step", "name"),
    [(0, "begin"), (1, "begin"), (10, "begin"), (11, "same"), (13, "same"), (14, "long"), (99, "again")],
)
def test_the_phase_of_a_step(step, name):
    assert CONFIG.phase_at(step).name == name


def test_a_smaller_batch_has_fewer_microbatches():
    """No larger than those of the full batch: 8 sequences in 4 parts, 2 and 4 in 1 and 2."""
    config = Config.from_dict(VALUES | {"execution": {"num_microbatches": 4}, "phases": VALUES["phases"][:1]})
    assert [each.num_microbatches for each in step_ranges(config)] == [1, 2, 4]


def test_partial_microbatches_count():
    """12 sequences in 2 parts are 6 each: 1 and 6 are one part; 8 and 10 are two, as one would be larger."""
    data = VALUES["data"] | {"batch_size": 12}
    ramp = [{"name": "ramp", "steps": 5, "data": {"batch_ramp": [[1, size * 32] for size in (1, 6, 8, 10)]}}]
    config = Config.from_dict(VALUES | {"data": data, "execution": {"num_microbatches": 2}, "phases": ramp})
    actual = [(each.batch_size, each.num_microbatches) for each in step_ranges(config)]
    assert actual == [(1, 1), (6, 1), (8, 2), (10, 2), (12, 2)]
    check_devices(config, 1)


def test_a_batch_of_the_ramp_must_divide_too():
    check_devices(CONFIG, 2)
    with pytest.raises(ValueError, match=r"in phase begin: data\.batch_ramp has steps of 2 sequences, 64"):
        check_devices(CONFIG, 4)
    with pytest.raises(
        ValueError, match=r"in phase begin: data\.batch_size is 8; it must be a multiple of 16"
    ):
        check_devices(Config.from_dict(VALUES | {"phases": [{"name": "begin", "steps": 1}]}), 16)


def test_text_and_back():
    assert Config.from_text(CONFIG.to_text()) == CONFIG
    assert json.loads(CONFIG.to_text())["train"]["num_steps"] == 21


def test_phases_are_set_by_name():
    options = [
        "--config.phases.midtrain.optimizer.learning_rate=1e-4",
        "--config.phases.pretrain_1.tokens=2**24",
        "--config.phases.pretrain_1.tokens=1000000000000",
        "--config.phases.finetune.execution.remat=none",
        "--config.data.mixtures.midtrain.weights=(1, 1, 1, 1, 1, 1)",
    ]
    config = load_config("configs/zaya1_8b.py", options)
    first, _, midtrain, finetune = config.resolved_phases
    assert first.config.train.num_steps == 20_000 + -(-(10**12 - 10**4 * 3 * 2**22) // 2**24)
    assert midtrain.config.optimizer.learning_rate == 1e-4
    assert finetune.config.execution.remat == "none"
    assert config.data.mixtures[2].weights == (1.0,) * 6
    assert load_config("configs/zaya1_8b.py", []).resolved_phases[2].config.optimizer.learning_rate == 2e-4
