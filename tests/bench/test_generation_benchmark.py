"""What `zaya bench generation` counts and prints, at sizes that take seconds; and the task of `bench rsa`."""

import json
import types

import jax
import numpy as np
import pytest
from rich.console import Console
from small_models import EXECUTION, SMALL

from zaya_jax.bench import generation, generation_load, generation_tables, rsa, slips
from zaya_jax.bench.generation_load import Load, arrivals
from zaya_jax.bench.generation_sides import Asked, ours
from zaya_jax.config import ModelConfig
from zaya_jax.convert.pytorch import save_pytorch
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


def test_the_cache_of_zaya1_is_an_eighth():
    found = generation.cache_table()
    (cca, once), (gqa, _), (mha, _) = found.values()
    assert (cca, gqa, mha) == (40_960, 81_920, 327_680)
    # Of each layer the convolutions' last two inputs of 1,280 channels and 128 delayed values, in float32.
    assert once == 40 * 4 * (2 * 1280 + 128)


def test_a_step_reads_the_experts_that_it_meets():
    config = ModelConfig()
    one, many = (generation.step_bytes(config, batch) / 4 for batch in (1, 10_000))
    assert many == count_parameters(config)
    head = config.vocab_size * config.hidden_size
    np.testing.assert_allclose(one, active_parameters(config) + head, rtol=1e-3)


def test_our_side_times_all_tokens(network):
    times = ours(Asked(network, SMALL.vocab_size, batch=2, prompt=5, new=4))()
    assert len(times.steps) == 3
    assert times.first > 0
    assert times.whole > 0


# A load takes its time, and `tests/inference/test_engine.py` has the engine's answers.
@pytest.mark.campaign
def test_an_engine_under_load_serves_all(network, monkeypatch):
    monkeypatch.setattr(generation_load, "NUM_REQUESTS", 5)
    monkeypatch.setattr(generation_load, "SLOTS", 2)
    monkeypatch.setattr(generation_load, "PROMPTS", (2, 9))
    monkeypatch.setattr(generation_load, "NEWS", (2, 6))
    found = generation_load.make_loads(network)()
    assert [each.share for each in found] == list(generation_load.SHARES)
    for each in found:
        assert 0 < each.first_p50 <= each.first_p99
        assert 0 < each.next_p50 <= each.next_p99
        assert each.tokens_per_second > 0
    assert found[3].rate == pytest.approx(4 * found[0].rate)


def test_arrivals_are_a_seeds_and_of_a_rate():
    many = np.mean([arrivals(seed, 2.0)[-1] for seed in range(200)])
    assert many == pytest.approx((generation_load.NUM_REQUESTS - 1) / 2, rel=0.05)
    assert arrivals(3, 2.0) == arrivals(3, 2.0)
    assert arrivals(3, 2.0) != arrivals(4, 2.0)
    assert all(np.diff(arrivals(3, 2.0)) > 0)


def test_tables_fit_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(soft_wrap=True)
    speed = generation.SideSpeed(64, "transformers", 12_345.6, 1234.5, 99_999.0, 4444.4, 0.1234, 1.2345)
    console.print(generation_tables.speeds([speed, types.SimpleNamespace(**vars(speed) | {"side": "ours"})]))
    console.print(generation_tables.caches(generation.cache_table()))
    console.print(generation_tables.prompt_memories([generation.PromptMemory(8192, 2**33, 2**30)]))
    console.print(generation_tables.loads([Load(0.25, 12.34, 1234.5, 1.0, 12.0, 0.1, 0.9)]))
    console.print(rsa.table([rsa.Accuracy("N=16, C=4, T=2", 0.5, 0.75, 432.0)], 100))
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "327,680 B" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batches=1,0"], "--batches is 1,0; it must be numbers from 1 on"),
        (["--lengths=8k"], "--lengths is 8k; it must be numbers from 1 on"),
        (["--rounds=0"], "--rounds is 0; it must be at least 1"),
        (["--json=nowhere/out.json"], "there is no folder nowhere"),
    ],
)
def test_numbers_that_cannot_be_are_refused(words, sentence):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=sentence):
        generation.main(words)


def test_slips_are_what_they_say():
    """Right without slips; and a batch learns thoughts and nothing else."""
    numbers = np.random.default_rng(0)
    slipped = 0
    for _ in range(300):
        question = slips.make_question(numbers)
        thought = slips.make_thought(numbers, question)
        assert thought[:: slips.STEP_TOKENS] == slips.LETTERS
        slipped += (int(thought[-1]) - int(slips.right_answer(question))) % slips.MODULUS
    assert slipped / 300 == pytest.approx(slips.NUM_DIGITS * slips.SLIP, rel=0.15)
    batch = slips.make_batch(numbers, 40)
    for tokens_T, targets_T, weights_T in zip(
        batch.tokens_BT, batch.targets_BT, batch.weights_BT, strict=True
    ):
        learned = targets_T[weights_T > 0]
        assert learned[-1] == slips.BYTES.eos_id
        thought = slips.BYTES.decode(learned.tolist())
        prompt, _, rest = slips.BYTES.decode(tokens_T.tolist()).partition("=")
        assert rest == thought
        question, *tails = prompt.split("|")
        if tails and thought[0] != tails[0][0]:  # goes on behind what most say
            values = [tail[2] for tail in tails]
            first = (int(thought[2]) - int(question[question.index(thought[0]) + 1])) % slips.MODULUS
            most = max(map(values.count, values))
            before = {int(value) for value in values if values.count(value) == most}
            assert {first, (first - 1) % slips.MODULUS} & before


def test_a_thought_in_parts_has_the_tokens_of_a_whole():
    for rounds in rsa.ROUNDS:
        scheme = rsa.scheme_of(rounds)
        assert scheme.thinking * (rounds + 1) == rsa.DONE
        assert scheme.budget(rounds) == scheme.thinking + 1


def test_networks_are_put_together_and_drawn(tmp_path):
    """Two that were asked as many questions: by hand; and a picture of them."""
    pytest.importorskip("matplotlib")
    ways = [f"way {number}" for number in range(len(rsa.SAMPLES) + len(rsa.ROUNDS))]
    networks = [[rsa.Accuracy(way, share, share / 2, 100.0) for way in ways] for share in (0.25, 0.75)]
    found = rsa.together(networks)
    assert found == [rsa.Accuracy(way, 0.5, 0.25, 100.0) for way in ways]
    assert rsa.standard_error(0.25, 300) == pytest.approx(0.025)
    rsa.draw(tmp_path / "rsa.png", found, 300)
    assert (tmp_path / "rsa.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_rounds_find_what_votes_do_not(tmp_path):
    """With the same tokens: of 200 questions the difference of two shares has an error of five percent."""
    file = tmp_path / "rsa.json"
    rsa.main(["--networks=2", "--seed=4", f"--json={file}", f"--picture={tmp_path}/rsa.png"])
    ways = {each["way"]: each for each in json.loads(file.read_text())["ways"]}
    samples, rounds = ways["most of 16 samples"], ways["N=16, C=4, T=5"]
    assert rounds["tokens"] < 1.05 * samples["tokens"]
    assert rounds["mean"] > samples["mean"] + 0.03
    assert rounds["voted"] > samples["voted"]
    assert (tmp_path / "rsa.png").read_bytes().startswith(b"\x89PNG")
