"""Tables of benchmarks with synthetic measurements on a terminal of 80 columns: nothing is truncated."""

import types

import pytest

from pallas_kernels.catalogue import SIZES, cases
from zaya_jax.bench.kernels import experts, kernel_times
from zaya_jax.bench.kernels.other_libraries import others
from zaya_jax.bench.storage import data, data_process
from zaya_jax.bench.training import loss_memory, optimizer_share, optimizers, torch_comparison
from zaya_jax.bench.training.loss_memory import StepMemory

GIB = 2**30


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


def test_loss_memory(printed):
    step = StepMemory(
        chunk=16_384, logits=16 * GIB, temporaries=40 * GIB, arguments=3 * GIB // 4, needed=41 * GIB,
        available=GIB, resident=2 * GIB, added=40 * GIB,
    )  # fmt: skip
    loss_memory.report([step])
    (row,) = [line for line in printed().splitlines() if "16,384" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "16,384", "40.00 GiB", "16.00 GiB", "768.00 MiB", "2.00 GiB", "40.00 GiB",
    ]  # fmt: skip


def test_data(printed):
    build = {"seconds": 8.0, "cpu": 10.0, "tokens": 4e6, "peak": 300e6, "worker_peak": 250e6}
    result = {
        "build": build,
        "datasets": {"seconds": 20.0, "cpu": 35.0, "tokens": 4e6},
        "read": {"loader": 5e6, "mapped": 6e6},
        "read-memory": {"peak": 2**28},
        "build-long": build | {"peak": 2**29},
        "read-long": {"peak": 2**28},
    }
    data.report(result, {data_process.TEXT: 36 * 2**20, data_process.LONG_TEXT: 360 * 2**20})
    out = printed()
    assert "datasets.map, batches / ours, time and CPU time: 2.50, 3.50" in out
    assert "one by one" not in out
    (row,) = [line for line in out.splitlines() if line.startswith("│ 360.00 MiB")]
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["512.00 MiB", "238.42 MiB", "256.00 MiB"]


def test_experts(printed, monkeypatch):
    memory = types.SimpleNamespace(temp_size_in_bytes=3 * GIB // 2)
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory, cost_analysis=lambda: {"flops": 2.5e9})
    monkeypatch.setattr(experts, "compile_experts", lambda *_, **__: compiled)
    experts.run()
    out = printed()
    assert out.count("forward and backward") == 2
    assert "128.00 MiB" in out  # 16,384 rows of 2,048 float32
    assert "1.50 GiB" in out


def test_optimizer_share(printed, monkeypatch):
    monkeypatch.setattr(optimizer_share, "_step", lambda **_: None)
    monkeypatch.setattr(optimizer_share, "_replicated_optimizer", lambda: None)
    monkeypatch.setattr(
        optimizer_share, "best_seconds", lambda calls, rounds: dict(zip(calls, (0.6, 0.7, 0.8), strict=True))
    )
    optimizer_share.report(optimizer_share.measure(5), rounds=5)
    assert "57.1%" in printed()  # 0.8 of 0.6 + 0.8


SECONDS = {"ours": 0.01, "transformers": 0.1, "compiled": 0.08, "ceiling": 0.02}


@pytest.fixture
def timed(monkeypatch):
    """Synthetic times of all implementations; some of torch are compiled."""
    compiled = []

    def best_interleaved(programs, **_):
        compiled.extend(name for name in programs if name.endswith("compiled"))
        return {name: SECONDS[name.split(", ")[-1]] for name in programs if name != "torch.compile"}

    monkeypatch.setattr(torch_comparison.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(torch_comparison, "_difference", lambda: 1e-6)
    monkeypatch.setattr(torch_comparison, "best_interleaved", best_interleaved)
    return compiled


def test_torch(printed, timed):
    torch_comparison.run(rounds=5)
    lines = [" ".join(line.split()) for line in printed().splitlines()]
    # 8 x 256 tokens in 10, 100 and 80 ms.
    assert any("forward 204,800.0 20,480.0 10.00x 1.3x 25,600.0 8.00x" in line for line in lines)
    assert any("train step 204,800.0 20,480.0 10.00x 1.5x 25,600.0 8.00x" in line for line in lines)
    assert timed == ["forward, compiled", "train step, compiled"]


def test_torch_without_a_cxx_compiler(printed, timed, monkeypatch):
    in_turn = torch_comparison.best_interleaved

    def best_interleaved(programs, **options):
        if "torch.compile" in programs:
            raise RuntimeError('"torch.compile" failed: no g++\n\nand much more')
        return in_turn(programs, **options)

    monkeypatch.setattr(torch_comparison, "best_interleaved", best_interleaved)
    torch_comparison.run(rounds=5)
    out = printed()
    assert "10.00x" in out
    assert "25,600.0" not in out
    assert 'because it fails here: "torch.compile" failed: no g++' in " ".join(out.split())
    assert "much more" not in out
    assert not timed


def test_optimizers(printed, monkeypatch):
    monkeypatch.setattr(
        optimizers, "_curve", lambda *_: {step: 4 - step / 100 for step in range(10, 121, 10)}
    )
    optimizers.run()
    assert printed().count("2.8000") > 3


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
    lines = [line.split() for line in printed().splitlines()]
    for case in every:
        assert [f"{case.name},", "gradients"] in lines
        for name in names[case.name]:
            assert [*name.split(), *row] in lines
