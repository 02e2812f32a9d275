"""`zaya bench step`: the measured step, its table, and what it refuses."""

import dataclasses
import json

import jax
import pytest
from rich.console import Console

from zaya_jax.bench.kernels.kernel_times import Ceilings
from zaya_jax.bench.training import step, step_runs
from zaya_jax.bench.training.step import Bounds
from zaya_jax.bench.training.step_runs import StepTimes
from zaya_jax.errors import UserError
from zaya_jax.options import load_config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.plan.arithmetic import step_seconds
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import DEVICES, H100, device_of_kind
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.shares import for_platform
from zaya_jax.train.compiled_programs import make_programs
from zaya_jax.train.step.state import init_state, make_setup

SMALL = [
    "--config.model.hidden_size=32",
    "--config.model.vocab_size=2048",
    "--config.model.num_hidden_layers=2",
    "--config.data.sequence_length=16",
]
TIMES = StepTimes(
    name="xla",
    implementations={"cca": "xla"},
    seconds=(0.2, 0.4, 0.3),
    num_bytes=2 * 2**30,
    estimated_bytes=3 * 2**30,
    loss=5.0,
    gradient_norm=1.0,
)
FAST = dataclasses.replace(TIMES, name="pallas", seconds=(0.1, 0.1, 0.3), loss=5.01)
BOUNDS = Bounds(flops=1e12, num_bytes=10**10, ceilings=Ceilings(2e13, 1e12), estimate=0.45)


def small(*words):
    return load_config("configs/tiny.py", [*SMALL, *words])


def test_the_measured_step_is_that_of_training():
    """Its first loss is that of the initial weights, which the program of evaluations computes."""
    config = small("--config.data.batch_size=2")
    (times,) = step_runs.measure(config, ["default"], rounds=2)
    assert len(times.seconds) == 2
    assert min(times.seconds) > 0
    assert times.implementations["cca"] == "xla"
    mesh, setup = data_mesh(jax.devices()), make_setup(config)
    state = init_state(config, setup)
    programs = make_programs(state, setup=setup, mesh=mesh)
    sums = programs.evaluate(state, step_runs.random_batch(config))
    assert times.loss == pytest.approx(float(sums.loss / sums.num_targets), rel=1e-6)
    assert times.estimated_bytes == sum(memory_by_kind(for_platform(config, "cpu"), 1).values())


def test_the_command_prints_and_writes_the_figures(tmp_path, capsys):
    file = tmp_path / "step.json"
    words = [*SMALL, "--micro-batch=2", "--rounds=1", f"--json={file}", "--config.execution.node_devices=8"]
    step.main(words)
    out = capsys.readouterr().out
    assert "2 layers of width 32, 2 x 16 tokens, muon" in out
    assert "the bound is" in out
    written = json.loads(file.read_text())
    (times,) = written["steps"]
    assert times["name"] == "default"
    assert written["bounds"]["estimate"] is None
    assert f"{times['loss']:.4f}" in out


def test_microbatches_enlarge_the_batch():
    options = step._parser().parse_with_fields(["--micro-batch=3"])[0]
    config = step.prepare(small("--config.execution.num_microbatches=2"), options)
    assert config.data.batch_size == 3 * 2 * jax.device_count()


def test_the_table_and_the_sentences(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(width=80, record=True)
    console.print(step.table([TIMES, FAST], BOUNDS, tokens=6000))
    out = console.export_text()
    assert "…" not in out
    (row,) = (line.split() for line in out.splitlines() if "xla" in line)
    # 1 TFLOP in 0.3 s, whose bound is 50 ms.
    assert row == ["xla", "300.0", "20,000", "3.33", "16.7%", "2.00", "GiB", "1.50", "5.0000", "1.0000"]
    bound, ratio, plan = step.sentences([TIMES, FAST], BOUNDS)
    assert "50.0 ms" in bound
    assert ratio == "pallas: 2.00 times as fast as xla (median of rounds; 1.00 to 4.00)"
    assert "450.0 ms" in plan
    assert "1.50 times what xla takes" in plan


def test_memory_traffic_can_be_the_bound():
    assert BOUNDS.seconds == 0.05
    assert dataclasses.replace(BOUNDS, num_bytes=10**11).seconds == 0.1


@pytest.mark.parametrize("value", [5.2, float("nan")])
def test_results_that_differ_are_an_error(value):
    step_runs.check_agreement([TIMES, FAST])
    with pytest.raises(UserError, match=r"loss of the first step is .* with pallas and 5 with xla"):
        step_runs.check_agreement([TIMES, dataclasses.replace(FAST, loss=value)])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--config.dpo.beta=0.1", "--config.train.init_from=runs/sft"],
            "zaya bench step trains on the next token",
        ),
        (["--config.watch.checksums=True"], "watch.checksums is True; zaya bench step repeats one batch"),
        (["--micro-batch=0"], "--micro-batch is 0; it must be at least 1"),
        (["--rounds=0"], "--rounds is 0; it must be at least 1"),
        (["--config.data.batch_size=3", "--config.execution.num_microbatches=2"], "batch_size is 3"),
    ],
)
def test_bad_options_are_refused_before_anything_is_compiled(words, sentence):
    with pytest.raises(UserError, match=sentence):
        step.main([*SMALL, *words])


def test_a_cpu_compares_nothing_by_default():
    assert step_runs.default_forms(small()) == ["default"]


def test_equal_sets_are_measured_once(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # The devices are still those of a CPU, whose default is XLA.
    assert step_runs.default_forms(small()) == ["default", "pallas"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", None),  # another board, with another peak
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_a_device_is_found_by_its_kind(kind, name):
    assert device_of_kind(kind) == (DEVICES[name] if name else None)


def test_the_estimate_is_the_arithmetic_of_the_plan(monkeypatch):
    monkeypatch.setattr(step, "device_of_kind", lambda kind: H100)
    monkeypatch.setattr(step, "measure_ceilings", lambda *_: BOUNDS.ceilings)
    config = small("--config.data.batch_size=2")
    seconds = step_seconds(config, Cluster(device=H100, nodes=1, gpus_per_node=1))
    assert step.step_bounds(config).estimate == pytest.approx(
        seconds["matrix units"] / 0.4 + sum(v for k, v in seconds.items() if k != "matrix units")
    )
