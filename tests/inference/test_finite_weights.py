"""Weights with NaN or infinity: each command that computes with them reports where they are."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import make_base, make_chat_run, small_values

from zaya_jax import cli
from zaya_jax.checkpoint import Checkpoints, Retention
from zaya_jax.errors import UserError
from zaya_jax.inference import finite_weights
from zaya_jax.inference.finite_weights import check_finite


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return make_base(folder, small_values(run_folder=str(folder), corpus="corpus"))


def changed(weights, path, value):
    """Returns weights in which the last value of one array is replaced."""

    def change(at, x):
        if jax.tree_util.keystr(at, simple=True, separator="/") != path:
            return x
        x = np.array(x)
        x.flat[-1] = value
        return x

    actual = jax.tree.map_with_path(change, weights)
    assert any(
        each is not x for each, x in zip(jax.tree.leaves(actual), jax.tree.leaves(weights), strict=True)
    )
    return actual


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "path",
    [
        "params/embedding/table",
        "params/layers/experts/down_proj",
        "params/final_norm/scale",
        "router_bias/layers",
    ],
)
def test_one_value_that_is_not_finite_is_an_error(path, value, weights):
    if (path, value) == ("router_bias/layers", -np.inf):  # disables an expert
        check_finite(changed(weights, path, value), "runs/x", 800)
        return
    with pytest.raises(UserError) as raised:
        check_finite(changed(weights, path, value), "runs/x", 800)
    assert str(raised.value) == (
        f"runs/x, step 800: NaN or infinity in {path}, so that no text can be generated; use an earlier step "
        "(zaya ckpt ls runs/x, then zaya ckpt reshape runs/x:STEP OUT --weights-only), "
        "or convert the weights again"
    )


def test_errors_name_a_few_weights(weights):
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), weights)
    others = len(jax.tree.leaves(weights)) - 3
    with pytest.raises(UserError, match=f" and {others} more weights, so that"):
        check_finite(broken, "runs/x", 800)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_finite_weights_pass_in_each_dtype(dtype, weights):
    largest = float(jnp.finfo(dtype).max)
    whole = jax.tree.map(lambda x: jnp.full(x.shape, largest, dtype), weights)
    check_finite(whole, "runs/x", 800)
    whole["params"]["final_norm"]["scale"] = whole["params"]["final_norm"]["scale"].at[3].set(jnp.nan)
    with pytest.raises(UserError, match="NaN or infinity in params/final_norm/scale, so"):
        check_finite(whole, "runs/x", 800)


@pytest.mark.parametrize("with_minus_infinity", [False, True])
@pytest.mark.parametrize("value", [1.0, np.nan, np.inf, -np.inf])
def test_weights_on_a_gpu(value, with_minus_infinity):
    """Compares the compiled form, which CPUs do not need, with the other one."""
    x = np.array([[0.0, value]], np.float32)
    actual = finite_weights._is_finite_on_device(jnp.asarray(x), with_minus_infinity=with_minus_infinity)
    assert bool(actual) == finite_weights._is_finite(x, with_minus_infinity=with_minus_infinity)


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken") / "run"
    make_chat_run(folder)
    with Checkpoints(folder, retention=Retention(newest=1)) as checkpoints:
        template = small_values(run_folder=str(folder), corpus="corpus")
        whole = make_base(folder.with_name("other"), template)
        weights = changed(whole, "params/embedding/table", np.nan)
        checkpoints.save(2, weights=weights, training={"step": np.int32(2)})
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "RUN", "--prompt", "a"],
        ["generate", "RUN", "--input", "FILE", "--output", "FILE.answers"],
        ["chat", "RUN"],
        ["think", "RUN", "--prompt", "a", "--thinking", "8"],
        ["eval", "RUN", "--text", "FILE"],
        ["serve", "RUN", "--port", "0"],
    ],
    ids=lambda words: " ".join(words),
)
def test_commands(words, broken_run, tmp_path, capsys, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n")
    words = [word.replace("RUN", str(broken_run)).replace("FILE", str(file)) for word in words]
    with pytest.raises(SystemExit) as leaving:
        cli.main(words)
    assert leaving.value.code == 2
    output = capsys.readouterr()
    last = output.err.splitlines()[-1]
    assert last.startswith(
        f"zaya: {words[0]}: {broken_run}, step 2: NaN or infinity in params/embedding/table, so"
    )
    assert "Traceback" not in output.err
    assert " at http://" not in output.out
