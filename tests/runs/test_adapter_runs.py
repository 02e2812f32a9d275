"""Runs that train adapters: initial weights of another run, checkpoints, and exports."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from huggingface_hub import ModelCard
from safetensors.numpy import load_file
from small_runs import build_small_corpus, make_base, small_values

from zaya_jax import cli
from zaya_jax.checkpoint import load_run
from zaya_jax.config import Config
from zaya_jax.model.zaya import Zaya
from zaya_jax.train.trainer import train

# Warnings of the run, which differ with the newest jax.
pytestmark = pytest.mark.slow

STEPS = 6


def by_path(tree):
    return flatten_dict(tree, sep="/")


def zaya(command):
    cli.main(str(command).split())


@dataclasses.dataclass(frozen=True)
class Trained:
    folder: pathlib.Path
    config: Config
    base: dict
    result: object

    def again(self, name, num_steps):
        train_values = dataclasses.replace(self.config.train, num_steps=num_steps)
        return dataclasses.replace(self.config, run_folder=str(self.folder / name), train=train_values)


@pytest.fixture(name="trained", scope="module")
def fixture_trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    build_small_corpus(folder / "corpus")
    values = small_values(run_folder=str(folder / "base"), corpus=str(folder / "corpus"))
    base = make_base(folder / "base", values)
    values = values | {
        "run_folder": str(folder / "run"),
        "lora": {"rank": 3, "alpha": 6.0},
        "optimizer": {"warmup_steps": 0, "schedule": "constant", "learning_rate": 1e-2},
        "balancing": {"learning_rate": 0.0},
        "train": values["train"]
        | {"num_steps": STEPS, "checkpoint_every": 3, "eval_every": 6, "eval_sequences": 4}
        | {"init_from": str(folder / "base")},
    }
    config = Config.from_dict(values)
    return Trained(folder, config, base, train(config))


def test_only_adapters_change(trained):
    state = trained.result.state
    params, base = by_path(state.params), by_path(trained.base["params"])
    for path, x in base.items():
        np.testing.assert_array_equal(params[path], x)
    np.testing.assert_array_equal(state.router_bias_LX, trained.base["router_bias"]["layers"])
    factors = {path: x for path, x in params.items() if path not in base}
    assert factors.keys() == set(state.buckets)
    assert all(np.abs(x).max() > 1e-3 for path, x in factors.items())


def test_a_resumed_run_equals_an_uninterrupted_one_and_replays_its_steps(trained, capsys):
    train(trained.again("resumed", 3))
    resumed = train(trained.again("resumed", STEPS))
    output = capsys.readouterr().out
    assert "parameters that train: 2,034 of" in output
    assert "resuming at step 3" in output
    ours, theirs = resumed.state, trained.result.state
    jax.tree.map(
        np.testing.assert_array_equal, (ours.stored, ours.optimizer), (theirs.stored, theirs.optimizer)
    )
    train(trained.again("resumed", STEPS), replay_check=3)
    assert "replayed" in capsys.readouterr().out


def test_loaded_weights_have_adapters_merged(trained, capsys):
    loaded = by_path(load_run(trained.config.run_folder).variables["params"])
    params, scale = by_path(trained.result.state.params), 6.0 / 3
    a, b = (np.asarray(params[f"adapters/attention/q_proj/{name}"]) for name in "ab")
    q_proj = np.asarray(params["layers/attention/q_proj"]) + scale * np.einsum("ldz,lznh->ldnh", a, b)
    np.testing.assert_allclose(loaded["layers/attention/q_proj"], q_proj, atol=1e-6)
    assert loaded.keys() == by_path(trained.base["params"]).keys()
    for path, x in by_path(trained.result.state.variables["params"]).items():
        np.testing.assert_allclose(loaded[path], x, atol=1e-6)
    zaya(f"generate {trained.config.run_folder} --max-new-tokens 4 --temperature 0")
    zaya(f"ckpt verify {trained.config.run_folder}")
    assert "damage" not in capsys.readouterr().out
    zaya(
        f"ckpt reshape {trained.config.run_folder}:3 {trained.folder}/narrow --weights-only --dtype=bfloat16"
    )
    assert load_run(trained.folder / "narrow").step == 3


def test_transformers_computes_the_same_from_an_export(trained, capsys):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    exported, run = trained.folder / "exported", load_run(trained.config.run_folder)
    zaya(f"convert {trained.config.run_folder} {exported} --verify")
    assert "verified: logits of transformers" in capsys.readouterr().out
    reference = transformers.ZayaForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokens_BT = np.random.default_rng(0).integers(3, 259, (2, 40))
    with torch.no_grad():
        theirs_BTV = reference(torch.from_numpy(tokens_BT), use_cache=False).logits.numpy()
    for variables, is_same in ((run.variables, True), (trained.base, False)):
        variables = jax.tree.map(jnp.asarray, variables)
        ours_BTV = (
            Zaya(run.config.model, run.config.execution).apply(variables, jnp.asarray(tokens_BT)).logits_BTV
        )
        error = np.abs(ours_BTV - theirs_BTV).max() / np.abs(theirs_BTV).max()
        assert (error < 1e-4) == is_same, error


def test_adapters_alone_are_the_difference_of_an_export(trained, capsys):
    zaya(f"convert {trained.config.run_folder} {trained.folder}/peft --adapters-only")
    assert "adapters do not include the router biases" in capsys.readouterr().out
    card = ModelCard.load(trained.folder / "peft/README.md")
    assert card.data.library_name == "peft"
    assert "adapters of rank 3 (LoRA)" in card.content
    for name in ("base", "run"):
        zaya(f"convert {trained.folder}/{name} {trained.folder}/of_{name}")
    adapters = load_file(trained.folder / "peft/adapter_model.safetensors")
    base, exported = (load_file(trained.folder / f"of_{name}/model.safetensors") for name in ("base", "run"))
    changed = {name for name in base if not np.array_equal(base[name], exported[name])}
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapters}
    assert changed == {f"{module}.weight" for module in modules}
    assert len(changed) == 2 * 9  # of two layers: five of attention, four of the router
    for module in modules:
        a, b = (adapters[f"base_model.model.{module}.lora_{which}.weight"] for which in "AB")
        expected = base[f"{module}.weight"] + 6.0 / 3 * b @ a
        np.testing.assert_allclose(exported[f"{module}.weight"], expected, atol=1e-6)


# a field name that transformers passes to peft, which has renamed it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft_loads_adapters_alone(trained):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    folder = trained.folder / "for_peft"
    zaya(f"convert {trained.folder}/base {folder}/base")
    zaya(f"convert {trained.folder}/run {folder}/merged")
    zaya(f"convert {trained.folder}/run {folder}/adapters --adapters-only")
    base, merged = (
        transformers.ZayaForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("base", "merged")
    )
    tokens_BT = torch.from_numpy(np.random.default_rng(0).integers(3, 259, (2, 40)))
    with torch.no_grad():
        without, expected = (model(tokens_BT, use_cache=False).logits for model in (base, merged))
        actual = peft.PeftModel.from_pretrained(base, folder / "adapters")(tokens_BT, use_cache=False).logits
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (without - expected).abs().max() > 1e-2 * expected.abs().max()


def test_a_copy_of_a_run_has_no_adapters(trained):
    zaya(f"convert {trained.config.run_folder} {trained.folder}/copy --layout zaya")
    copy = load_run(trained.folder / "copy")
    assert copy.config.lora.rank == 0
    for path, x in by_path(load_run(trained.config.run_folder).variables).items():
        np.testing.assert_allclose(by_path(copy.variables)[path], x, atol=1e-6)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("convert {0}/base {0}/none --adapters-only", "has no adapters, because its lora.rank is 0"),
        ("convert {0}/run {0}/none --adapters-only --verify", "cannot be combined with"),
        ("train --config={0}/run/config.json --config.lora.rank=4", "lora.rank is 4 and was 3"),
    ],
)
def test_mistakes_are_user_errors(trained, command, sentence, capsys):
    with pytest.raises(SystemExit):
        zaya(command.format(trained.folder))
    assert sentence in capsys.readouterr().err
