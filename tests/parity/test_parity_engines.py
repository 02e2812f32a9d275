"""SGLang's reader of ZAYA1 accepts our export: its config, and each weight by the name that it expects.

Its files are read where the package is installed (`pip install --no-deps sglang` is enough) and run on fakes
of its layers, which have the same weights and compute nothing: kernels need a GPU, names do not.
"""

import importlib.util
import json
import logging
import pathlib
import sys
import types
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from huggingface_reference import build_released
from torch import nn

import zaya_jax

UNREAD = "model.layers.1.zaya_block.router.router_states_scale"
CONFIG, MODEL = "sglang.srt.configs.zaya", "sglang.srt.models.zaya"

SAME_VALUES = {
    "num_query_groups": "num_key_value_heads",
    "zaya_mlp_expansion": "router_hidden_size",
    "norm_epsilon": "rms_norm_eps",
} | {
    name: name
    for name in (
        "num_attention_heads", "head_dim", "num_experts", "hidden_size", "vocab_size", "rope_theta",
        "partial_rotary_factor", "cca_time0", "cca_time1", "lm_head_bias",
    )
}  # fmt: skip
"""Fields of SGLang's config, and what they are called in ours."""


class Linear(nn.Module):
    """The weights of each of SGLang's linear layers on one device."""

    def __init__(self, columns, rows, *, bias=True, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, columns), torch.nan))
        if bias:
            self.bias = nn.Parameter(torch.full((rows,), torch.nan))


class Embedding(nn.Module):
    def __init__(self, rows, columns, *, bias=False, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, columns), torch.nan))
        if bias:
            self.bias = nn.Parameter(torch.full((rows,), torch.nan))

    def tie_weights(self, embedding):
        self.weight = embedding.weight
        return self


class Norm(nn.Module):
    def __init__(self, width, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), torch.nan))


class FusedMoE(nn.Module):
    """All experts as two arrays, gates before ups in the first."""

    def __init__(self, *, num_experts, hidden_size, intermediate_size, **_):
        super().__init__()
        self.w13_weight = nn.Parameter(
            torch.full((num_experts, 2 * intermediate_size, hidden_size), torch.nan)
        )
        self.w2_weight = nn.Parameter(torch.full((num_experts, hidden_size, intermediate_size), torch.nan))

    def weight_loader(self, param, loaded, name, *, shard_id, expert_id):
        half = param.shape[1] // 2
        rows = {"w1": slice(0, half), "w3": slice(half, None), "w2": slice(None)}[shard_id]
        copy(param.data[expert_id, rows], loaded)


def copy(param, loaded):
    assert param.shape == loaded.shape
    param.data.copy_(loaded)


ONE_DEVICE = types.SimpleNamespace(
    tp_size=1, attn_tp_size=1, pp_group=types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
)
STAND_INS = {
    "ColumnParallelLinear": Linear, "ReplicatedLinear": Linear, "RowParallelLinear": Linear,
    "VocabParallelEmbedding": Embedding, "ParallelLMHead": Embedding, "RMSNorm": Norm,
    "get_moe_impl_class": lambda _: FusedMoE, "default_weight_loader": copy,
    "get_parallel": lambda: ONE_DEVICE, "resolve_linear_parallel_group": lambda _: (0, 1),
    "add_prefix": lambda name, prefix: f"{prefix}.{name}", "append_stages": lambda stages: (None,),
    "make_pp_layers": lambda number, make, *, prefix, **_: (
        nn.ModuleList(make(i, f"{prefix}.{i}") for i in range(number)), 0, number
    ),
}  # fmt: skip


class StandIn(types.ModuleType):
    """A module of SGLang that has every attribute."""

    __path__ = ()

    def __getattr__(self, name):
        return STAND_INS.get(name) or mock.MagicMock(name=name)


class Finder:
    """Provides SGLang's two files about ZAYA1 unchanged, and fakes of all others."""

    def __init__(self, root):
        self._root = root

    def find_spec(self, name, path=None, target=None):
        del path, target
        if name in (CONFIG, MODEL):
            file = self._root.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "sglang" else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's config and model of ZAYA1."""
    actual = importlib.util.find_spec("sglang")
    if actual is None or actual.origin is None:
        pytest.skip("no sglang here")
    root = pathlib.Path(actual.origin).parent
    if not (root / "srt/models/zaya.py").is_file():
        pytest.skip("this sglang has no ZAYA1")
    monkeypatch.setattr(sys, "meta_path", [Finder(root), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module(CONFIG), importlib.import_module(MODEL)
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def legacy_config(module, pair, folder):
    """SGLang's config of what we export into a folder."""
    zaya_jax.save_pytorch(
        folder / "out", zaya_jax.Zaya(pair.config), pair.variables, layout="legacy", dtype="float32"
    )
    return module.ZayaConfig(**json.loads((folder / "out/config.json").read_text()))


# By its own config, which sets a field that transformers will remove.
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("fields", [{}, {"num_hidden_layers": 3, "num_experts": 3}])
def test_sglang_finds_each_weight_of_an_export(fields, sglang, tmp_path, caplog):
    config_module, model_module = sglang
    pair = build_released(0, **fields)
    config = legacy_config(config_module, pair, tmp_path)
    values = json.loads((tmp_path / "out/config.json").read_text())
    ours = pair.config
    assert config.model_type == values["model_type"]
    assert values["architectures"] == [model_module.EntryClass.__name__]
    assert config.num_hidden_layers == 2 * ours.num_hidden_layers  # stages
    for theirs, name in SAME_VALUES.items():
        assert getattr(config, theirs) == getattr(ours, name), theirs
    assert config.ffn_hidden_size == 2 * ours.moe_intermediate_size

    model = model_module.EntryClass(config)
    tensors = {
        name: tensor
        for file in sorted((tmp_path / "out").glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }
    with caplog.at_level(logging.WARNING):
        loaded = model.load_weights(iter(tensors.items()))
    assert not caplog.records, caplog.records[0].getMessage()
    assert not [name for name, tensor in model.state_dict().items() if torch.isnan(tensor).any()]
    # The first router has no predecessor: its scale is unused, and in no checkpoint.
    assert dict(model.named_parameters()).keys() - loaded == {UNREAD}
    check_values(model, tensors)


def check_values(model, tensors):
    """Compares sums of squares: every written weight is loaded, none twice or truncated."""
    tied = "lm_head.weight"
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in (tied, UNREAD)}
    given = sum(float(tensor.double().square().sum()) for name, tensor in tensors.items())
    held = sum(float(tensor.double().square().sum()) for tensor in state.values())
    np.testing.assert_allclose(held, given, rtol=1e-9)


# By its own config, which sets a field that transformers will remove.
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
def test_sglang_ignores_the_bias_of_the_head(sglang, tmp_path):
    """It skips all names of a tied head; the docs say so, until this fails."""
    pair = build_released(0, lm_head_bias=True)
    model = sglang[1].EntryClass(legacy_config(sglang[0], pair, tmp_path))
    assert "lm_head.bias" not in model.load_weights(iter([("lm_head.bias", model.lm_head.bias.detach())]))
