"""A run with a loss spike rolls back, and then equals a run that never read those batches."""

import json
import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import build_small_corpus, small_values

from zaya_jax.aegis.watch.fault_injection import FaultInjection, parse_faults
from zaya_jax.config import Config
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import BEGAN, SKIPPED_RANGES_FILE, WENT_BACK
from zaya_jax.train import compiled_programs
from zaya_jax.train.hooks.skipped_ranges import (
    NO_SKIPPED_RANGES,
    SkippedRanges,
    read_skipped_ranges,
    write_skipped_ranges,
)
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.step.replica_checksums import checksum
from zaya_jax.train.trainer import train

# Of the run, of which the newest jax has others.
pytestmark = pytest.mark.slow
FAULT = "spike@step=64:steps=6"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    return build_small_corpus(tmp_path_factory.mktemp("corpora") / "small").folder


def config_of(folder, corpus, **watch) -> Config:
    values = small_values(run_folder=str(folder), corpus=str(corpus))
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    values["train"] |= {
        "num_steps": 80, "checkpoint_every": 20, "eval_every": 80, "log_every": 2, "keep_checkpoints": 3,
    }  # fmt: skip
    values["optimizer"]["learning_rate"] = 3e-3
    values["watch"] = {"spike_steps": 3, "spike_deviations": 5.0, "spike_window": 16} | watch
    return Config.from_dict(values)


def train_with_faults(config):
    return train(config, hooks=[FaultInjection(parse_faults(FAULT), config.run_folder, process=0)])


def arrays(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.variables)]


def events_of(folder, kind):
    return [event for event in read_events(folder) if event["event"] == kind]


def test_a_rollback_equals_a_run_that_never_read_those_batches(corpus, tmp_path):
    spiked = train_with_faults(config_of(tmp_path / "spiked", corpus))
    (event,) = events_of(tmp_path / "spiked", WENT_BACK)
    assert (event["first"], event["last"], event["to"]) == (63, 69, 60)
    assert read_skipped_ranges(tmp_path / "spiked") == SkippedRanges(((63, 69),))

    other = config_of(tmp_path / "other", corpus)
    undisturbed = train(other)
    shutil.rmtree(tmp_path / "other/checkpoints/80")
    write_skipped_ranges(other.run_folder, SkippedRanges(((63, 69),)))
    expected = train(other)
    assert any((a != b).any() for a, b in zip(arrays(undisturbed), arrays(expected), strict=True))
    for mine, theirs in zip(arrays(spiked), arrays(expected), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    rows = [read_metrics(folder, "train") for folder in (tmp_path / "spiked", tmp_path / "other")]
    np.testing.assert_equal(*([[row["loss"] for row in each] for each in rows]))
    assert int(spiked.state.skipped_steps) == 7
    # A resumed run verifies and reads a checkpoint, which a new run does not have.
    made, restored = (event["seconds"]["restore"] for event in events_of(other.run_folder, BEGAN))
    assert restored > 10 * made


def test_a_spike_can_be_reported_only(corpus, tmp_path):
    train_with_faults(config_of(tmp_path / "run", corpus, on_spike="warn"))
    assert events_of(tmp_path / "run", WENT_BACK) == []
    assert events_of(tmp_path / "run", "spiked")[0]["first"] == 64
    assert not (tmp_path / "run" / SKIPPED_RANGES_FILE).exists()


def test_the_number_of_rollbacks_is_limited(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"watch.max_rollbacks is 0: try a smaller"):
        train_with_faults(config_of(tmp_path / "run", corpus, max_rollbacks=0))
    assert events_of(tmp_path / "run", "failed")


def test_skipped_ranges_are_written_and_read(tmp_path):
    assert read_skipped_ranges(tmp_path) == NO_SKIPPED_RANGES
    ranges = SkippedRanges().with_range(3, 5).with_range(9, 9)
    write_skipped_ranges(tmp_path, ranges)
    assert read_skipped_ranges(tmp_path) == ranges
    assert [step for step in range(12) if step in ranges] == [3, 4, 5, 9]


@pytest.mark.parametrize("steps", [None, 3, [[1]], [[5, 3]], [[0, 3]], [["1", 2]], [[True, 3]]])
def test_an_invalid_file_of_ranges_is_refused(tmp_path, steps):
    (tmp_path / SKIPPED_RANGES_FILE).write_text(json.dumps({"steps": steps}))
    with pytest.raises(ValueError, match='must have "steps": a list of'):
        read_skipped_ranges(tmp_path)


def test_each_bit_of_an_array_changes_its_checksum():
    """All bits of all elements, of each width."""
    generator = np.random.default_rng(0)
    checksum_of = jax.jit(lambda array: checksum({"a": array, "b": jnp.ones(())}))
    for dtype, unsigned in ((jnp.float32, np.uint32), (jnp.bfloat16, np.uint16), (jnp.int32, np.uint32)):
        given = np.asarray(jnp.asarray(generator.standard_normal((3, 5)), dtype))
        expected = int(checksum_of(given))
        for place in range(given.size):
            for bit in range(8 * given.dtype.itemsize):
                flipped = given.copy()
                flipped.reshape(-1).view(unsigned)[place] ^= unsigned(1 << bit)
                assert int(checksum_of(flipped)) != expected


@pytest.mark.campaign
def test_the_step_is_compiled_once_while_the_state_is_read(corpus, tmp_path):
    """In another thread, while the main thread restores the state."""
    config = config_of(tmp_path / "run", corpus)
    train(config)
    shutil.rmtree(tmp_path / "run/checkpoints/80")
    jax.clear_caches()
    compiled_programs._make_programs.cache_clear()
    actual = []

    class Compiled(logging.Handler):
        def emit(self, record):
            if "Compiling jit(train_step)" in record.getMessage():
                actual.append(record.threadName)

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Compiled()
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)  # of all threads, other than jax.log_compiles
    try:
        train(config)
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.removeHandler(handler)
    assert actual == ["compile"]
