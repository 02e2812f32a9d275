"""What benchmarks print on a terminal of 80 columns, with made-up measurements: nothing is cut."""

import types

import pytest
from rich.console import Console

from pallas_kernels.catalogue import SIZES, cases
from zaya_jax.bench import (
    balancing,
    experts,
    kernel_times,
    loss_memory,
    optimizer_share,
    optimizers,
    torch_comparison,
)
from zaya_jax.bench.loss_memory import StepMemory
from zaya_jax.bench.other_libraries import others
from zaya_jax.config import BalancingConfig

GIB = 2**30


@pytest.fixture
def said(monkeypatch, capsys):
    """The lines of a table that was printed: what its cells hold."""
    monkeypatch.setenv("COLUMNS", "80")

    def read():
        out = capsys.readouterr().out
        table = [line for line in out.splitlines() if line[:1] in "┏┃┡│└ "]
        assert table
        assert "…" not in out
        assert max(map(len, table)) <= 80
        return out

    return read


def test_balancing(said):
    configs = [BalancingConfig(rule="adamw", learning_rate=1e-3)]
    found = [[balancing.Evenness(steps, 0.99) for steps in (None, 123, None, 234, None)]]
    Console(soft_wrap=True).print(balancing._table(configs, found))
    assert " adamw " in said()


def test_loss_memory(said):
    step = StepMemory(
        chunk=16_384, logits=16 * GIB, temporaries=40 * GIB, arguments=3 * GIB // 4, needed=41 * GIB,
        available=GIB, resident=2 * GIB, added=40 * GIB,
    )  # fmt: skip
    loss_memory.report([step])
    (row,) = [line for line in said().splitlines() if "16,384" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "16,384", "40.00 GiB", "16.00 GiB", "768.00 MiB", "2.00 GiB", "40.00 GiB",
    ]  # fmt: skip


def test_experts(said, monkeypatch):
    memory = types.SimpleNamespace(temp_size_in_bytes=3 * GIB // 2)
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory, cost_analysis=lambda: {"flops": 2.5e9})
    monkeypatch.setattr(experts, "compile_experts", lambda *_, **__: compiled)
    experts.run()
    out = said()
    assert out.count("forward and backward") == 2
    assert "128.00 MiB" in out  # 16,384 rows of 2,048 float32
    assert "1.50 GiB" in out


def test_optimizer_share(said, monkeypatch):
    monkeypatch.setattr(optimizer_share, "_step", lambda **_: None)
    monkeypatch.setattr(optimizer_share, "_replicated_optimizer", lambda: None)
    monkeypatch.setattr(
        optimizer_share, "best_seconds", lambda calls, rounds: dict(zip(calls, (0.6, 0.7, 0.8), strict=True))
    )
    optimizer_share.measure(5)
    assert "57.1%" in said()  # 0.8 of 0.6 + 0.8


def test_torch(said, monkeypatch):
    monkeypatch.setattr(torch_comparison.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(torch_comparison, "_difference", lambda: 1e-6)
    monkeypatch.setattr(
        torch_comparison,
        "best_in_turn",
        lambda programs, rounds: dict(zip(programs, (0.01, 0.1, 0.02), strict=True)),
    )
    torch_comparison.run(rounds=5)
    assert "204,800.0" in said()  # 8 x 256 tokens in 10 ms


def test_optimizers(said, monkeypatch):
    monkeypatch.setattr(
        optimizers, "_curve", lambda *_: {step: 4 - step / 100 for step in range(10, 121, 10)}
    )
    optimizers.run()
    assert said().count("2.8000") > 3


def test_kernels(said, monkeypatch):
    """Every operation, both passes, and all that others have for it."""
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
    lines = [line.split() for line in said().splitlines()]
    for case in every:
        assert [f"{case.name},", "gradients"] in lines
        for name in names[case.name]:
            assert [*name.split(), *row] in lines
