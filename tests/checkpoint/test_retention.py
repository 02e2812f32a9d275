"""Checkpoints that are kept: by the rules, on the disk, and on a disk that is nearly full."""

import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.checkpoint import Checkpoints, Retention, newest_step
from zaya_jax.checkpoint.format.layout import all_steps, folder_bytes
from zaya_jax.checkpoint.retention import rules_by_step, steps_to_make_room, steps_to_remove

NAN = math.nan
ALL_RULES = Retention(newest=2, every=100, best=True, phase_ends=frozenset({30}))


@pytest.mark.parametrize(
    ("steps", "retention", "losses", "removed"),
    [
        ([4, 8, 12], Retention(newest=1), {}, [4, 8]),
        ([4, 8, 12], Retention(newest=5), {}, []),
        ([99, 100, 101, 200, 201, 202], Retention(newest=1, every=100), {}, [99, 101, 201]),
        # The best of the existing steps, not of all scored ones, and never a step without a loss.
        ([4, 8, 12, 16], Retention(newest=1, best=True), {2: 0.5, 4: 3.0, 8: 2.0, 12: NAN}, [4, 12]),
        ([4, 8, 12], Retention(newest=1, best=True), {4: 2.0, 8: 2.0}, [4]),
        ([4, 8, 12], Retention(newest=1, best=True), {4: NAN, 8: math.inf}, [4, 8]),
        ([10, 20, 30, 40], Retention(newest=1, phase_ends=frozenset({10, 30})), {}, [20]),
        ([0, 30, 50, 60, 100, 110, 120], ALL_RULES, {50: 1.0, 60: 2.0}, [60]),
    ],
)
def test_steps_that_no_rule_keeps_are_removed(steps, retention, losses, removed):
    assert steps_to_remove(steps, retention, losses=losses, whole=steps[-1]) == removed
    assert steps_to_remove(steps[::-1], retention, losses=losses, whole=steps[-1]) == removed


def test_rules_have_names():
    assert rules_by_step([30, 60, 100, 110], ALL_RULES, losses={60: 1.0}) == {
        30: ("phase end",), 60: ("best",), 100: ("newest", "every"), 110: ("newest",)
    }  # fmt: skip


STEPS = st.sets(st.integers(0, 60), min_size=1)
RETENTIONS = st.builds(
    Retention,
    newest=st.integers(1, 5),
    every=st.none() | st.integers(1, 20),
    best=st.booleans(),
    phase_ends=st.frozensets(st.integers(0, 60), max_size=4),
    min_free_bytes=st.none() | st.integers(0, 500),
)
LOSSES = st.dictionaries(st.integers(0, 60), st.sampled_from([1.0, 2.0, NAN]))


@given(steps=STEPS, retention=RETENTIONS, losses=LOSSES, data=st.data())
def test_no_rule_is_violated_and_a_run_can_always_resume(steps, retention, losses, data):
    """Also if the newest steps are damaged and only an older one is intact."""
    whole = data.draw(st.sampled_from(sorted(steps)))
    removed = set(steps_to_remove(steps, retention, losses=losses, whole=whole))
    assert removed < steps
    assert whole not in removed
    for step in removed:
        assert sum(step < other for other in steps) >= retention.newest
        assert not (retention.every and step % retention.every == 0)
        assert step not in retention.phase_ends
        if retention.best and math.isfinite(losses.get(step, NAN)):
            assert any(other > step or losses.get(other, NAN) < losses[step] for other in steps - removed)
    assert len(steps - removed - retention.phase_ends) <= retention.newest + 2 or retention.every


@given(steps=STEPS, retention=RETENTIONS, losses=LOSSES, free=st.integers(0, 500))
def test_only_steps_kept_as_newest_are_removed_for_space(steps, retention, losses, free):
    sizes = dict.fromkeys(steps, 50)
    floor = retention.min_free_bytes
    try:
        chosen = steps_to_make_room(
            sizes, retention, losses=losses, whole=max(steps), step_bytes=60, free_bytes=free
        )
    except ValueError:
        assert floor is not None
        assert free - 60 < floor
        return
    assert max(steps) not in chosen
    rules = rules_by_step(steps, retention, losses=losses)
    assert all(rules[step] in ((), ("newest",)) for step in chosen)
    assert floor is None or free + 50 * len(chosen) - 60 >= floor
    # No step is removed in vain.
    assert not chosen or free + 50 * (len(chosen) - 1) - 60 < floor


def test_a_step_that_leaves_too_little_space_is_an_error():
    rules = Retention(newest=3, every=4, min_free_bytes=2**30)
    with pytest.raises(
        ValueError, match=r"needs 64 B, 1.00 GiB of the disk are free, and train.min_free_gib"
    ):
        steps_to_make_room(
            {4: 64, 8: 64, 9: 64}, rules, losses={}, whole=9, step_bytes=64, free_bytes=2**30 + 63
        )


def save(folder: pathlib.Path, steps, retention: Retention, losses=dict) -> None:
    with Checkpoints(folder, retention=retention, losses=losses) as checkpoints:
        for step in steps:
            weights = {"a": jax.device_put(np.random.default_rng(step).normal(size=10_000))}
            checkpoints.save(step, weights=weights, training={"step": np.int32(step)})


def test_steps_are_removed_once_the_next_is_complete(tmp_path):
    """Keeps the best step by the losses known at the save; without that rule, losses are not read."""
    rules = Retention(newest=1, every=6, best=True, phase_ends=frozenset({3}))
    save(tmp_path, range(1, 9), rules, lambda: {1: 3.0, 2: 1.0, 4: 2.0})
    assert all_steps(tmp_path) == [2, 3, 6, 8]
    save(tmp_path, [9], Retention(newest=2), lambda: pytest.fail("nobody needs them"))
    assert all_steps(tmp_path) == [8, 9]


def test_the_step_that_was_just_written_is_kept(tmp_path):
    """A later step exists, but is not known to be intact."""
    save(tmp_path, [4, 8], Retention(newest=2))
    (tmp_path / "checkpoints/8/manifest.json").write_text("{}")
    save(tmp_path, [6], Retention(newest=1))
    assert newest_step(tmp_path) == 6


class Disk:
    """Simulates a disk of a given size, of which a run's checkpoints take their share."""

    def __init__(self, folder: pathlib.Path, size: int):
        self._folder, self._size = folder, size

    def usage(self, _):
        used = folder_bytes(self._folder)
        return shutil._ntuple_diskusage(self._size, used, self._size - used)


def test_older_steps_are_removed_for_space_and_the_newest_never(tmp_path, monkeypatch):
    save(tmp_path, [1], Retention(newest=9))
    one = folder_bytes(tmp_path)
    disk = Disk(tmp_path, 4 * one + one // 2)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    rules = Retention(newest=9, every=4, min_free_bytes=one)
    # Three steps fit: each save removes the oldest step that is only kept as one of the newest.
    save(tmp_path, range(2, 10), rules)
    assert all_steps(tmp_path) == [4, 8, 9]
    with pytest.raises(ValueError, match=r"it needs .* to stay free; the latest one is of step 9; fix"):
        save(tmp_path, [10], rules)
    assert all_steps(tmp_path) == [4, 8, 9]
