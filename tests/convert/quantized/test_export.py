"""Exports with quantized experts: their form is compressed-tensors', and everything else keeps its bits."""

import json

import numpy as np
import pytest
from quantized_folders import NETWORK, by_hand, plausible
from small_weights import contents, random_variables, small_config, tensors_in, zaya

import zaya_jax
from zaya_jax import cli
from zaya_jax.convert.pytorch.folder import PytorchWeights, open_folder
from zaya_jax.convert.pytorch.layouts import weight_slices
from zaya_jax.convert.quantized.codecs import CODECS, QuantizedValues
from zaya_jax.errors import UserError

VALUES = {"fp8": (".weight", "F8_E4M3"), "int8": (".weight", "I8"), "mxfp4": (".weight_packed", "U8")}
NUMPY = {"F8_E4M3": np.uint8, "I8": np.int8, "U8": np.uint8, "F32": np.float32}
EXPERT = "model.layers.1.mlp.experts.2."


@pytest.fixture(scope="module", name="root")
def fixture_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("exports")
    plausible(root / "source")
    for name in CODECS:
        zaya(f"convert {root}/source {root}/{name} --quantize={name}")
        zaya(f"convert {root}/source {root}/{name}-stacked --quantize={name} --expert-tensors=stacked")
        zaya(f"convert {root}/source {root}/{name}-legacy --quantize={name} --layout=legacy")
    zaya(f"convert {root}/source {root}/embedding --quantize=fp8 --quantize-embedding")
    return root


def array(tensors, name: str) -> np.ndarray:
    dtype, shape, raw = tensors[name]
    return np.frombuffer(raw, NUMPY[dtype]).reshape(shape)


def read_all(folder) -> list[np.ndarray]:
    with PytorchWeights(open_folder(folder)) as weights:
        return [np.asarray(weights.read(each), np.float32) for each in weight_slices(weights.config)]


@pytest.mark.parametrize("name", CODECS)
def test_one_tensor_per_expert_and_projection(root, name):
    tensors = tensors_in(root / name)
    ending, dtype = VALUES[name]
    columns = 32 if name == "mxfp4" else 64
    scales = [32, 2] if name == "mxfp4" else [32, 1]
    for projection in ("gate_proj", "up_proj"):
        assert tensors[EXPERT + projection + ending][:2] == (dtype, [32, columns])
        assert tensors[EXPERT + projection + ".weight_scale"][1] == scales
    assert not [each for each in tensors if "gate_up_proj" in each]


@pytest.mark.parametrize("name", CODECS)
def test_everything_else_keeps_its_bits(root, name):
    before, after = tensors_in(root / "source"), tensors_in(root / name)
    kept = [each for each in before if ".experts." not in each]
    assert len(kept) == len(before) - 2 * NETWORK.num_hidden_layers  # without a stack of each kind
    assert {each: after[each] for each in kept} == {each: before[each] for each in kept}
    assert all(".experts." in each for each in after.keys() - before.keys())


@pytest.mark.parametrize("name", CODECS)
def test_gate_is_the_first_half(root, name):
    """The weights by hand are near those of transformers' stack: gate above up."""
    stack = np.frombuffer(
        tensors_in(root / "source")["model.layers.1.mlp.experts.gate_up_proj"][2], np.uint16
    )
    expected = (stack.astype(np.uint32) << 16).view(np.float32).reshape(3, 64, 64)[2]
    tensors = tensors_in(root / name)
    parts = [
        by_hand(name, QuantizedValues(array(tensors, EXPERT + each + VALUES[name][0]),
                                      array(tensors, EXPERT + each + ".weight_scale")))
        for each in ("gate_proj", "up_proj")
    ]  # fmt: skip
    error = np.concatenate(parts) - expected
    # Half a unit in the last place of values near the largest: 2^-4 of E4M3, 1/254 of int8, a quarter of
    # E2M1.
    bound = {"fp8": 2.0**-4, "int8": 1 / 254, "mxfp4": 0.25}[name]
    assert np.abs(error).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize("name", CODECS)
def test_forms_have_the_same_weights(root, name):
    plain, *others = (read_all(root / each) for each in (name, f"{name}-stacked", f"{name}-legacy"))
    for other in others:
        for one, two in zip(plain, other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_zyphras_names(root):
    fp8, mxfp4 = tensors_in(root / "fp8-stacked"), tensors_in(root / "mxfp4-stacked")
    module = "model.layers.0.mlp.experts.gate_up_proj"
    assert fp8[module][:2] == ("F8_E4M3", [3, 64, 64])
    assert fp8[module + ".weight_scale"][:2] == ("F32", [3, 64, 1])
    assert mxfp4[module + ".weight_packed"][:2] == ("U8", [3, 64, 32])
    assert mxfp4[module + ".weight_scale"][:2] == ("U8", [3, 64, 2])


def decompressed(folder, name: str) -> dict[str, np.ndarray]:
    """Weights of the experts by the package compressed-tensors, from config.json alone."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    config = QuantizationConfig.model_validate(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    modules: dict[str, dict] = {}
    for key, value in load_file(folder / "model.safetensors").items():
        module, _, part = key.rpartition(".")
        if ".experts." in key:
            modules.setdefault(module, {})[part] = value
    return {
        key: compressor.decompress(state, scheme)["weight"].float().numpy() for key, state in modules.items()
    }


@pytest.mark.parametrize("name", CODECS)
def test_the_package_has_the_same_values(root, name):
    pytest.importorskip("compressed_tensors")
    theirs, ours = decompressed(root / name, name), tensors_in(root / name)
    assert len(theirs) == 2 * 3 * 3
    for module, expected in theirs.items():
        parts = (array(ours, module + ending) for ending in (VALUES[name][0], ".weight_scale"))
        np.testing.assert_array_equal(CODECS[name].decode(QuantizedValues(*parts)), expected, err_msg=module)


def test_the_package_reads_the_ignore_list(root):
    match = pytest.importorskip("compressed_tensors.utils.match")
    config = json.loads((root / "fp8" / "config.json").read_text())["quantization_config"]
    kept = {name.rpartition(".")[0] for name in tensors_in(root / "source") if ".experts." not in name}
    ignored = {name for name in kept if any(match.match_name(name, each) for each in config["ignore"])}
    assert ignored == kept
    assert not match.match_name("model.layers.0.mlp.experts.0.gate_proj", config["ignore"][0])


def test_an_embedding_of_8_bits(root):
    tensors = tensors_in(root / "embedding")
    values, scales = (
        array(tensors, "model.embed_tokens" + ending) for ending in (".weight", ".weight_scale")
    )
    assert (values.dtype, scales.shape) == (np.int8, (264, 1))
    raw = np.frombuffer(tensors_in(root / "source")["model.embed_tokens.weight"][2], np.uint16)
    expected = (raw.astype(np.uint32) << 16).view(np.float32).reshape(264, 64)
    # Half a step, and a little for the quotient's rounding.
    assert (np.abs(values * scales - expected) <= 0.5001 * scales).all()
    assert np.abs(values).max(axis=1).min() == 127


def test_the_card_has_errors_by_layer(root):
    card = (root / "mxfp4" / "README.md").read_text()
    rows = [line for line in card.splitlines() if "_proj |" in line]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {layer}", stack] for layer in range(2) for stack in ("down_proj", "gate_up_proj")
    ]
    errors = [float(row.split(" | ")[2].rstrip("%")) for row in rows]
    # Values of 4 bits with two digits: about a tenth.
    assert all(8 < error < 14 for error in errors)
    assert "The loss was not measured" in card
    with pytest.raises(SystemExit):
        cli.main(["convert", str(root / "source"), str(root / "mxfp4"), "--quantize=mxfp4"])


def experts(folder, layer: int, stack: str) -> np.ndarray:
    with PytorchWeights(open_folder(folder)) as weights:
        slices = [each for each in weight_slices(weights.config) if each.path == f"layers/experts/{stack}"]
        return np.stack([weights.read(each) for each in slices if each.start[0] == layer]).astype(np.float64)


@pytest.mark.parametrize("name", CODECS)
def test_errors_are_those_of_float64(root, name):
    card = (root / name / "README.md").read_text()
    for layer, stack, *errors in (line.split(" | ") for line in card.splitlines() if "_proj |" in line):
        number = int(layer.strip("| "))
        before, after = (experts(folder, number, stack) for folder in (root / "source", root / name))
        expected = [
            np.linalg.norm(after - before) / np.linalg.norm(before),
            np.abs(after - before).max() / np.abs(before).max(),
        ]
        actual = [float(each.strip("%| ")) / 100 for each in errors]
        # Printed with five decimals.
        np.testing.assert_allclose(actual, expected, atol=0.51e-5)


def test_checksums_are_those_of_the_card_too(root, capsys):
    zaya(f"convert {root}/source {root}/fp8 --quantize=fp8 --verify")
    assert "other values are bitwise equal, and all files match" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_a_quantized_folder_becomes_a_run(root, tmp_path, name, capsys):
    zaya(f"convert {root}/{name}-stacked {tmp_path}/run --dtype float32 --verify")
    assert "is bitwise equal" not in capsys.readouterr().err
    zaya(f"convert {tmp_path}/run {tmp_path}/back --layout native")
    expected, actual = read_all(root / name), read_all(tmp_path / "back")
    for one, two in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(one, two)


def test_an_interrupted_export_has_the_same_bytes(root, tmp_path, monkeypatch):
    """The scales are in another file than the values, which the first attempt has written."""
    from zaya_jax.convert import stream

    words = (
        f"convert {root}/source {tmp_path}/out --quantize=mxfp4 --expert-tensors=stacked --max-shard-size 3KB"
    )
    commit, left = stream.commit_file, [6]

    def fail(*arguments):
        left[0] -= 1
        if left[0] < 0:
            arguments[0].close()
            raise OSError(28, "No space left on device")
        commit(*arguments)

    monkeypatch.setattr(stream, "commit_file", fail)
    with pytest.raises(SystemExit, match="2"):
        zaya(words)
    monkeypatch.undo()
    zaya(words)
    zaya(words.replace("/out", "/whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_rows_that_blocks_do_not_divide(tmp_path):
    config = small_config(hidden_size=64, moe_intermediate_size=24)
    zaya_jax.save_pytorch(tmp_path / "source", zaya_jax.Zaya(config), random_variables(config, 0))
    with pytest.raises(SystemExit) as leaving:
        zaya(f"convert {tmp_path}/source {tmp_path}/out --quantize=mxfp4")
    assert leaving.value.code == 2
    assert not (tmp_path / "out").exists()


def test_nan_is_refused(tmp_path, capsys):
    variables = random_variables(NETWORK, 0)
    variables["params"]["layers"]["experts"]["down_proj"][1, 2, 3, 4] = np.nan
    zaya_jax.save_pytorch(tmp_path / "source", zaya_jax.Zaya(NETWORK), variables)
    with pytest.raises(SystemExit):
        zaya(f"convert {tmp_path}/source {tmp_path}/out --quantize=int8")
    sentence = (
        "layers/experts/down_proj[1, 2] has 1 values that are NaN or infinite, which int8 cannot represent"
    )
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--text README.md", "--text needs --quantize=fp8|int8|mxfp4"),
        ("--quantize-embedding", "--quantize-embedding needs --quantize="),
        ("--expert-tensors=stacked", "--expert-tensors needs --quantize="),
        ("--quantize=fp8 --layout zaya", "--quantize writes a PyTorch folder"),
        ("--quantize=fp8 --adapters-only", "--quantize and --adapters-only cannot be combined"),
    ],
)
def test_options_that_do_not_belong_together(root, capsys, words, sentence):
    with pytest.raises(SystemExit):
        zaya(f"convert {root}/source {root}/other {words}")
    assert sentence in capsys.readouterr().err


def test_a_source_that_is_quantized_is_read(root, tmp_path):
    zaya(f"convert {root}/mxfp4 {tmp_path}/int8 --quantize=int8")
    with pytest.raises(UserError, match="does not exist"):
        open_folder(tmp_path / "missing")
    before, after = read_all(root / "mxfp4"), read_all(tmp_path / "int8")
    relative = [
        np.linalg.norm(x - y) / np.linalg.norm(x) for x, y in zip(before, after, strict=True) if x.ndim == 3
    ]
    assert max(relative) < 0.02
