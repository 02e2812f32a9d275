"""Weights survive every conversion and back bit for bit."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from small_weights import (
    FULL,
    SLIDING,
    contents,
    random_config,
    random_variables,
    small_config,
    tensors_in,
    zaya,
)

import zaya_jax
from zaya_jax.checkpoint import load_run

FAST_SEEDS, SEEDS = 3, 8
DTYPES = ("float32", "bfloat16")


def _cases():
    for seed in range(SEEDS):
        marks = [] if seed < FAST_SEEDS else [pytest.mark.campaign]
        for dtype in DTYPES:
            yield pytest.param((seed, dtype), id=f"{seed}-{dtype}", marks=marks)


@pytest.fixture(params=_cases(), name="saved")
def fixture_saved(request, tmp_path):
    """Writes a random network in both layouts, in shards of a few tensors."""
    seed, dtype = request.param
    model, variables = zaya_jax.Zaya(random_config(seed)), random_variables(random_config(seed), seed, dtype)
    for layout in ("native", "legacy"):
        zaya_jax.save_pytorch(
            tmp_path / layout, model, variables, layout=layout, dtype=dtype, max_shard_bytes=4000
        )
    return tmp_path, model, variables


def assert_same(ours, theirs):
    """Compares bits: 0 and -0 differ."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(_bits(a), _bits(b)), ours, theirs)


def _bits(array):
    return np.asarray(array, np.float32).view(np.uint32)


@pytest.mark.parametrize("layout", ["native", "legacy"])
def test_through_memory(saved, layout):
    folder, model, variables = saved
    loaded, returned = zaya_jax.load_pytorch(folder / layout)
    assert_same(returned, variables)
    assert loaded.config.layer_types == model.config.layer_types
    if layout == "native":
        same = {"layer_pattern": model.config.layer_pattern}
        assert dataclasses.replace(loaded.config, **same) == model.config


def test_through_runs_and_the_other_layout(saved):
    folder, _, variables = saved
    for layout in ("native", "legacy"):
        zaya(f"convert {folder}/{layout} {folder}/run_{layout}")
        zaya(f"convert {folder}/run_{layout} {folder}/{layout}_again --layout {layout} --max-shard-size 4KB")
        assert tensors_in(folder / layout) == tensors_in(folder / f"{layout}_again")
        assert_same(load_run(folder / f"run_{layout}").variables, variables)
    zaya(f"convert {folder}/native {folder}/to_legacy --layout legacy --max-shard-size 4KB")
    zaya(f"convert {folder}/to_legacy {folder}/and_back --layout native --max-shard-size 4KB")
    assert tensors_in(folder / "legacy") == tensors_in(folder / "to_legacy")
    assert tensors_in(folder / "native") == tensors_in(folder / "and_back")
    assert (folder / "native/config.json").read_text() == (folder / "and_back/config.json").read_text()


def test_a_wide_type_is_narrowed_once(tmp_path):
    """Converting to bfloat16 and back rounds the weights once, and keeps the router biases."""
    config = small_config()
    variables = random_variables(config, 0)
    zaya_jax.save_pytorch(tmp_path / "wide", zaya_jax.Zaya(config), variables, dtype="float32")
    zaya(f"convert {tmp_path}/wide {tmp_path}/run --dtype bfloat16")
    returned = load_run(tmp_path / "run").variables
    rounded = jax.tree.map(
        lambda x: np.asarray(jax.numpy.asarray(x).astype("bfloat16"), np.float32), variables
    )
    assert_same(returned["params"], rounded["params"])
    assert_same(returned["router_bias"], variables["router_bias"])


@pytest.mark.parametrize("pattern", [(SLIDING,), (FULL, FULL, SLIDING)])
def test_windows_have_the_definition_of_each_layout(tmp_path, pattern):
    """The legacy window is smaller by one because it excludes the current token ([legacy], the converter to
    [HF]).
    """
    config = small_config(layer_pattern=pattern, sliding_window=5)
    zaya_jax.save_pytorch(
        tmp_path / "legacy", zaya_jax.Zaya(config), random_variables(config, 0), layout="legacy"
    )
    text = (tmp_path / "legacy" / "config.json").read_text()
    assert '"sliding_window"' not in text
    assert json.loads(text)["swa_layers"][4:6] == [4, 0]
    model, _ = zaya_jax.load_pytorch(tmp_path / "legacy")
    assert (model.config.sliding_window, model.config.layer_types) == (5, config.layer_types)


def test_the_embedding_is_converted_in_parts(tmp_path, monkeypatch):
    """Of a large vocabulary only some rows are in memory; the last part is shorter."""
    monkeypatch.setattr("zaya_jax.convert.pytorch.layouts.SLICE_BYTES", 20 * 4 * 16)
    config = small_config(vocab_size=71, lm_head_bias=True)  # 4 parts of 15 rows, one of 11
    variables = random_variables(config, 0)
    zaya_jax.save_pytorch(tmp_path / "a", zaya_jax.Zaya(config), variables, dtype="float32")
    zaya(f"convert {tmp_path}/a {tmp_path}/run")
    parts = sorted((tmp_path / "run/checkpoints/0/weights/params.embedding.table").iterdir())
    assert len(parts) == 1 + 5
    assert_same(load_run(tmp_path / "run").variables, variables)
    zaya(f"convert {tmp_path}/run {tmp_path}/b")
    assert contents(tmp_path / "a")["model.safetensors"] == contents(tmp_path / "b")["model.safetensors"]
