"""Agreement, ratios, bounds and table of `zaya bench torch`; both sides run at sizes that take seconds."""

import contextlib
import json
import os

import jax
import numpy as np
import pytest
from small_models import EXECUTION, SMALL

from zaya_jax.bench.torch_comparison import bounds, command, ours, speeds, theirs
from zaya_jax.bench.torch_comparison.workload import DTYPES, Call, GenerationWork, TrainingWork
from zaya_jax.config import ModelConfig
from zaya_jax.convert.pytorch.in_memory import save_pytorch
from zaya_jax.model.flops import active_parameters
from zaya_jax.model.weights import count_parameters
from zaya_jax.model.zaya import Zaya


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch") / "network"
    model = Zaya(SMALL, EXECUTION)
    variables = jax.jit(model.init)(jax.random.key(11), np.zeros((1, 4), np.int32))
    save_pytorch(folder, model, variables, dtype="float32")
    return str(folder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_sides_generate_the_same(network, dtype):
    pytest.importorskip("transformers")
    work = GenerationWork(network, batch=2, dtype=dtype, vocabulary=SMALL.vocab_size, prompt=5, new=4)
    calls = {side: make(work)() for side, make in (("ours", ours.generate), ("theirs", theirs.generate))}
    assert calls["ours"].outputs["tokens"].shape == (2, 4)
    speeds.check_agreement(calls, tolerance=speeds.TOLERANCES[dtype])
    for call in calls.values():
        assert set(call.seconds) == {"prefill", "decode"}
        assert min(call.seconds.values()) > 0


@pytest.mark.parametrize("wrong", [1.001, np.nan])
def test_other_outputs_are_an_error(wrong):
    calls = {name: Call({}, {"loss": np.array([1.0, x])}) for name, x in (("ours", 1.0), ("other", wrong))}
    with pytest.raises(RuntimeError, match='loss of "other" differ from ours by'):
        speeds.check_agreement(calls)


@pytest.mark.parametrize(
    ("num_different", "difference", "agrees"),
    [(0, 0, True), (1, 0.002, True), (4, 0.002, False), (1, 0.02, False), (1, np.nan, False)],
)
def test_a_few_tokens_may_have_another_expert(num_different, difference, agrees):
    ours, theirs = (Call({}, {"log-probabilities": np.zeros((20, 10))}) for _ in range(2))
    theirs.outputs["log-probabilities"].flat[:num_different] = difference
    with contextlib.nullcontext() if agrees else pytest.raises(RuntimeError, match="differ from ours by"):
        speeds.check_agreement({"ours": ours, "transformers": theirs})


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_sides_have_the_same_loss(network, dtype, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(ours, "MODEL", SMALL)
    work = TrainingWork(network, dtype, batch=2, length=8)
    monkeypatch.setattr(TrainingWork, "tokens", np.arange(16).reshape(2, 8) % SMALL.vocab_size)
    calls = {side: make(work)() for side, make in (("ours", ours.train), ("theirs", theirs.train))}
    speeds.check_agreement(calls, tolerance=speeds.TOLERANCES[dtype])


@pytest.mark.parametrize(("logprob", "agrees"), [(-2.01, True), (-3.0, False)])
def test_texts_in_bfloat16_are_compared_up_to_a_tie(logprob, agrees):
    ours, theirs = (
        Call({}, {"tokens": np.array([tokens]), "log-probabilities": np.array([[-1.0, second, third]])})
        for tokens, second, third in (([5, 6, 7], -2.0, -3.0), ([5, 8, 9], logprob, -9.0))
    )
    calls = {"ours": ours, "transformers": theirs}
    with contextlib.nullcontext() if agrees else pytest.raises(RuntimeError, match="differ from ours by 1"):
        speeds.check_agreement(calls, tolerance=speeds.TOLERANCES["bfloat16"])
    with pytest.raises(RuntimeError, match="tokens of"):
        speeds.check_agreement(calls)


def test_a_step_reads_the_experts_that_it_meets():
    config = ModelConfig()
    works = (GenerationWork("", batch, "bfloat16") for batch in (1, 10_000))
    one, many = (bounds.step_bytes(config, work) / 2 for work in works)
    assert many == count_parameters(config)
    head = config.vocab_size * config.hidden_size
    np.testing.assert_allclose(one, active_parameters(config) + head, rtol=1e-3)


SECONDS = {"ours": (1.0, 2.0, 1.0), "transformers": (3.0, 3.0, 4.0), "torch.compile": (2.0, 8.0, 1.0)}


def fake_results(programs, *, rounds, limit, check=None):
    """Made-up times of all programs, which agree."""
    if rounds == 1:  # the trial of the compiler
        return {}
    outputs = {"loss": np.ones(1)}
    calls = {
        side: [Call(dict.fromkeys(("train", "prefill", "decode"), s), outputs) for s in SECONDS[side]]
        for side in programs
    }
    check({side: each[0] for side, each in calls.items()})
    return calls


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Returns a function that runs the command with made-up times, and its text and JSON."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(command, "require_transformers", lambda: None)
    monkeypatch.setattr(command, "export", str)
    monkeypatch.setattr(command, "measure_limits", lambda *_: bounds.MachineLimits(1e11, 1e10))
    monkeypatch.setattr(speeds, "results_interleaved", fake_results)

    def run(trial):
        monkeypatch.setattr(command, "results_interleaved", trial)
        command.main(["--rounds=3", "--batches=8", f"--json={tmp_path / 'torch.json'}"])
        return capsys.readouterr().out, json.loads((tmp_path / "torch.json").read_text())["speeds"]

    return run


def test_medians_of_paired_rounds(run):
    out, values = run(fake_results)
    assert max(len(line) for line in out.splitlines()[1:]) <= 80
    assert "…" not in out
    compiled = [each for each in values if each["side"] == "torch.compile"]
    assert [each["work"] for each in compiled] == [
        "train, batch 8 x 256",
        "prefill, 8 x 128",
        "decode, 8 x 31",
    ]
    for each in compiled:
        # By round, and not the ratio of the medians, which is 2 by chance as well as 8 / 2 is 4.
        assert each["ratios"] == [2.0, 4.0, 1.0]
        assert each["ratio"] == 2.0
    assert [each["tokens_per_second"] for each in compiled] == [2048 / 2, 1024 / 2, 248 / 2]


def test_without_a_cxx_compiler(run):
    def fails(programs, **_):
        raise RuntimeError('"torch.compile" failed: no g++\n\nand much more')

    out, values = run(fails)
    assert {each["side"] for each in values} == {"ours", "transformers"}
    assert 'it fails here: "torch.compile" failed: no g++' in " ".join(out.split())
    assert "much more" not in out


@pytest.mark.parametrize("before", [None, "shared"])
def test_torch_reads_no_code_of_an_interrupted_run(run, before, monkeypatch):
    cache = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "shared")  # restored after the test in both cases
    if before is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folders = []

    def trial(programs, **_):
        folders.append(cache.cache_dir())
        return {}

    for _ in range(2):
        run(trial)
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert len({"shared", cache.default_cache_dir(), *folders}) == 4
    assert not any(map(os.path.exists, folders))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batches=1,0"], "--batches is 1,0; it must be comma-separated numbers"),
        (["--rounds=0"], "--rounds is 0; it must be at least 1"),
        (["--json=nowhere/out.json"], "there is no folder nowhere"),
    ],
)
def test_invalid_options_are_rejected(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        command.main(words)
