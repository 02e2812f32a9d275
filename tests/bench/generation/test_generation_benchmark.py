"""Requests of `zaya bench generation` and its table, at sizes that take seconds."""

import jax
import numpy as np
import pytest
from rich.console import Console
from small_models import EXECUTION, SMALL

from zaya_jax.bench.generation import generation, load, output
from zaya_jax.bench.generation.load import Load, ShortPrompts, arrivals
from zaya_jax.convert.pytorch.in_memory import save_pytorch
from zaya_jax.model.zaya import Zaya


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation") / "network"
    model = Zaya(SMALL, EXECUTION)
    variables = jax.jit(model.init)(jax.random.key(11), np.zeros((1, 4), np.int32))
    save_pytorch(folder, model, variables, dtype="float32")
    return str(folder)


# Loading takes seconds, and `tests/inference/engine/test_engine.py` checks the engine's answers.
@pytest.mark.campaign
def test_an_engine_under_load_serves_all(network, monkeypatch):
    monkeypatch.setattr(load, "NUM_REQUESTS", 5)
    monkeypatch.setattr(load, "SLOTS", 2)
    monkeypatch.setattr(load, "PROMPTS", (2, 9))
    monkeypatch.setattr(load, "NEW_TOKENS", (2, 6))
    result = load.make_loads(network)()
    assert [each.share for each in result] == list(load.SHARES)
    for each in result:
        assert 0 < each.first_p50 <= each.first_p99
        assert 0 < each.next_p50 <= each.next_p99
        assert each.tokens_per_second > 0
    assert result[3].rate == pytest.approx(4 * result[0].rate)


@pytest.mark.campaign
def test_short_prompts_are_all_answered(network, monkeypatch):
    monkeypatch.setattr(load, "NUM_SHORT", 5)
    monkeypatch.setattr(load, "SLOTS", 3)
    monkeypatch.setattr(load, "SHORT_PROMPTS", (2, 9))
    call = load.make_short_prompts(network)
    for result in (call(), call()):
        assert 0 < result.first_p50 <= result.first_p99 <= 5 / result.prompts_per_second


def test_arrivals_depend_on_the_seed_and_have_the_rate():
    many = np.mean([arrivals(seed, 2.0)[-1] for seed in range(200)])
    assert many == pytest.approx((load.NUM_REQUESTS - 1) / 2, rel=0.05)
    assert arrivals(3, 2.0) == arrivals(3, 2.0)
    assert arrivals(3, 2.0) != arrivals(4, 2.0)
    assert all(np.diff(arrivals(3, 2.0)) > 0)


def test_tables_fit_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(soft_wrap=True)
    console.print(output.loads([Load(0.25, 12.34, 1234.5, 1.0, 12.0, 0.1, 0.9)]))
    console.print(output.short_prompts([ShortPrompts(123.45, 1.0, 12.0)]))
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_missing_folder_is_rejected():
    with pytest.raises(ValueError, match="there is no folder nowhere"):
        generation.main(["--json=nowhere/out.json"])
