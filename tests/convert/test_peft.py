"""PEFT adapters: export of a run's, merging into weights, and combination, also by PEFT itself."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import make_base, small_values

from zaya_jax import cli
from zaya_jax.checkpoint import Checkpoints, Retention
from zaya_jax.config import Config, LoraConfig
from zaya_jax.convert.peft import combined, read_adapter
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import map_weights

# transformers deprecates an attribute that PEFT reads.
IGNORED = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FORMS = {
    "plain": {"rank": 3, "alpha": 6.0},
    "rslora": {"rank": 3, "alpha": 2.0, "rslora": True, "targets": ("layers/attention/*",)},
    "dora": {"rank": 2, "alpha": 4.0, "dora": True},
}


def zaya(command):
    cli.main(str(command).split())


def write_run(folder, values, base, lora):
    """Writes a run with random adapters of the base's weights."""
    numbers = np.random.default_rng(sum(map(ord, folder.name)))
    train = values["train"] | {"init_from": str(folder.parent / "base")}
    config = Config.from_dict(values | {"run_folder": str(folder), "train": train})
    config = dataclasses.replace(config, lora=LoraConfig(**lora, base_dtype="float32"))
    adapters = map_weights(
        lambda w: (0.3 * numbers.standard_normal(w.shape) + w.constant).astype(np.float32),
        declare_run(config)["adapters"],
    )
    folder.mkdir()
    (folder / "config.json").write_text(config.to_text())
    weights = base | {"params": base["params"] | {"adapters": adapters}}
    with Checkpoints(folder, retention=Retention(newest=1)) as checkpoints:
        checkpoints.save(1, weights=jax.device_put(weights), training={"step": np.int32(1)})


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    values = small_values(run_folder=str(folder / "base"), corpus="corpus")
    base = make_base(folder / "base", values)
    zaya(f"convert {folder}/base {folder}/base_pytorch")
    origin = {"converted_from": "Zyphra/ZAYA1-8B at revision 1"}
    (folder / "base" / "converted_from.json").write_text(json.dumps(origin))
    for name, lora in FORMS.items():
        write_run(folder / name, values, base, lora)
        zaya(f"convert {folder}/{name} {folder}/{name}_merged")
        zaya(f"convert {folder}/{name} {folder}/{name}_peft --adapters-only")
    return folder


def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "layout"), [("plain", "legacy"), ("rslora", "native"), ("dora", "native"), ("dora", "legacy")]
)
def test_an_exported_adapter_merges_to_the_weights_of_its_run(folder, tmp_path, name, layout):
    zaya(f"convert {folder}/{name} {tmp_path}/peft --adapters-only --layout {layout}")
    zaya(f"convert {folder}/base_pytorch {tmp_path}/merged --layout native --adapter {tmp_path}/peft")
    base, expected, actual = map(
        tensors, (folder / "base_pytorch", folder / f"{name}_merged", tmp_path / "merged")
    )
    changed = {key for key in base if not np.array_equal(base[key], expected[key])}
    assert len(changed) == 2 * (5 if name == "rslora" else 9)
    for key, x in expected.items():
        np.testing.assert_allclose(actual[key], x, rtol=1e-5, atol=1e-6)


def test_an_adapter_names_its_base_and_settings(folder, tmp_path):
    config = json.loads((folder / "rslora_peft/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "Zyphra/ZAYA1-8B"
    assert (config["use_rslora"], config["use_dora"], config["r"]) == (True, False, 3)
    zaya(f"convert {folder}/dora {tmp_path}/named --adapters-only --base-model my/model")
    config = json.loads((tmp_path / "named/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["use_dora"]) == ("my/model", True)


def test_adapters_that_are_concatenated_add_their_updates(folder, tmp_path):
    """The sum of updates by hand, in float64; one adapter has fewer targets, and each its own scale."""
    arguments = f"--adapter {folder}/plain_peft=0.5 --adapter {folder}/rslora_peft=-2"
    zaya(f"convert {folder}/base_pytorch {tmp_path}/merged --layout native {arguments}")
    zaya(f"convert {folder}/base_pytorch {tmp_path}/cat --adapters-only {arguments}")
    zaya(f"convert {folder}/base_pytorch {tmp_path}/of_cat --layout native --adapter {tmp_path}/cat")
    base, merged, of_cat = map(tensors, (folder / "base_pytorch", tmp_path / "merged", tmp_path / "of_cat"))
    factors = {name: load_file(folder / f"{name}_peft/adapter_model.safetensors") for name in FORMS}
    for key, x in base.items():
        expected = x.astype(np.float64)
        for name, scale in (("plain", 0.5 * 6 / 3), ("rslora", -2 * 2 / 3**0.5)):
            prefix = f"base_model.model.{key.removesuffix('.weight')}.lora_"
            if f"{prefix}A.weight" in factors[name]:
                a, b = (factors[name][f"{prefix}{which}.weight"].astype(np.float64) for which in "AB")
                expected = expected + scale * b @ a
        np.testing.assert_allclose(merged[key], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(of_cat[key], expected, rtol=1e-5, atol=1e-5)


@IGNORED
@pytest.mark.campaign  # PEFT and transformers take longest to import
@pytest.mark.parametrize("name", FORMS)
def test_peft_merges_the_same_weights(folder, name):
    peft, transformers, torch = (pytest.importorskip(each) for each in ("peft", "transformers", "torch"))
    model = transformers.ZayaForCausalLM.from_pretrained(folder / "base_pytorch", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, folder / f"{name}_peft")
    actual = adapted.merge_and_unload().state_dict()
    for key, x in tensors(folder / f"{name}_merged").items():
        np.testing.assert_allclose(actual[key].numpy(), x, rtol=1e-5, atol=1e-5)


@IGNORED
@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["cat", "linear"])
def test_peft_combines_adapters_to_the_same_factors(folder, tmp_path, kind):
    peft, transformers, torch = (pytest.importorskip(each) for each in ("peft", "transformers", "torch"))
    model = transformers.ZayaForCausalLM.from_pretrained(folder / "base_pytorch", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, folder / "plain_peft", adapter_name="plain")
    adapted.load_adapter(folder / "rslora_peft", adapter_name="rslora")
    weights = [0.7, -1.5]
    adapted.add_weighted_adapter(["plain", "rslora"], weights, "both", combination_type=kind)
    adapted.save_pretrained(tmp_path, selected_adapters=["both"], save_embedding_layers=False)
    theirs = read_adapter(tmp_path / "both")
    adapters = [read_adapter(folder / f"{name}_peft") for name in ("plain", "rslora")]
    ours = combined(list(zip(adapters, weights, strict=True)), kind)
    assert ours.parts.keys() == theirs.parts.keys()
    # PEFT keeps use_rslora of the first adapter, so that its scale is 1 as well.
    assert (ours.rank, ours.scale) == (theirs.rank, theirs.scale)
    for module, parts in ours.parts.items():
        for part, x in parts.items():
            np.testing.assert_allclose(x, theirs.parts[module][part], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("convert {0}/base {1} --adapter {0}/base", "has no adapter_config.json"),
        ("convert {0}/base {1} --adapter {0}/dora_peft=0.5", "can only be merged alone and with weight 1"),
        ("convert {0}/base {1} --adapter {0}/plain_peft=half", 'what follows "=" must be a number'),
        ("convert {0}/base {1} --adapter {0}/plain_peft --combine linear", "--combine needs --adapters-only"),
        ("convert {0}/base {1} --adapters-only --adapter {0}/plain_peft --adapter {0}/dora_peft",
         "adapters with DoRA cannot be combined"),
        ("convert {0}/base {1} --base-model x/y", "it needs --adapters-only"),
    ],
)  # fmt: skip
def test_mistakes_are_user_errors(folder, tmp_path, command, sentence, capsys):
    with pytest.raises(SystemExit):
        zaya(command.format(folder, tmp_path / "none"))
    assert sentence in capsys.readouterr().err


def test_an_adapter_of_another_model_is_refused(folder, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        content = (folder / "plain_peft" / name).read_bytes()
        (tmp_path / "other" / name).write_bytes(content.replace(b"q_proj", b"Q_proj"))
    with pytest.raises(SystemExit):
        zaya(f"convert {folder}/base {tmp_path}/none --adapter {tmp_path}/other")
    assert "it belongs to another model" in capsys.readouterr().err
