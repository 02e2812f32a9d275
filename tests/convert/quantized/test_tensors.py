"""Quantized releases: values times scales bit for bit, in every form, and one sentence for what is
damaged."""

import json

import numpy as np
import pytest
from quantized_folders import (
    NETWORK,
    STACKS,
    Release,
    random_matrices,
    random_scales,
    section,
    weights_by_hand,
)
from small_weights import random_variables

import zaya_jax
from zaya_jax.convert.pytorch.folder import PytorchWeights, open_folder
from zaya_jax.convert.pytorch.layouts import weight_slices
from zaya_jax.errors import UserError

COUNT = NETWORK.num_experts
MX = section("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32)["quantization_config"]
FP8 = section()["quantization_config"]
INT8 = section("int-quantized", type="int")["quantization_config"]
TYPES = {"fp8": "F8_E4M3", "int8": "I8", "mxfp4": "U8"}


def add_stack(
    release: Release, layer: int, stack: str, name: str, *, ending: str, scales_ending: str
) -> None:
    """A stack of experts with one scale per output, or for 32 inputs."""
    module = f"model.layers.{layer}.mlp.experts.{stack}"
    rows, columns = STACKS[stack]
    values = random_matrices(name, (COUNT, rows, columns), layer)
    scales = random_scales(name, (COUNT, rows, columns // 32 if name == "mxfp4" else 1), layer)
    release.tensors[module + ending] = TYPES[name], values
    release.tensors[module + scales_ending] = ("U8" if name == "mxfp4" else "F32"), scales
    release.experts[layer, stack] = np.stack(
        [weights_by_hand(name, *each) for each in zip(values, scales, strict=False)]
    )


def add_experts(release: Release, layer: int, stack: str, name: str, modules: list[str]) -> None:
    """One tensor per expert and projection."""
    rows, columns = STACKS[stack]
    parts = len(modules)
    weights = []
    for expert in range(COUNT):
        for number, template in enumerate(modules):
            module = template.format(layer=layer, expert=expert, stage=2 * layer + 1)
            seed = 100 * layer + 10 * expert + number
            values = random_matrices(name, (rows // parts, columns), seed)
            scales = random_scales(name, (rows // parts, columns // 32 if name == "mxfp4" else 1), seed)
            release.tensors[module + (".weight_packed" if name == "mxfp4" else ".weight")] = (
                TYPES[name],
                values,
            )
            release.tensors[module + ".weight_scale"] = ("U8" if name == "mxfp4" else "F32"), scales
            weights.append(weights_by_hand(name, values, scales))
    release.experts[layer, stack] = np.stack(weights).reshape(COUNT, rows, columns)


def read(folder) -> dict[tuple[int, str], np.ndarray]:
    """Experts' matrices of a folder [E, R, C], as a conversion reads them, by layer and name."""
    found: dict[tuple[int, str], list[np.ndarray]] = {}
    with PytorchWeights(open_folder(folder)) as weights:
        for each in weight_slices(weights.config):
            if "experts" in each.path:
                array = weights.read(each)  # [D, Q, F] or [F, D]
                name = each.path.rpartition("/")[2]
                found.setdefault((each.start[0], name), []).append(array.reshape(array.shape[0], -1).T)
    return {key: np.stack(matrices) for key, matrices in found.items()}


def assert_bitwise(release: Release) -> None:
    actual = read(release.folder)
    assert actual.keys() == release.experts.keys()
    for key, expected in release.experts.items():
        bits = [np.ascontiguousarray(x.astype(np.float32)).view(np.uint32) for x in (actual[key], expected)]
        np.testing.assert_array_equal(*bits, err_msg=str(key))


FORMS = {
    "Zyphra's FP8": ("fp8", "", ".weight_scale", FP8),
    "fp8 with an ending": ("fp8", ".weight", ".weight_scale", FP8),
    "transformers' fp8": ("fp8", "", "_scale_inv", {"quant_method": "fp8"}),
    "int8": ("int8", "", ".weight_scale", INT8),
    "Zyphra's MXFP4": ("mxfp4", ".weight_packed", ".weight_scale", MX),
    "packed without an ending": ("mxfp4", "_packed", "_scale", MX),
}


@pytest.mark.parametrize("form", FORMS)
def test_stacks_are_values_times_scales(tmp_path, form):
    name, ending, scales_ending, config = FORMS[form]
    release = Release(tmp_path / "release")
    for layer in range(NETWORK.num_hidden_layers):
        for stack in STACKS:
            add_stack(release, layer, stack, name, ending=ending, scales_ending=scales_ending)
    release.save(config)
    assert_bitwise(release)


@pytest.mark.parametrize("layout", ["native", "legacy"])
@pytest.mark.parametrize(("name", "config"), [("fp8", FP8), ("int8", INT8), ("mxfp4", MX)])
def test_experts_one_by_one(tmp_path, name, config, layout):
    release = Release(tmp_path / "release", layout=layout)
    expert = "model.layers.{layer}.mlp.experts.{expert}."
    modules = {
        "gate_up_proj": [expert + "gate_proj", expert + "up_proj"],
        "down_proj": [expert + "down_proj"],
    }
    if layout == "legacy":
        local = "model.layers.{stage}.zaya_block.experts.local_experts.{expert}."
        modules = {"gate_up_proj": [local + "linear_fc1"], "down_proj": [local + "linear_fc2"]}
    for layer in range(NETWORK.num_hidden_layers):
        for stack, templates in modules.items():
            add_experts(release, layer, stack, name, templates)
    release.save(config)
    assert_bitwise(release)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_scales_of_blocks(tmp_path, dtype):
    """Blocks of 48 x 40 do not divide 64 x 64 or 64 x 32."""
    release = Release(tmp_path / "release")
    for layer in range(NETWORK.num_hidden_layers):
        for stack, (rows, columns) in STACKS.items():
            module = f"model.layers.{layer}.mlp.experts.{stack}"
            values = random_matrices("fp8", (COUNT, rows, columns), layer)
            scales = random_scales("fp8", (COUNT, -(-rows // 48), -(-columns // 40)), layer)
            stored = scales
            if dtype == "BF16":
                stored = (scales.view(np.uint32) >> 16).astype(np.uint16)
                scales = (stored.astype(np.uint32) << 16).view(np.float32)
            release.tensors[module] = "F8_E4M3", values
            release.tensors[module + ".weight_scale_inv"] = dtype, stored
            spread = np.repeat(np.repeat(scales, 48, axis=1), 40, axis=2)[:, :rows, :columns]
            ones = np.ones((COUNT, rows, 1))
            plain = np.stack([weights_by_hand("fp8", *each) for each in zip(values, ones, strict=False)])
            release.experts[layer, stack] = plain * spread
    release.save({"quant_method": "fp8", "weight_block_size": [48, 40]})
    assert_bitwise(release)


def fp8_release(folder) -> Release:
    release = Release(folder)
    for layer in range(NETWORK.num_hidden_layers):
        for stack in STACKS:
            add_stack(release, layer, stack, "fp8", ending="", scales_ending=".weight_scale")
    return release


DOWN = "model.layers.1.mlp.experts.down_proj"


def change(name: str, function):
    def apply(release: Release) -> None:
        dtype, values = release.tensors[name]
        release.tensors[name] = dtype, function(values)

    return apply


def retype(name: str, dtype: str):
    def apply(release: Release) -> None:
        release.tensors[name] = dtype, release.tensors[name][1]

    return apply


def remove(name: str):
    return lambda release: release.tensors.pop(name)


SCALES = DOWN + ".weight_scale"


def with_scale(value: float):
    return change(SCALES, lambda x: np.where(np.arange(64)[:, None] == 3, value, x).astype(np.float32))


DAMAGED = {
    "truncated scales": (
        change(SCALES, lambda x: x[:, :-1]),
        r"down_proj.weight_scale has shape \[3, 63, 1\]; it must be \[3, 64, 1\] or \[3, 64\]",
    ),
    "scales of another expert count": (
        change(SCALES, lambda x: x[:2]),
        r"weight_scale has shape \[2, 64, 1\]; it must be \[3, 64, 1\]",
    ),
    "no scales": (remove(SCALES), "down_proj has no scales; .*weight_scale is missing"),
    "values of another width": (
        change(DOWN, lambda x: x[:, :, :-2]),
        r"down_proj has shape \[3, 64, 30\]; it must be \[3, 64, 32\], because the weights are fp8 by",
    ),
    "a scale that is not a number": (
        with_scale(np.nan),
        "weight_scale of matrix 0 has a scale that is not a number",
    ),
    "an infinite scale": (with_scale(np.inf), "weight_scale of matrix 0 has a scale that is not a number"),
    "scales of integers": (
        retype(SCALES, "U32"),
        "is of type U32; scales of fp8 must be of type F32 or BF16",
    ),
    "integers with a config of floats": (
        retype(DOWN, "I8"),
        "down_proj is of type I8, but the quantization config only has fp8 by channel",
    ),
    "another float of 8 bits": (retype(DOWN, "F8_E5M2"), "down_proj is of type F8_E5M2, which is not"),
    "a tensor too many": (
        lambda release: release.tensors.update({DOWN + ".weight_zero_point": ("U8", np.zeros(3, np.uint8))}),
        "1 tensor unknown: .*weight_zero_point",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_one_sentence(tmp_path, name):
    damage, sentence = DAMAGED[name]
    release = fp8_release(tmp_path / "release")
    damage(release)
    release.save(FP8)
    with pytest.raises(UserError, match=sentence) as caught:
        read(release.folder)
    assert "\n" not in str(caught.value)


def test_quantized_values_without_a_config(tmp_path):
    release = fp8_release(tmp_path / "release")
    release.save(None)
    with pytest.raises(UserError, match=r"is quantized: .*F8_E4M3.* has no quantization_config"):
        open_folder(release.folder)


def test_an_expert_without_quantized_weights_is_named(tmp_path):
    release = Release(tmp_path / "release")
    expert = "model.layers.{layer}.mlp.experts.{expert}."
    for layer in range(2):
        add_experts(release, layer, "gate_up_proj", "fp8", [expert + "gate_proj", expert + "up_proj"])
        add_experts(release, layer, "down_proj", "fp8", [expert + "down_proj"])
    for ending in (".weight", ".weight_scale"):
        release.tensors.pop("model.layers.1.mlp.experts.2.up_proj" + ending)
    release.save(FP8)
    with pytest.raises(UserError, match=r"layers.1.mlp.experts.2.up_proj has no quantized weights, although"):
        read(release.folder)


def test_nan_of_mxfp4_scales(tmp_path):
    release = Release(tmp_path / "release")
    for layer in range(2):
        for stack in STACKS:
            add_stack(release, layer, stack, "mxfp4", ending=".weight_packed", scales_ending=".weight_scale")
    release.tensors[DOWN + ".weight_scale"][1][2, 5, 0] = 255
    release.save(MX)
    with pytest.raises(
        UserError, match=r"down_proj.weight_scale of matrix 2 has a scale that is not a number"
    ):
        read(release.folder)


def test_a_config_without_quantized_tensors(tmp_path):
    folder = tmp_path / "float"
    zaya_jax.save_pytorch(folder, zaya_jax.Zaya(NETWORK), random_variables(NETWORK, 0))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    with pytest.raises(UserError, match=r"quantized \(fp8 by channel\), but no tensor has quantized values"):
        open_folder(folder)
