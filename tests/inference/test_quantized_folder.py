"""Folders of quantized weights instead of runs: the same texts as dense weights, in the memory of the
quantized."""

import contextlib
import io
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_folders import NETWORK, plausible, zaya

import zaya_jax
from pallas_kernels.embedding import QuantizedTable
from pallas_kernels.product import QuantizedMatrix
from zaya_jax import cli
from zaya_jax.convert.quantized.device_weights import device_bytes
from zaya_jax.errors import UserError
from zaya_jax.inference.loading import load_for_generation
from zaya_jax.model.weights import count_parameters
from zaya_jax.model.zaya import forward

FORMATS = ["fp8", "int8", "mxfp4"]
EXPERT_WEIGHTS = 2 * 3 * (64 * 64 + 64 * 32)
"""Layers, experts, and weights of an expert of `NETWORK`."""


@pytest.fixture(scope="module", name="root")
def fixture_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantized")
    plausible(root / "source", "float32")
    (root / "text.txt").write_text("def f(x):\n    return x + 1\n" * 20)
    for name in FORMATS:
        zaya(f"convert {root}/source {root}/{name} --quantize={name}")
    zaya(f"convert {root}/source {root}/embedding --quantize=int8 --quantize-embedding")
    return root


def logits(model, variables) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 259, (2, 40)))
    bias_LX = variables["router_bias"]["layers"]
    # `Zaya.apply` checks that the weights have the declared shapes.
    run = jax.jit(lambda params: forward(model.config, model.execution, params, bias_LX, tokens).logits_BTV)
    return np.asarray(run(variables["params"]))


@pytest.mark.parametrize("name", [*FORMATS, "embedding"])
def test_logits_are_those_of_the_dense_weights(root, name):
    run = load_for_generation(str(root / name))
    actual, expected = logits(run.model, run.variables), logits(*zaya_jax.load_pytorch(root / name))
    # The weights are equal. Products of few rows are summed in another order than those of dense weights.
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", [*FORMATS, "embedding"])
def test_memory_is_that_of_quantized_weights(root, name):
    variables = load_for_generation(str(root / name)).variables
    experts = variables["params"]["layers"]["experts"]
    assert all(isinstance(matrix, QuantizedMatrix) for matrix in experts.values())
    outputs = 2 * 3 * (64 + 64)
    mxfp4 = EXPERT_WEIGHTS // 2 + EXPERT_WEIGHTS // 32
    quantized = mxfp4 if name == "mxfp4" else EXPERT_WEIGHTS + 4 * outputs
    rest = 4 * (count_parameters(NETWORK) + NETWORK.num_hidden_layers * NETWORK.num_router_classes)
    rest -= 4 * EXPERT_WEIGHTS
    if name == "embedding":
        assert isinstance(variables["params"]["embedding"]["table"], QuantizedTable)
        rest += 264 * 64 + 4 * 264 - 4 * 264 * 64
    assert device_bytes(variables) == quantized + rest


def generate(folder, *words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(["generate", str(folder), "--temperature", "0", "--max-new-tokens", "12", *words])
    return out.getvalue()


def test_commands_take_the_folder(root, tmp_path):
    """Greedy text of the quantized folder is that of a run with its dequantized weights."""
    zaya(f"convert {root}/int8 {tmp_path}/run")
    assert generate(root / "int8", "--prompt", "def f(") == generate(tmp_path / "run", "--prompt", "def f(")


def test_texts_are_evaluated(root, tmp_path, capsys):
    zaya(f"eval {root}/mxfp4 --text {root}/text.txt --context 32")
    zaya(f"convert {root}/mxfp4 {tmp_path}/run")
    first = capsys.readouterr().out.split("nats per token")[1].split("│")[4]
    zaya(f"eval {tmp_path}/run --text {root}/text.txt --context 32")
    assert capsys.readouterr().out.split("nats per token")[1].split("│")[4] == first


def test_the_loss_before_and_after_is_that_of_eval(root, tmp_path, capsys):
    zaya(f"convert {root}/source {tmp_path}/fp8 --quantize=fp8 --text {root}/text.txt")
    printed = capsys.readouterr().out
    zaya(f"eval {tmp_path}/fp8 --text {root}/text.txt")
    after = capsys.readouterr().out.split("nats per token")[1].split("│")[5].strip()
    assert f"{after} after" in printed
    assert "before, " in printed
    card = (tmp_path / "fp8" / "README.md").read_text()
    assert f"{after} after" in card
    assert "tokens of text.txt." in card


def test_a_folder_without_a_tokenizer(root, tmp_path):
    shutil.copytree(root / "fp8", tmp_path / "fp8")
    (tmp_path / "fp8" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer.json; copy it there"):
        load_for_generation(str(tmp_path / "fp8"))


@pytest.mark.campaign
def test_rows_of_a_batch(root):
    """Rows of different lengths share a step; each has the tokens that it has alone."""
    run = load_for_generation(str(root / "mxfp4"))
    prompts = [[2, 40, 41, 42, 43], [2, 50]]
    together = zaya_jax.generate(run.model, run.variables, prompts, max_new_tokens=6, temperature=0.0)
    alone = [
        zaya_jax.generate(run.model, run.variables, [each], max_new_tokens=6, temperature=0.0)[0]
        for each in prompts
    ]
    assert [list(map(int, x)) for x in together] == [list(map(int, x)) for x in alone]
