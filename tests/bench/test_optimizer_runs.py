"""Runs of `zaya bench optimizers` equal those of `zaya train`, and are not repeated; their modelled time."""

import dataclasses

import pytest
from small_runs import build_small_corpus, small_config

from zaya_jax.bench.training import optimizer_runs
from zaya_jax.bench.training.optimizer_runs import SIZES, OptimizerComparison, Size, trainer, trials
from zaya_jax.bench.training.optimizers import modelled_seconds
from zaya_jax.plan.arithmetic import operations
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    """A comparison on a generated corpus of bytes."""
    build_small_corpus(tmp_path / "corpus")
    small, run_config = small_config(run_folder=tmp_path, corpus=tmp_path), optimizer_runs.run_config
    monkeypatch.setattr(optimizer_runs, "load_config", lambda *_: small)

    def of_bytes(comparison, run):
        config = run_config(comparison, run)
        return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="byte"))

    monkeypatch.setattr(optimizer_runs, "run_config", of_bytes)
    monkeypatch.setattr(optimizer_runs, "EVAL_SEQUENCES", 16)
    return OptimizerComparison(
        folder=tmp_path, sizes={"small": Size(64, 2, 12)}, variants=("muonh",), num_trials=2, num_seeds=2
    )


@pytest.mark.campaign
@pytest.mark.parametrize("variant", ["adamw", "muonh"])
def test_a_run_equals_that_of_zaya_train(comparison, variant):
    """With rates from a table instead of constants; losses differ by the rounding of rates."""
    tuning = trials(comparison, "small", variant)
    run_all = trainer(comparison, tuning)
    runs = [tuning[0], dataclasses.replace(tuning[1], seed=3, num_steps=12)]
    losses = list(map(run_all, runs))
    for run, loss in zip(runs, losses, strict=True):
        config = optimizer_runs.run_config(comparison, run)
        train(config)
        (row,) = read_metrics(config.run_folder, "validation")
        assert (row["step"], row["loss"]) == (run.num_steps, pytest.approx(loss, rel=1e-4))
    assert abs(losses[0] - losses[1]) > 1e-2
    # A second comparison in the same folder reads the results.
    assert list(map(trainer(comparison, tuning), runs)) == losses
    assert len((comparison.folder / "results.jsonl").read_text().splitlines()) == 2


def test_modelled_products_of_muon_are_in_bfloat16(tmp_path):
    """As in the presets for GPUs. The runs are in float32, whose products take eight times as long there."""
    comparison = OptimizerComparison(
        folder=tmp_path, sizes=SIZES, variants=("adamw", "muon"), num_trials=1, num_seeds=1
    )
    adamw, muon = (trials(comparison, "large", variant)[0] for variant in comparison.variants)
    more = modelled_seconds(comparison, muon) - modelled_seconds(comparison, adamw)
    flops = operations(optimizer_runs.run_config(comparison, muon), 1).optimizer
    # 40% of the data sheet's 1,307.4 TFLOP/s; Muon reads and writes less state, which saves time.
    products = flops / (0.4 * 1.3074e15)
    assert 0.5 * products < more < products
