"""Tables of benchmarks with synthetic measurements on a terminal of 80 columns: nothing is truncated."""

import numpy as np
import pytest
from scipy import stats

from pallas_kernels.catalogue import SIZES, cases
from zaya_jax.bench.kernels import kernel_times
from zaya_jax.bench.kernels.other_libraries import others
from zaya_jax.bench.storage import data
from zaya_jax.bench.training import optimizer_runs, optimizers


@pytest.fixture
def printed(monkeypatch, capsys):
    """Returns the cells of a printed table by row."""
    monkeypatch.setenv("COLUMNS", "80")

    def read():
        out = capsys.readouterr().out
        table = [line for line in out.splitlines() if line[:1] in "┏┃┡│└ "]
        assert table
        assert "…" not in out
        assert max(map(len, table)) <= 80
        return out

    return read


def test_data(printed):
    builds = [data.Build(seconds, 10.0, 4_000_000, 300 * 2**20, 250 * 2**20) for seconds in (9.0, 8.0, 2.0)]
    reads = {
        data.LOADER: [data.Read(5e6, 2**28), data.Read(4e6, 2**29)],
        data.MAPPED: [data.Read(6e6, 2**28)],
    }
    data.report(builds, reads, 36 * 2**20)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed().splitlines()]
    assert any(row[1:] == ["8.0", "10.0", "500,000", "4.72", "300.00 MiB", "250.00 MiB"] for row in rows)
    assert ["loader", "5,000,000", "95.4", "512.00 MiB"] in rows


NOISE = np.array([0.01, -0.02, 0.0, 0.03, -0.02])


def fake_loss(run):
    """Doubling the steps gains 0.5, Muon 0.25; the best rates are in the middle of their ranges."""
    variant = optimizer_runs.VARIANTS[run.variant]
    off = np.log2(run.matrix_rate / variant.matrix_rate) ** 2 + np.log2(run.other_rate / 6e-3) ** 2
    noise = 0 if run.seed == optimizer_runs.TUNING_SEED else NOISE[run.seed] * (1 + (run.variant == "muon"))
    return 4 + (run.num_steps < 100) / 2 - (run.variant == "muon") / 4 + noise + off / 100


def test_optimizers(printed, monkeypatch, tmp_path):
    """Equal trials, seeds that tuning does not use, and the p of the t distribution's formula."""
    trained = []

    def train(run):
        trained.append(run)
        return fake_loss(run)

    def trials_and_seeds(comparison, *, num_jobs):
        with monkeypatch.context() as patched:
            patched.setattr(optimizer_runs, "trainer", lambda *_: train)
            keys = [("small", variant) for variant in comparison.variants]
            return {key: optimizer_runs._train_all(comparison, *key) for key in keys}

    monkeypatch.setattr(optimizers, "trials_and_seeds", trials_and_seeds)
    # A step of Muon takes 1.25 times as long.
    monkeypatch.setattr(optimizers, "modelled_seconds", lambda _, run: 1 + (run.variant == "muon") / 4)
    options = ["--sizes=small", "--variants", "adamw", "muon", "--trials=5", "--steps=100"]
    optimizers.main([*options, f"--folder={tmp_path}"])
    tables = printed()
    rows = [line.replace("│", " ").split() for line in tables.splitlines()]
    settings, results = [row[1:] for row in rows if row[:1] == ["muon"]]
    tuning = [run for run in trained if run.seed == optimizer_runs.TUNING_SEED]
    trials = {name: [run for run in tuning if run.variant == name] for name in ("adamw", "muon")}
    assert len(trials["adamw"]) == len(trials["muon"]) == 5
    assert [r.other_rate for r in trials["adamw"]] == [r.other_rate for r in trials["muon"]]
    best = min(trials["muon"], key=fake_loss)
    assert settings[:2] == [f"{best.matrix_rate:g}", f"{best.other_rate:g}"]
    assert settings[-1] == "1.250"
    assert sorted((run.seed, run.num_steps) for run in trained if run.variant == "muon")[:-5] == [
        (seed, steps) for seed in range(5) for steps in (50, 100)
    ]
    off = fake_loss(best) - 4.25
    difference = NOISE - 0.25
    t = difference.mean() / (difference.std(ddof=1) / 5**0.5)
    assert results[0] == f"{3.75 + off:.4f}"
    assert float(results[3]) == pytest.approx(2 * stats.t.sf(abs(t), 4), rel=0.05)
    assert results[4] == f"{3.75 + off + 0.5 * np.log2(1.25):.4f}"
    assert results[-1] == "1.41x"  # half of a doubling


def test_kernels(printed, monkeypatch):
    """Every operation in both directions, and all results of other libraries."""
    every = cases(SIZES["toy"])
    names = {
        case.name: [*case.implementations, *(other.name for other in others(case.name))] for case in every
    }
    monkeypatch.setattr(kernel_times.jax, "jit", lambda _: lambda *_: ())
    monkeypatch.setattr(kernel_times, "measure_ceilings", lambda *_: kernel_times.Ceilings(1e15, 1e12))
    monkeypatch.setattr(
        kernel_times,
        "passes",
        lambda case, _: [
            (each, dict.fromkeys(names[case.name]), case.forward) for each in ("forward", "gradients")
        ],
    )
    row = ["1,234.123", "1.23e-05", "1.23e-05", "99.1%", "1.2e-03"]
    monkeypatch.setattr(kernel_times, "compare", lambda _, calls, *__: [[name, *row] for name in calls])
    kernel_times.run(rounds=1)
    out = printed()
    lines, words = [line.split() for line in out.splitlines()], " ".join(out.split())
    for case in every:
        assert f"{case.name}, gradients" in words  # on two lines, if the name is long
        for name in names[case.name]:
            assert [*name.split(), *row] in lines
