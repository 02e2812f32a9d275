"""Results and tables of `zaya bench generation`, at sizes that take seconds."""

import types

import jax
import numpy as np
import pytest
from rich.console import Console
from small_models import EXECUTION, SMALL

from zaya_jax.bench.generation import generation, load, output
from zaya_jax.bench.generation.decoders import Workload, ours
from zaya_jax.bench.generation.load import Load, arrivals
from zaya_jax.config import ModelConfig
from zaya_jax.convert.pytorch.in_memory import save_pytorch
from zaya_jax.model.flops import active_parameters
from zaya_jax.model.weights import count_parameters
from zaya_jax.model.zaya import Zaya


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation") / "network"
    model = Zaya(SMALL, EXECUTION)
    variables = jax.jit(model.init)(jax.random.key(11), np.zeros((1, 4), np.int32))
    save_pytorch(folder, model, variables, dtype="float32")
    return str(folder)


def test_a_step_reads_the_experts_that_it_meets():
    config = ModelConfig()
    one, many = (generation.step_bytes(config, batch) / 4 for batch in (1, 10_000))
    assert many == count_parameters(config)
    head = config.vocab_size * config.hidden_size
    np.testing.assert_allclose(one, active_parameters(config) + head, rtol=1e-3)


def test_our_decoder_times_all_tokens(network):
    times = ours(Workload(network, SMALL.vocab_size, batch=2, prompt=5, new=4))()
    assert len(times.steps) == 3
    assert times.first > 0
    assert times.whole > 0


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


def test_arrivals_depend_on_the_seed_and_have_the_rate():
    many = np.mean([arrivals(seed, 2.0)[-1] for seed in range(200)])
    assert many == pytest.approx((load.NUM_REQUESTS - 1) / 2, rel=0.05)
    assert arrivals(3, 2.0) == arrivals(3, 2.0)
    assert arrivals(3, 2.0) != arrivals(4, 2.0)
    assert all(np.diff(arrivals(3, 2.0)) > 0)


def test_tables_fit_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(soft_wrap=True)
    speed = generation.SideSpeed(64, "transformers", 12_345.6, 1234.5, 99_999.0, 4444.4, 0.1234, 1.2345)
    console.print(output.speeds([speed, types.SimpleNamespace(**vars(speed) | {"side": "ours"})]))
    console.print(output.loads([Load(0.25, 12.34, 1234.5, 1.0, 12.0, 0.1, 0.9)]))
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batches=1,0"], "--batches is 1,0; it must be comma-separated numbers"),
        (["--rounds=0"], "--rounds is 0; it must be at least 1"),
        (["--json=nowhere/out.json"], "there is no folder nowhere"),
    ],
)
def test_invalid_options_of_generation_are_rejected(words, sentence):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=sentence):
        generation.main(words)
