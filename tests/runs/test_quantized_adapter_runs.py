"""Runs that train adapters with DoRA and LoRA+ on quantized experts: checkpoints, evaluation and exports."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import build_small_corpus, make_base, small_values

from zaya_jax import cli
from zaya_jax.checkpoint import load_run
from zaya_jax.config import Config
from zaya_jax.train.trainer import train

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("base", ["int8", "mxfp4"])
def test_a_run_resumes_and_is_exported_with_its_dequantized_experts(tmp_path, base):
    build_small_corpus(tmp_path / "corpus")
    values = small_values(run_folder=str(tmp_path / "base"), corpus=str(tmp_path / "corpus"))
    make_base(tmp_path / "base", values)

    def config(name, num_steps):
        return Config.from_dict(
            values
            | {
                "run_folder": str(tmp_path / name),
                "lora": {"rank": 2, "dora": True, "rslora": True, "b_learning_rate_ratio": 4.0}
                | {"base_dtype": base, "targets": ("layers/attention/*", "layers/experts/down_proj")},
                "optimizer": {"warmup_steps": 0, "schedule": "constant", "learning_rate": 1e-2},
                "execution": {"dtype": "float32", "remat": "layer"},
                "train": values["train"]
                | {"num_steps": num_steps, "checkpoint_every": 2, "eval_sequences": 4}
                | {"init_from": str(tmp_path / "base")},
            }
        )

    whole = train(config("whole", 4)).state
    train(config("half", 2))
    half = train(config("half", 4)).state
    jax.tree.map(
        np.testing.assert_array_equal, (half.stored, half.optimizer), (whole.stored, whole.optimizer)
    )
    ours = load_run(str(tmp_path / "whole")).variables["params"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours, whole.variables["params"])
    # The converter dequantizes and merges in NumPy.
    cli.main(f"convert {tmp_path}/whole {tmp_path}/exported --verify".split())
    exported = load_file(tmp_path / "exported/model.safetensors")
    down = exported["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_allclose(down.swapaxes(1, 2), ours["layers"]["experts"]["down_proj"][1], atol=1e-6)
    gate_up = exported["model.layers.0.mlp.experts.gate_up_proj"].swapaxes(1, 2)
    theirs = np.asarray(ours["layers"]["experts"]["gate_up_proj"][0]).reshape(gate_up.shape)
    np.testing.assert_allclose(gate_up, theirs, atol=1e-6)
    cli.main(f"ckpt reshape {tmp_path}/whole:4 {tmp_path}/narrow --weights-only --dtype=bfloat16".split())
    cli.main(f"generate {tmp_path}/narrow --max-new-tokens 4 --temperature 0".split())
