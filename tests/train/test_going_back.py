"""A run whose loss jumps up goes back, and is then the run that never read those batches."""

import json
import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import build_small_corpus, small_values

from zaya_jax.aegis.journal import BEGAN, WENT_BACK, read_events
from zaya_jax.config import Config
from zaya_jax.train import programs
from zaya_jax.train.loop import train
from zaya_jax.train.metrics import read_metrics
from zaya_jax.train.passed_over import (
    NOTHING_PASSED_OVER,
    PASSED_OVER_FILE,
    PassedOver,
    read_passed_over,
    write_passed_over,
)
from zaya_jax.train.replicas import checksum

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


def arrays(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.variables)]


def events_of(folder, kind):
    return [event for event in read_events(folder) if event["event"] == kind]


def test_it_is_the_run_that_never_read_those_batches(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_FAULT", FAULT)
    spiked = train(config_of(tmp_path / "spiked", corpus))
    (event,) = events_of(tmp_path / "spiked", WENT_BACK)
    assert (event["first"], event["last"], event["to"]) == (63, 69, 60)
    assert read_passed_over(tmp_path / "spiked") == PassedOver(((63, 69),))

    monkeypatch.delenv("ZAYA_FAULT")
    other = config_of(tmp_path / "other", corpus)
    undisturbed = train(other)
    shutil.rmtree(tmp_path / "other/checkpoints/80")
    write_passed_over(other.run_folder, PassedOver(((63, 69),)))
    expected = train(other)
    assert any((a != b).any() for a, b in zip(arrays(undisturbed), arrays(expected), strict=True))
    for mine, theirs in zip(arrays(spiked), arrays(expected), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    rows = [read_metrics(folder, "train") for folder in (tmp_path / "spiked", tmp_path / "other")]
    np.testing.assert_equal(*([[row["loss"] for row in each] for each in rows]))
    assert int(spiked.state.skipped_steps) == 7
    # Whoever goes on has a checkpoint to verify and read, and whoever begins has none.
    made, restored = (event["seconds"]["restore"] for event in events_of(other.run_folder, BEGAN))
    assert restored > 10 * made


def test_who_is_told_alone_goes_on(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_FAULT", FAULT)
    train(config_of(tmp_path / "run", corpus, on_spike="tell"))
    assert events_of(tmp_path / "run", WENT_BACK) == []
    assert events_of(tmp_path / "run", "spiked")[0]["first"] == 64
    assert not (tmp_path / "run" / PASSED_OVER_FILE).exists()


def test_one_more_than_a_run_may_have_ends_it(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_FAULT", FAULT)
    with pytest.raises(ValueError, match=r"watch.most_spikes is 0: try a smaller"):
        train(config_of(tmp_path / "run", corpus, most_spikes=0))
    assert events_of(tmp_path / "run", "failed")


def test_what_is_passed_over_is_written_and_read(tmp_path):
    assert read_passed_over(tmp_path) == NOTHING_PASSED_OVER
    ranges = PassedOver().and_also(3, 5).and_also(9, 9)
    write_passed_over(tmp_path, ranges)
    assert read_passed_over(tmp_path) == ranges
    assert [step for step in range(12) if step in ranges] == [3, 4, 5, 9]


@pytest.mark.parametrize("steps", [None, 3, [[1]], [[5, 3]], [[0, 3]], [["1", 2]], [[True, 3]]])
def test_a_file_of_others_is_refused(tmp_path, steps):
    (tmp_path / PASSED_OVER_FILE).write_text(json.dumps({"steps": steps}))
    with pytest.raises(ValueError, match='must have "steps": a list of'):
        read_passed_over(tmp_path)


def test_each_bit_of_an_array_changes_its_checksum():
    """All bits of all elements, of each width."""
    generator = np.random.default_rng(0)
    found = jax.jit(lambda array: checksum({"a": array, "b": jnp.ones(())}))
    for dtype, unsigned in ((jnp.float32, np.uint32), (jnp.bfloat16, np.uint16), (jnp.int32, np.uint32)):
        given = np.asarray(jnp.asarray(generator.standard_normal((3, 5)), dtype))
        expected = int(found(given))
        for place in range(given.size):
            for bit in range(8 * given.dtype.itemsize):
                turned = given.copy()
                turned.reshape(-1).view(unsigned)[place] ^= unsigned(1 << bit)
                assert int(found(turned)) != expected


def test_the_step_is_compiled_once_while_the_state_is_read(corpus, tmp_path, monkeypatch):
    """In another thread, before the main one has its state."""
    monkeypatch.delenv("ZAYA_FAULT", raising=False)
    config = config_of(tmp_path / "run", corpus)
    train(config)
    shutil.rmtree(tmp_path / "run/checkpoints/80")
    jax.clear_caches()
    programs._make_programs.cache_clear()
    found = []

    class Compiled(logging.Handler):
        def emit(self, record):
            if "Compiling jit(train_step)" in record.getMessage():
                found.append(record.threadName)

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Compiled()
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)  # of all threads, other than jax.log_compiles
    try:
        train(config)
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.removeHandler(handler)
    assert found == ["compile"]
